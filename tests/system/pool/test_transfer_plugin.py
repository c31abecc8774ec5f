"""The file transfer plugin, run by a real starter: a job's disk is an overlay of an image of the machine's.

And what `vmgahp submit` writes, read by a real condor_submit.
"""

import json

import classad2
import pytest
from tests.commands.submit.samples import SOURCES, write_sources
from tests.lab.guest import make_guest
from tests.lab.namespace import LAB, OUR_SERVER, VMGAHP
from tests.lab.pool import USER, Job, Pool
from tests.system.pool.outcomes import CHECKPOINT, END, START, assert_counted, go_on_from_checkpoint, own_pool

pytestmark = pytest.mark.pool

IMAGES = f"{LAB}/images"
PLUGIN = OUR_SERVER.replace("condor_vm-gahp", "vmgahp-image-plugin")

LONGER = 90
"""Seconds that the guest counts which is interrupted after the starter's sleep."""

SETTINGS = f"""
FILETRANSFER_PLUGINS = {PLUGIN}
ENABLE_URL_TRANSFERS = True
VM_IMAGE_DIRS = {IMAGES}
"""


def prepare(pool: Pool) -> None:
    (pool.directory / "images").mkdir()
    make_guest(pool.directory / "images/base.raw", 8)


pool = own_pool("plugin", SETTINGS, prepare)


def submit(pool: Pool, name: str, url: str, commands: str = "") -> Job:
    pool.offering()
    disk = f"vm_disk = disk.qcow2:hda:w:qcow2\ntransfer_input_files = {url}\n"
    return pool.submit(name, lambda _: None, disk + commands)


def test_the_machine_says_that_it_has_the_plugin(pool: Pool) -> None:
    assert {"nfs", "vmimage"} <= set(pool.offering()["HasFileTransferPluginMethods"].split(","))


def test_a_job_runs_on_an_overlay_and_the_overlay_comes_home(pool: Pool) -> None:
    before = (pool.directory / "images/base.raw").read_bytes()
    job = submit(pool, "overlay", f"nfs://{IMAGES}/base.raw:disk.qcow2")
    job.wait_for_event("terminated", END)
    home = job.directory / "disk.qcow2"
    look = ["qemu-img", "info", "--output=json", f"{LAB}/jobs/overlay/disk.qcow2"]
    info = json.loads(pool.run(*look).stdout)
    assert (info["backing-filename"], info["backing-filename-format"]) == (f"{IMAGES}/base.raw", "raw")
    # The guest counted to 8 on its disk, and nothing of that is in the base.
    pool.run("qemu-img", "convert", "-O", "raw", f"{LAB}/jobs/overlay/{home.name}", f"{LAB}/whole.raw")
    assert b"8\r\n" in (pool.directory / "whole.raw").read_bytes()[512:1024]
    assert (pool.directory / "images/base.raw").read_bytes() == before
    assert_counted(job, 8)


def test_a_vacated_job_goes_on_with_its_overlay_as_it_was(pool: Pool) -> None:
    """HTCondor runs the plugin at the second start too, when the overlay has come back from the spool."""
    make_guest(pool.directory / "images/longer.raw", LONGER)
    job = submit(pool, "vacated", f"nfs://{IMAGES}/longer.raw:disk.qcow2", CHECKPOINT)
    go_on_from_checkpoint(pool, job)
    assert_counted(job, LONGER)


def test_a_job_that_names_another_file_is_held_with_the_reason(pool: Pool) -> None:
    job = submit(pool, "elsewhere", "nfs:///etc/hostname:disk.qcow2")
    job.wait_for_event("held", START)
    assert "VM_IMAGE_DIRS" in job.reason()
    assert pool.machine()["HasVM"] is True


WRITTEN = {
    "libvirt-xml": "disk.qcow2:vda:w:qcow2,seed.iso:sda:r:iso",
    "ovf": "appliance-disk001.qcow2:hda:w:qcow2",
    "vmx": "machine.qcow2:sda:w:qcow2",
    "box": "box.img:vda:w:qcow2",
    "disk": "disk.qcow2:vda:w:qcow2,seed.iso:sda:r:iso",
}


@pytest.mark.parametrize("words", SOURCES, ids=lambda words: words[0])
def test_condor_submit_takes_what_vmgahp_submit_writes(pool: Pool, words: tuple[str, ...]) -> None:
    directory = pool.directory / "jobs" / f"submit-{words[0]}"
    directory.mkdir()
    write_sources(directory)
    inside = f"{LAB}/jobs/{directory.name}"
    pool.run("chown", "-R", USER, inside)
    pool.run(VMGAHP, "submit", *words, "-o", "job.sub", user=USER, cwd=inside)
    pool.run("condor_submit", "-dry-run", "ad", "job.sub", user=USER, cwd=inside)
    ad = classad2.parseOne((directory / "ad").read_text())
    assert ad["JobUniverse"] == 13
    assert ad["VMPARAM_vm_Disk"] == WRITTEN[words[0]]
    assert {path.rpartition("/")[2] for path in ad["TransferInput"].split(",")} == {
        entry.partition(":")[0] for entry in WRITTEN[words[0]].split(",")
    }
    assert ad["JobVMNetworking"] is True
    assert ad["JobVMMemory"] > 0
    if words[0] == "libvirt-xml":
        assert ad["VMPARAM_vm_NICs"] == "nat:52:54:00:aa:bb:01:virtio, bridge:52:54:00:aa:bb:02:e1000:down"
        assert ad["VMPARAM_vm_TPM"] is True
