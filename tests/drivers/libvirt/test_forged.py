"""Checkpoints and memory images that the job's user has written: none reaches the machine, and none takes it."""

import json
import os
import re
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import libvirt
import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import OTHER_MAC, USER_NETWORK, WANTS, Job, another_vm, done, running, until, vacate
from tests.lab.programs import a_program
from vmgahp import errors
from vmgahp.checkpoint import store
from vmgahp.checkpoint.memory_image import HEADER, MAGIC
from vmgahp.drivers.libvirt.life import guest

pytestmark = pytest.mark.libvirt

FIELDS = struct.Struct("=16s5I")
Forge = Callable[[bytes], bytes]


def forge_image(path: Path, forge: Forge) -> None:
    owner = path.stat()
    path.write_bytes(forge(path.read_bytes()))
    if os.getuid() == 0:
        os.chown(path, owner.st_uid, owner.st_gid)


def believable(job: Job, forge: Forge = bytes, xml: Callable[[str], str] = str, **facts: object) -> None:
    """Write another memory image and another XML into the checkpoint, and a manifest that says that they are right."""
    image, path = job.scratch / "vm_checkpoint.mem", job.scratch / "vm_checkpoint.json"
    forge_image(image, forge)
    manifest = json.loads(path.read_text())
    manifest["facts"] |= {"xml": xml(manifest["facts"]["xml"])} | facts
    for file in manifest["files"]:
        if file["role"] == "memory":
            size = image.stat().st_size
            with image.open("rb") as content:
                file |= {"size": size, "digest": store.sample(content.fileno(), size)}
    path.write_text(json.dumps(manifest))


def boots_afresh(job: Job, **settings: object) -> str:
    """A START that boots the guest anew and keeps the checkpoint aside: what the server's log says."""
    with running(job, WANTS, **settings) as peer:
        until(lambda: job.console().count("vmgahp guest up") == 2, "the guest boots again")
        log = peer.quit()
    assert (job.scratch / "vm_checkpoint.mem.refused-1").exists()
    return log


def with_head(image: bytes, **changes: int) -> bytes:
    names = "magic", "version", "length", "running", "number", "cookie"
    values = dict(zip(names, FIELDS.unpack_from(image), strict=True)) | changes
    return FIELDS.pack(*values.values()) + image[FIELDS.size :]


def with_emulator(image: bytes, program: Path) -> bytes:
    """The image with another emulator in the XML of its head, of the same length."""
    _, version, length, running, number, at = FIELDS.unpack_from(image)
    xml, rest = image[HEADER : HEADER + at - 1].decode(), image[HEADER + at : HEADER + length].rstrip(b"\0")
    before, _, after = xml.partition("<emulator>")
    made = f"{before}<emulator>{program}</emulator>{after.partition('</emulator>')[2]}".encode() + b"\0"
    head = FIELDS.pack(MAGIC, version, length, running, number, len(made)).ljust(HEADER, b"\0")
    return head + (made + rest).ljust(length, b"\0") + image[HEADER + length :]


@pytest.fixture
def program(job: Job) -> Path:
    """A program of the job's that leaves a file where anybody may write, should somebody run it."""
    (job.scratch / "traces").mkdir()
    (job.scratch / "traces").chmod(0o777)
    path = a_program(job.scratch / "run-me", f": > {job.scratch}/traces/$(id -un)\nexit 1")
    job.own(path)
    return path


def test_no_program_of_a_checkpoints_head_is_run(job: Job, program: Path) -> None:
    """libvirtd asks the emulator that an XML names what it can do, and takes the XML from the image."""
    vacate(job)
    believable(job, lambda image: with_emulator(image, program))
    with running(job, WANTS):
        pass
    assert not list(program.with_name("traces").iterdir())


def test_no_program_of_a_suspended_vms_head_is_run(job: Job, program: Path) -> None:
    with running(job) as peer:
        done(peer, "SUSPEND")
        forge_image(job.scratch / "vm_suspend.mem", lambda image: with_emulator(image, program))
        done(peer, "RESUME")
        assert peer.run("STATUS", 1)[-5] == "STATUS=Running"
    assert not list(program.with_name("traces").iterdir())


def unpackable(image: bytes) -> bytes:
    """An image that begins as if it was packed, and of which nothing comes."""
    return with_stream(with_head(image, number=5), b"\x28\xb5\x2f\xfd" + bytes(100))


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        # libvirtd would start a program to unpack it; gzip and QEMU then wait for each other.
        (lambda image: with_head(image, number=1), "it has the format gzip, and the settings here have raw or "),
        # QEMU waits for ever for a stream that does not begin.
        (unpackable, "it cannot be unpacked"),
    ],
    ids=["a format that the settings do not write", "nothing of QEMU's"],
)
def test_what_qemu_would_wait_for_is_refused_before_libvirtd_sees_it(job: Job, forge: Forge, said: str) -> None:
    vacate(job)
    believable(job, forge)
    assert said in boots_afresh(job)


