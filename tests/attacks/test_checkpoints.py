"""Attacks by what comes back with a job: forged memory images, manifests, and checkpoints of others."""

import json
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import libvirt

from tests.attacks.ground import CANARIES
from tests.attacks.site import Site
from tests.attacks.support import BOTH, Mode, Must, Who, attack, each
from tests.domain.support import SCRIPTED
from tests.faults.host import URI
from vmgahp.checkpoint import store

MEMORY, MANIFEST = "vm_checkpoint.mem", "vm_checkpoint.json"

HEADS: dict[str, tuple[int, int]] = {
    **{f"version {number}": (16, number) for number in (0, 1, 3, 1 << 24, 0xFFFFFFFF)},
    **{f"length {number}": (20, number) for number in (0, 1, 4096, 1 << 24, 0x7FFFFFFF, 0xFFFFFFFF)},
    **{f"running {number}": (24, number) for number in (0, 2, 3, 0xFFFFFFFF)},
    **{f"format {number}": (28, number) for number in (1, 2, 3, 4, 5, 6, 7, 255, 1 << 24, 0xFFFFFFFF)},
    **{f"cookie at {number}": (32, number) for number in (1, 100, 65536, 0xFFFFFFFF)},
}
"""A number of the memory image's head: where, what."""


SUSPENDED = ("version 3", "length 0", "length 4294967295", "running 3", "format 1", "format 6", "cookie at 1")
"""Of these, before a RESUME."""


