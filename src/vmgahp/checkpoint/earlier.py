"""Manifests in the formats before all drivers had one: they are read, never written; for one release.

To remove it, delete this module, its tests with their data, and its uses in `vmgahp.checkpoint.store`.
"""

import re

from vmgahp.checkpoint import manifest
from vmgahp.checkpoint.manifest import (
    BACKING,
    DISK,
    LARGEST_FILE,
    MEMORY,
    SHA256,
    STATE,
    WORD,
    CheckpointFile,
    CheckpointKind,
    Fields,
    Invalid,
    Manifest,
)

FORMAT = 1

FILES = {"vmrun": "vmware_checkpoint.json", "script": "script_checkpoint.json", "vsphere": "vm_vsphere_checkpoint.json"}
"""Driver -> the earlier name of its manifest; libvirt's, and Xen's, had the present name."""

MOST_DISKS, MOST_LAYERS = 1024, 64
_LARGEST = {"vsphere": 64 << 10}

_FIELDS = {
    "libvirt": ("name", "vm_type", "cpu_seconds", "time", "disks", "memory"),
    "vmrun": ("name", "memory_mib", "vcpus", "cpu_seconds", "memory", "disks"),
    "script": ("name", "memory_mib", "vcpus", "cpu_seconds", "files"),
    "vsphere": ("cpu_seconds",),
}
"""The fields beside the facts, which have not changed."""

_FORMAT = re.compile(rb'\s*\{\s*"format"\s*:\s*1\s*[,}]')


def parse(kind: CheckpointKind, data: bytes) -> Manifest | None:
    """Parse a manifest of an earlier format; None for anything else. Raises `vmgahp.checkpoint.manifest.Invalid`."""
    driver = "libvirt" if kind.driver == "xen" else kind.driver
    if not _FORMAT.match(data) or driver not in _FIELDS:
        return None
    if len(data) > _LARGEST.get(driver, manifest.LARGEST):
        raise Invalid("it is too long.")
    top = manifest.read(data, FORMAT, (*kind.facts, *_FIELDS[driver]))
    plain = Manifest(
        driver=kind.driver,
        name=top.text("name", 300) if driver != "vsphere" else "",
        vm_type=top.form("vm_type", WORD) if driver == "libvirt" else "",
        memory_mib=top.integer("memory_mib", 1, 10**9) if driver in ("vmrun", "script") else 0,
        vcpus=top.integer("vcpus", 1, 10**6) if driver in ("vmrun", "script") else 0,
        cpu_seconds=top.real("cpu_seconds", 1e12),
        time=top.real("time", 1e12) if driver == "libvirt" else 0.0,
        facts={name: form(top, name) for name, form in kind.facts.items()},
    )
    return plain._replace(files=tuple(_files(driver, top)))


def completed(then: Manifest, now: Manifest) -> Manifest:
    """Return an earlier manifest with the fields that it did not have taken from the VM as it is `now`."""
    return then._replace(
        name=then.name or now.name,
        vm_type=then.vm_type or now.vm_type,
        memory_mib=then.memory_mib or now.memory_mib,
        vcpus=then.vcpus or now.vcpus,
    )


def _files(driver: str, top: Fields) -> list[CheckpointFile]:
    if driver == "libvirt":
        memory = Fields(top.value("memory"), "memory.", ("size", "sha256"))
        image = _file(MEMORY, "vm_checkpoint.mem", memory, digest=memory.form("sha256", SHA256))
        disks = [_disk(item, f"disks[{number}].") for number, item in enumerate(top.items("disks", MOST_DISKS))]
        return [image, *(file for disk in disks for file in disk)]
    if driver == "vmrun":
        return [*_sampled(top, "memory", STATE, 5000), *_sampled(top, "disks", DISK, 5000)]
    return _sampled(top, "files", STATE, 1000) if driver == "script" else []


def _disk(content: object, where: str) -> list[CheckpointFile]:
    disk = Fields(content, where, ("device", "writable", "image", "backing"))
    device, writable = disk.form("device", WORD), disk.flag("writable")
    found = [_image(DISK, disk.value("image"), where + "image.", device)._replace(writable=writable)]
    for number, item in enumerate(disk.items("backing", MOST_LAYERS)):
        found.append(_image(BACKING, item, f"{where}backing[{number}].", device))
    return found


def _image(role: str, content: object, where: str, device: str) -> CheckpointFile:
    fields = Fields(content, where, ("path", "transferred", "format", "size", "mtime_ns", "sample"))
    return _file(role, fields.text("path", 4096), fields, fields.form("sample", SHA256))._replace(
        transferred=fields.flag("transferred"),
        device=device,
        format=fields.form("format", WORD),
        mtime_ns=fields.integer("mtime_ns", -LARGEST_FILE, LARGEST_FILE),
    )


def _sampled(top: Fields, where: str, role: str, most: int) -> list[CheckpointFile]:
    found = []
    for number, item in enumerate(top.items(where, most)):
        fields = Fields(item, f"{where}[{number}].", ("path", "size", "sample"))
        file = _file(role, fields.text("path", 4096), fields, fields.form("sample", SHA256))
        if role == STATE and not file.transferred:
            raise Invalid(f"{file.path!a} is not in the scratch directory.")
        found.append(file)
    return found


def _file(role: str, path: str, fields: Fields, digest: str) -> CheckpointFile:
    return CheckpointFile(
        role=role,
        path=path,
        transferred=not path.startswith("/"),
        device="",
        writable=False,
        format="",
        size=fields.integer("size", 0, LARGEST_FILE),
        mtime_ns=0,
        digest=digest,
    )