def test_a_checkpoint_that_becomes_more_than_the_memory_is_refused(job: Job) -> None:
    """A page of a memory image is in it once; this one has zeroes for ever after the first of them."""
    vacate(job)

    def bomb(image: bytes) -> bytes:
        more = subprocess.Popen(["zstd", "-q", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert more.stdin
        sections = image[stream(image) :]
        begins = sections.index(b"pc.ram")
        written = []
        thread = threading.Thread(target=lambda: written.append(more.stdout.read()))  # type: ignore[union-attr]
        thread.start()
        more.stdin.write(sections[:begins])
        for _ in range(1 << 10):
            more.stdin.write(bytes(1 << 20))
        more.stdin.close()
        thread.join()
        assert more.wait() == 0
        return with_stream(with_head(image, number=5), written[0])

    believable(job, bomb)
    assert (job.scratch / "vm_checkpoint.mem").stat().st_size < 1 << 20
    boots_afresh(job)


def stream(image: bytes) -> int:
    """Where QEMU's own begins."""
    return HEADER + int(FIELDS.unpack_from(image)[2])


def with_stream(image: bytes, memory: bytes) -> bytes:
    return image[: stream(image)] + memory


STREAMS: dict[str, Forge] = {
    "cut off": lambda image: image[: (stream(image) + len(image)) // 2],
    "all ones": lambda image: with_stream(image, b"QEVM\0\0\0\3" + b"\xff" * (1 << 20)),
    "no text": lambda image: image.replace(b"\x03ram", b"\x03r\xed\xff").replace(b"pc.ram", b"pc.r\xed\xff"),
    "too long": lambda image: image[: stream(image) + 8] + image[stream(image) + 8 :] * 90,
}


@pytest.mark.parametrize("form", ["raw", "zstd"])
@pytest.mark.parametrize("memory", STREAMS)
def test_a_memory_that_qemu_does_not_take_is_the_jobs(job: Job, memory: str, form: str) -> None:
    """It may take one, such as one with more behind its end: what runs then the job could have had anyhow."""
    vacate(job)

    def forge(image: bytes) -> bytes:
        forged = STREAMS[memory](image)
        if form == "raw":
            return forged
        small = subprocess.run(["zstd", "-q", "-c"], input=forged[stream(forged) :], stdout=subprocess.PIPE, check=True)
        return with_stream(with_head(forged, number=5), small.stdout)

    believable(job, forge)
    with running(job, WANTS):
        pass


@pytest.mark.parametrize("machine", ["pc-i440fx-9999", "virt"])
def test_another_machine_type_is_the_jobs(job: Job, machine: str) -> None:
    vacate(job)
    believable(job, xml=lambda xml: re.sub("machine=['\"][^'\"]*['\"]", f"machine='{machine}'", xml))
    boots_afresh(job)


@pytest.fixture
def hanging_zstd(job: Job, monkeypatch: pytest.MonkeyPatch) -> int:
    """QEMU waits for what comes after the beginning, as long as nobody ends it; the number of the image's format."""
    path = a_program(job.scratch.parent / "zstd", "printf 'QEVM\\0\\0\\0\\3'\nexec sleep 1000")
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return 5


def test_a_restore_that_hangs_is_ended(job: Job, hanging_zstd: int) -> None:
    vacate(job)
    believable(job, lambda image: with_head(image, number=hanging_zstd))
    assert "was not restored from its saved memory within 20 s" in boots_afresh(job, VM_GAHP_REQ_TIMEOUT=30)


def test_a_resume_that_hangs_is_ended_and_the_vm_stays_saved(job: Job, hanging_zstd: int) -> None:
    with running(job, VM_GAHP_REQ_TIMEOUT=30) as peer:
        done(peer, "SUSPEND")
        image = job.scratch / "vm_suspend.mem"
        good = image.read_bytes()
        forge_image(image, lambda image: with_head(image, number=hanging_zstd))
        assert peer.run("RESUME", 1)[0] == "1"
        assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
        forge_image(image, lambda _: good)
        done(peer, "RESUME")
        assert peer.run("STATUS", 1)[-5] == "STATUS=Running"


def test_a_checkpoint_is_kept_where_no_guest_runs_without_it_either(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    vacate(job)
    sick = Mock(side_effect=errors.HypervisorFault("This machine is sick."))
    kept = {path.name: path.read_bytes() for path in job.scratch.iterdir() if path.name.startswith("vm_checkpoint")}
    with support.driving(job, log := [], WANTS) as (driver, ad):
        with monkeypatch.context() as patch:
            patch.setattr(guest.LibvirtGuest, "begin", sick)
            with pytest.raises(errors.HypervisorFault, match="sick"):
                driver.start(ad)
        assert {name: (job.scratch / name).read_bytes() for name in kept} == kept
        assert any("cannot be used: This machine is sick" in line for line in log)
        driver.start(ad).destroy()
    assert job.console().count("vmgahp guest up") == 1, "it went on"


def test_the_mac_address_of_another_vm_is_not_taken(job: Job, connection: "libvirt.virConnect") -> None:
    network = ("JobVMNetworking = true",)
    vacate(job, *network, **USER_NETWORK)
    believable(job, xml=lambda xml: re.sub("<mac address=['\"][^'\"]*['\"]", f"<mac address='{OTHER_MAC}'", xml))
    with (
        another_vm(connection, f"victim-of-{job.name}", support.nic_xml(OTHER_MAC)),
        running(job, WANTS, *network, **USER_NETWORK) as peer,
    ):
        assert OTHER_MAC not in job.domain().XMLDesc()
        assert f"its MAC address {OTHER_MAC} is that of another VM" in peer.quit()