def _xml(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        facts = manifest["facts"]
        assert old in facts["xml"], old
        facts["xml"] = facts["xml"].replace(old, new)

    return change


def _fact(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["facts"].update({name: value})


def _field(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update({name: value})


def _file(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: [file.update({name: value}) for file in manifest["files"]]  # type: ignore[func-returns-value]


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        f"machine type {name}": _xml("machine='pc-i440fx-", f"machine='{name}-")
        for name in ("pc-i440fx-9999", "pc-q35", "none", "isapc", "x,accel=kvm", "../x", "microvm")
    },
    "a device more": _xml("</devices>", "<hostdev mode='subsystem' type='usb'/></devices>"),
    "QEMU's arguments": _xml(
        "</domain>", "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'/></domain>"
    ),
    "another's disk": _xml("guest.img", f"../../../..{CANARIES}/root"),
    "another emulator": _xml("<devices>", "<devices><emulator>/bin/sh</emulator>"),
    "a label": _xml("</domain>", "<seclabel type='none'/></domain>"),
    "an entity": _xml("<domain", "<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/shadow'>]><domain"),
    "XML that does not end": _xml("</domain>", ""),
    "XML of a mebibyte": _xml("</domain>", "<!--" + "x" * (1 << 20) + "--></domain>"),
    "100,000 elements": _xml("</domain>", "<a/>" * 100_000 + "</domain>"),
    **{
        f"UUID {value!r}"[:40]: _fact("uuid", value)
        for value in ("", "x", "00000000-0000-0000-0000-000000000000", 1, None, {})
    },
    **{f"UUID with {name}": _fact("uuid", value) for name, value in (("a path", "../../x"), ("a newline", "a\n"))},
    **{
        f"{name} {value!r}"[:40]: _field(name, value)
        for name, values in (
            ("cpu_seconds", (-1, 1e300, "x", None, float("nan"), float("inf"), [])),
            ("memory_mib", (0, -1, 1 << 40, 1.5, "16", None)),
            ("vcpus", (0, 255, -1, "1")),
            ("time", (-1, 1e300, None, "x")),
            ("format", (0, 1, 3, -1, "2", None)),
            ("driver", ("", "script", "../x", 1, None)),
            ("name", ("", "bob_lab_1.0", "x" * 5000, "a\nb", "../x", 1)),
            ("vm_type", ("simulated", "script", "xen", "", 1)),
            ("files", ([], {}, None, [1], [[]], "x")),
            ("facts", ({}, [], None)),
            ("unknown", (1,)),
        )
        for value in values
    },
    **{
        f"each file's {name} {value!r}"[:40]: _file(name, value)
        for name, values in (
            (
                "path",
                ("", "/", "..", "../x", str(CANARIES / "root"), "/proc/self/mem", "/dev/zero", "a\0b", "x" * 5000),
            ),
            ("role", ("", "disk", "memory", "backing", "x", 1)),
            ("size", (-1, 0, 1 << 63, 1 << 64, 1.5, None)),
            ("digest", ("", "x", "0" * 64, None)),
            ("format", ("", "qcow2", "nbd", "x" * 100, None)),
            ("device", ("", "vda", "../x", None)),
            ("mtime_ns", (-1, 1 << 70, None)),
            ("transferred", (None, 1, "x")),
            ("writable", (None, "x")),
        )
        for value in values
    },
}
"""What a manifest may say."""

RAW: dict[str, bytes] = {
    "nothing": b"", "no JSON": b"\xff\xfe\x00", "a list": b"[]", "a number": b"1e999999", "a string": b'"x"',
    "100,000 lists": b"[" * 100_000, "100,000 objects": b'{"a":' * 100_000,
    "a number of a million digits": b'{"format": ' + b"9" * 1_000_000 + b"}", "8 MiB": b" " * (8 << 20),
    "a field twice": b'{"format": 2, "format": 2}', "NULs": bytes(4096),
}  # fmt: skip

MEMORIES: dict[str, bytes] = {
    "nothing": b"", "its magic alone": b"LibvirtQemudSave", "half a save": b"LibvirtQemudPart".ljust(200, b"\0"),
    "a gzip bomb": b"\x1f\x8b" + bytes(1000), "noise": bytes(range(256)) * 64,
}  # fmt: skip


def checkpoint(site: Site) -> tuple[bytes, dict[str, Any]]:
    """A real one of this job's: its memory image and its manifest."""
    site.guest()
    site.done("START", "CHECKPOINT")
    site.stop()
    return site.path(MEMORY).read_bytes(), json.loads(site.path(MANIFEST).read_bytes())


def signed(manifest: dict[str, Any], memory: bytes) -> bytes:
    """The manifest with the memory image's size and the hash of its samples."""
    copy: dict[str, Any] = json.loads(json.dumps(manifest))
    with tempfile.TemporaryFile() as content:
        content.write(memory)
        content.flush()
        digest = store.sample(content.fileno(), len(memory))
    for file in copy["files"]:
        if file["path"] == MEMORY:
            file.update(size=len(memory), digest=digest)
    return json.dumps(copy).encode()


def place(site: Site, memory: bytes, manifest: bytes) -> None:
    """Have this checkpoint in the scratch directory, and a fresh disk."""
    for path in site.directory.glob("vm_checkpoint*"):
        path.unlink()
    site.guest()
    site.plant(MEMORY, memory)
    site.plant(MANIFEST, manifest)


def restart(site: Site, what: str, memory: bytes, manifest: bytes) -> None:
    """START with a checkpoint, and STOP."""
    with site.naming(what):
        place(site, memory, manifest)
        site.start()
        site.stop()
        site.look_at_the_machine()


def with_number(memory: bytes, at: int, number: int) -> bytes:
    return memory[:at] + struct.pack("=I", number) + memory[at + 4 :]


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(HEADS))
def heads(site: Site) -> None:
    """Forge a number in the head of a memory image, and give the manifest its new hash."""
    memory, manifest = checkpoint(site)
    for what, (at, number) in HEADS.items():
        forged = with_number(memory, at, number)
        restart(site, what, forged, signed(manifest, forged))


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(SUSPENDED))
def suspend_heads(site: Site) -> None:
    """Forge such a number in the memory image of a SUSPEND, before RESUME."""
    for what in SUSPENDED:
        at, number = HEADS[what]
        with site.naming(what):
            site.guest()
            site.done("START", "SUSPEND")
            image = site.path("vm_suspend.mem")
            site.plant(image.name, with_number(image.read_bytes(), at, number), 0o600)
            site.ask("RESUME")
            site.ask("STATUS")
            site.stop()
    site.start()


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(MANIFESTS))
def manifests(site: Site) -> None:
    """Forge a manifest: machine types, devices, UUIDs, numbers, names, files of others."""
    memory, manifest = checkpoint(site)
    for what, change in MANIFESTS.items():
        forged = json.loads(signed(manifest, memory))
        change(forged)
        restart(site, what, memory, json.dumps(forged).encode())


