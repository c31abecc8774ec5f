"""A script-managed job under HTCondor's own startd and starter, by the example for VirtualBox and its stand-in."""

import shutil
from pathlib import Path

import pytest
from tests.lab.guest import make_guest
from tests.lab.namespace import LAB, REPOSITORY
from tests.lab.pool import OF_ALL, Pool
from tests.lab.programs import a_program
from tests.lab.vmware import convert
from tests.system.pool.outcomes import CHECKPOINT, assert_counted, go_on_from_checkpoint, own_pool

pytestmark = pytest.mark.pool

SECONDS = 100
"""How long the guest counts: long enough to be interrupted after the starter's sleep of 30 s."""

HERE = f"{LAB}/virtualbox"
CONFIG = f"VM_TYPE = script\nVM_HYPERVISOR = virtualbox\nVM_SCRIPT = {HERE}/script\n"

SUBMIT = f"""\
{OF_ALL}vm_type = script
vm_memory = 64
+VMPARAM_vm_Disk = "disk.vmdk:sda:w:vmdk"
transfer_input_files = disk.vmdk
"""


def make_files(home: Path) -> None:
    convert(make_guest(home / "disk.raw", SECONDS), home / "disk.vmdk")


def install(pool: Pool) -> None:
    place = pool.directory / "virtualbox"
    place.mkdir()
    place.chmod(0o755)
    state = place / "state"
    state.mkdir()
    state.chmod(0o1777)
    for name in ("VBoxManage", "vmrun"):
        shutil.copyfile(REPOSITORY / "tests" / "lab" / name, place / name)
    a_program(place / "vbox", f'VBOX_STATE_DIR={HERE}/state exec python3 {HERE}/VBoxManage "$@"')
    text = (REPOSITORY / "config" / "scripts" / "virtualbox").read_text()
    a_program(place / "script", text.replace('VBOXMANAGE = "VBoxManage"', f'VBOXMANAGE = "{HERE}/vbox"'))


pool = own_pool("script", CONFIG, install)


def test_a_vacated_job_goes_on_from_its_checkpoint(pool: Pool) -> None:
    machine = pool.offering()
    assert machine["VM_Type"] == "script"
    assert machine["VM_HYPERVISORS"] == "virtualbox"
    assert machine["VM_virtualbox_ATTR_version"].startswith("7.")
    assert machine["VM_script_ATTR_checkpoint"] is True
    job = pool.submit("vacated", make_files, CHECKPOINT, SUBMIT)
    go_on_from_checkpoint(pool, job)
    assert_counted(job, SECONDS)
