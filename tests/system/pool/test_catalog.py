"""Images of the administrator's catalog in a real pool: the machine advertises them, and a job runs on one."""

from pathlib import Path

import classad2
import pytest
from tests.lab.guest import SECTOR, copying_sector
from tests.lab.namespace import LAB, VMGAHP
from tests.lab.pool import SUBMIT, USER, Pool
from tests.system.pool.outcomes import END, START, own_pool

from vmgahp.host.job_user import Identity
from vmgahp.images import iso

pytestmark = pytest.mark.pool

CATALOG = """\
[copier-1.0]
path = "copier.raw"
format = "raw"
description = "Copies a sector of the job's files to its data disk"
min_memory = 32

[gone]
path = "gone.qcow2"
format = "qcow2"
"""

INPUT = b"brought by condor_submit\r\n\0"

COMMANDS = """\
vm_disk = catalog:copier-1.0:vda:w
+VMPARAM_vm_Data_Disk = "vdb:16M:results.raw"
+VMPARAM_vm_Data_Files = "in.txt"
transfer_input_files = in.txt
requirements = stringListMember("copier-1.0", VM_Images)
"""


def prepare(pool: Pool) -> None:
    """The catalog's guest reads the sector in which the drive with the job's file has it."""
    images = pool.directory / "images"
    images.mkdir()
    iso.write(str(images), "same.iso", "JOBDATA", {"in.txt": INPUT}, Identity(0, 0), most_bytes=1 << 20)
    place = (images / "same.iso").read_bytes().index(INPUT)
    (images / "same.iso").unlink()
    (images / "copier.raw").write_bytes(copying_sector(0x82, place // SECTOR, 0x81).ljust(1 << 20, b"\0"))
    (images / "catalog.toml").write_text(CATALOG)


pool = own_pool("catalog", f"VM_CATALOG = {LAB}/images/catalog.toml\n", prepare)


def test_a_job_runs_on_an_image_of_the_machine_with_its_own_input_and_output(pool: Pool) -> None:
    pool.offering()
    assert pool.machine()["VM_Images"] == "copier-1.0", "and not what is gone"
    before = (pool.directory / "images/copier.raw").read_bytes()

    def brings(directory: Path) -> None:
        (directory / "in.txt").write_bytes(INPUT)

    job = pool.submit("copier", brings, COMMANDS)
    chosen = pool.submit("chosen", brings, COMMANDS + "transfer_output_files = results.raw, vm_console.log\n")
    job.wait_for_event("terminated", END)
    assert "brought by condor_submit" in (job.directory / "vm_console.log").read_text()
    with (job.directory / "results.raw").open("rb") as file:
        assert file.read(2 * SECTOR)[SECTOR:].startswith(INPUT)
    assert (job.directory / "vda-copier-1.0.qcow2").exists()
    assert (job.directory / "vm_catalog.json").exists()
    assert not (job.directory / "vm_data_files.iso").exists()
    assert (pool.directory / "images/copier.raw").read_bytes() == before
    # What is not asked for does not travel.
    chosen.wait_for_event("terminated", END)
    assert not (chosen.directory / "vda-copier-1.0.qcow2").exists()
    with (chosen.directory / "results.raw").open("rb") as file:
        assert file.read(2 * SECTOR)[SECTOR:].startswith(INPUT)


def test_a_change_is_advertised_without_a_restart(pool: Pool) -> None:
    began = pool.offering()["DaemonStartTime"]
    pool.run("truncate", "--size=1M", "/var/tmp/more.raw")
    for words, images in (
        (["add", "more", "/var/tmp/more.raw"], "copier-1.0,more"),
        (["remove", "more"], "copier-1.0"),
    ):
        assert "this machine offers now: " in pool.run(VMGAHP, "image", *words).stderr
        pool.wait_until(images, lambda images=images: pool.machine().get("VM_Images") == images, START)
    assert pool.machine()["DaemonStartTime"] == began


def test_condor_submit_leaves_the_name_of_an_image_alone(pool: Pool) -> None:
    directory = pool.directory / "jobs" / "dry"
    directory.mkdir()
    (directory / "in.txt").write_bytes(INPUT)
    (directory / "job.sub").write_text(SUBMIT.format(name="dry") + COMMANDS + "queue\n")
    inside = f"{LAB}/jobs/{directory.name}"
    pool.run("chown", "-R", USER, inside)
    pool.run("condor_submit", "-dry-run", "ad", "job.sub", user=USER, cwd=inside)
    ad = classad2.parseOne((directory / "ad").read_text())
    assert ad["VMPARAM_vm_Disk"] == "catalog:copier-1.0:vda:w"
    assert [path.rpartition("/")[2] for path in ad["TransferInput"].split(",")] == ["in.txt"]