@attack(Who.USER, Must.SURVIVE, *BOTH, times=3, daily=True)
def machine_types(site: Site) -> None:
    """Name machine types that this machine has not, in a manifest and in the XML of its memory image."""
    memory, manifest = checkpoint(site)
    for name in (b"pc-i440fx-9999", b"pc-i440fx-0.12", b"pc-q35-2.4\0\0\0\0"):
        at = memory.index(b"pc-i440fx-")
        old = memory[at : memory.index(b"'", at)]
        forged = memory.replace(old, name[: len(old)].ljust(len(old), b"9"))
        text = json.loads(signed(manifest, forged))
        _xml(old.decode(), name.rstrip(b"\0").decode())(text)
        restart(site, name.decode(), forged, json.dumps(text).encode())


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(RAW))
def no_manifests(site: Site) -> None:
    """Leave a manifest that is none."""
    memory, _ = checkpoint(site)
    for what, content in RAW.items():
        restart(site, what, memory, content)


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(MEMORIES))
def no_memory_images(site: Site) -> None:
    """Leave a memory image that is none, with its hash in the manifest."""
    _, manifest = checkpoint(site)
    for what, content in MEMORIES.items():
        restart(site, what, content, signed(manifest, content))


@attack(Who.USER, Must.SURVIVE, *BOTH, times=8)
def streams(site: Site) -> None:
    """Cut QEMU's own stream in a memory image off, or fill it with zeroes or noise from different places on."""
    memory, manifest = checkpoint(site)
    start = 92 + struct.unpack_from("=I", memory, 20)[0]
    noise = bytes(range(256)) * 4096
    for what, forged in (
        ("nothing", memory[:start]),
        ("cut off early", memory[: start + 100]),
        ("cut off late", memory[:-1000]),
        ("zeroes", memory[:start] + bytes(len(memory) - start)),
        ("noise", memory[:start] + noise),
        ("noise after the magic", memory[: start + 8] + noise),
        ("noise after a page", memory[: start + 4096] + noise),
        ("noise at the end", memory[: -(1 << 16)] + noise[: 1 << 16]),
    ):
        restart(site, what, forged, signed(manifest, forged))


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT)
def anothers_uuid(site: Site) -> None:
    """Have the UUID of another VM that runs on this machine in a manifest."""
    memory, manifest = checkpoint(site)
    connection = libvirt.open(URI)
    other = connection.createXML(
        SCRIPTED.format(memory=32, vcpus=1, devices="").replace("<name>x<", "<name>another<"), 0
    )
    try:
        forged = json.loads(signed(manifest, memory))
        forged["facts"]["xml"] = forged["facts"]["xml"].replace(forged["facts"]["uuid"], other.UUIDString())
        forged["facts"]["uuid"] = other.UUIDString()
        restart(site, "UUID", memory, json.dumps(forged).encode())
        if not other.isActive():
            site.breach("the other VM is gone")
    finally:
        other.destroy()
        connection.close()


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT)
def anothers_checkpoint(site: Site) -> None:
    """Bring the checkpoint of another job, with its disk."""
    memory, manifest = checkpoint(site)
    site.process += 1000
    site.name = f"alice_lab_7.{site.process}"
    restart(site, "another's", memory, signed(manifest, memory))


@attack(Who.USER, Must.SURVIVE, *BOTH, times=4)
def links(site: Site) -> None:
    """Make the memory image or the manifest of a checkpoint a link to a file of root's or of another user."""
    memory, manifest = checkpoint(site)
    for name in (MEMORY, MANIFEST):
        for canary in ("root", "other"):
            place(site, memory, signed(manifest, memory))
            site.path(name).unlink()
            site.link(name, CANARIES / canary)
            site.start()
            site.stop()
            site.look_at_the_machine()


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=6)
def swapped_during_restart(site: Site) -> None:
    """Exchange a checkpoint's memory image and a forged one all the time during START."""
    memory, manifest = checkpoint(site)
    forged = with_number(memory, 28, 1)
    for _ in range(6):
        place(site, memory, signed(manifest, memory))
        site.plant("forged", forged)
        with site.swapping(MEMORY, "forged"):
            site.start()
            site.stop()


@attack(Who.USER, Must.SURVIVE, *BOTH, times=6)
def swapped_during_resume(site: Site) -> None:
    """Exchange a suspended VM's memory image and a link to a file of root's all the time during RESUME."""
    site.guest()
    for _ in range(6):
        site.done("START", "SUSPEND")
        site.path("evil").unlink(missing_ok=True)
        site.link("evil", CANARIES / "root")
        with site.swapping("vm_suspend.mem", "evil"):
            site.ask("RESUME")
        site.stop()
        site.path("vm_suspend.mem").unlink(missing_ok=True)
        site.look_at_the_machine()
    site.path("evil").unlink(missing_ok=True)
    site.start()


test_nothing_comes_of_it = each(__name__)
