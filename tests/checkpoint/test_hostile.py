"""Manifests of every driver that the job's user has written: all that comes of reading one is `Invalid`."""

import json
from typing import Any

import pytest

from vmgahp.checkpoint import manifest
from vmgahp.checkpoint.manifest import CheckpointKind, Invalid, Manifest
from vmgahp.drivers.libvirt.life.save import LIBVIRT
from vmgahp.drivers.script.machine import KIND as SCRIPT
from vmgahp.drivers.vmrun.machine import KIND as VMRUN

KINDS = {kind.driver: kind for kind in (LIBVIRT, SCRIPT, VMRUN)}
FACTS = {
    "libvirt": {"domain_type": "qemu", "uuid": "0" * 8 + "-0000" * 3 + "-" + "0" * 12, "libvirt_version": 9000000}
    | {"qemu_version": 7002000, "host_cpu": "", "machine_type": "pc", "architecture": "x86_64", "xml": "<domain/>"},
    "script": {"hypervisor": "toy", "note": ""},
    "vmrun": {"uuid": "0" * 8 + "-0000" * 3 + "-" + "0" * 12, "state": "dos_condor.vmss"},
}
FILE = {"role": "disk", "path": "guest.img", "transferred": True, "device": "vda", "writable": True, "format": "raw"}
FILE |= {"size": 1, "mtime_ns": 0, "digest": "0" * 64}


def good(driver: str) -> dict[str, Any]:
    head = {"format": 2, "driver": driver, "name": "alice_lab_7.0", "vm_type": "kvm", "memory_mib": 64, "vcpus": 1}
    return head | {"cpu_seconds": 0.5, "time": 1e9, "facts": dict(FACTS[driver]), "files": [dict(FILE)]}


def read(kind: CheckpointKind, data: bytes) -> Manifest | None:
    try:
        return manifest.parse(kind, data)
    except Invalid:
        return None


@pytest.mark.parametrize("driver", KINDS)
def test_a_good_one_is_read_and_one_of_more_files_than_any_vm_has_is_not(driver: str) -> None:
    content = good(driver)
    assert read(KINDS[driver], json.dumps(content).encode()) is not None
    content["files"] = [FILE] * 10_000
    assert read(KINDS[driver], json.dumps(content).encode()) is None


@pytest.mark.parametrize("driver", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        *({"path": "/etc/shadow"}, {"path": "\ud800"}, {"path": "a\0b"}, {"path": "a\nb"}, {"path": ""}),
        *({"path": "a" * 5000}, {"role": "memory"}),
        {"role": "memory", "path": "/etc/shadow", "transferred": False},
        {"role": "state", "path": "/etc/shadow", "transferred": False},
        *({"role": "root"}, {"size": -1}, {"size": 2**63}, {"size": 1.5}, {"size": True}),
        *({"digest": "0" * 63 + "\u0660"}, {"device": "../vda"}, {"format": "../qcow2"}, {"writable": 1}),
        *({"transferred": None}, {"mtime_ns": 10**20}, {"more": 1}),
    ],
    ids=str,
)
def test_files_that_are_none(driver: str, change: dict[str, object]) -> None:
    content = good(driver)
    content["files"] = [FILE | change]
    assert read(KINDS[driver], json.dumps(content).encode()) is None
