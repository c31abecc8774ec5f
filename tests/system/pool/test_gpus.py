"""GPUs that HTCondor assigns, from its own discovery to the PCI device, in a real pool.

No machine here has a GPU: condor_gpu_discovery simulates some, with PCI addresses at which there is nothing. So a job
ends at the look at its device.
"""

import re

import pytest
from tests.lab.guest import make_guest
from tests.lab.pool import Pool
from tests.system.pool.outcomes import START, own_pool

pytestmark = pytest.mark.pool

SETTINGS = """\
use feature : GPUs
GPU_DISCOVERY_EXTRA = -extra -simulate:2,3
VM_DEVICES = GPUs
"""
NO_DEVICE = re.compile(r"This machine has no PCI device (0000:4[0-2]:00\.0)\.")
"""The fault about a device, for one of the simulated ones (``condor_gpu_discovery -simulate:2,3 -properties``)."""


pool = own_pool("gpus", SETTINGS)


@pytest.mark.parametrize("number", [1, 2])
def test_a_job_is_given_the_gpus_of_its_slot(pool: Pool, number: int) -> None:
    # A fault of the machine takes it out of service for ten seconds, which is no death of the pool.
    pool.watched = False
    pool.offering()
    before = len(NO_DEVICE.findall(pool.daemon_log()))
    job = pool.submit(f"with-{number}", lambda home: make_guest(home / "guest.img", 1), f"request_gpus = {number}")
    pool.wait_until("the address of its GPU", lambda: len(NO_DEVICE.findall(pool.daemon_log())) > before, 2 * START)
    job.command("condor_rm")
    assert "held" not in job.events(), job.reason()
