"""The list of everything that a job's libvirt XML may contain; anything else is refused.

It is derived from the forms for jobs in `vmgahp.domain.model`: each element with the attributes, the text and the
elements that it may have. Names of host resources have no such form: no path but those that `vmgahp.domain.job_xml`
checks (disks, a kernel and its initrd), no device, no program, no network but those that this machine offers to every
job. The whole list is in ``tests/domain/golden/allowed.txt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vmgahp.domain import model
from vmgahp.domain.rows import Element


class Allowed(NamedTuple):
    """The permitted content of one element."""

    attributes: Mapping[str, str]
    """The form of each attribute, by its name."""
    children: Mapping[str, Allowed]
    text: str | None
    """The form of its text; None if it has no text."""
    most: int
    """The maximum number within its parent."""


def _of_a_job(row: Element) -> Allowed:
    attributes = {name: attribute.job for name, attribute in row.attributes.items() if attribute.job}
    children = {tag: _of_a_job(below) for tag, below in row.children.items() if below.job}
    return Allowed(attributes, children, row.text, row.most)


DOMAIN = _of_a_job(model.DOMAIN)

NEVER = {
    "hostdev": "devices of the host belong to no job",
    "filesystem": "directories of the host belong to no job",
    "shmem": "memory of the host belongs to no job",
    "emulator": "which program runs the VM is the machine's to say",
    "commandline": "options of the hypervisor's own command line are not for jobs",
    "override": "options of the hypervisor's own command line are not for jobs",
    "seclabel": "the machine decides as which user the VM runs",
    "loader": "firmware is chosen by <os firmware='efi'>, without a path",
    "nvram": "firmware is chosen by <os firmware='efi'>, without a path",
    "backingStore": "the backing file of an image is found in the image",
    "encryption": "secrets of this machine's libvirt are not for jobs",
    "auth": "secrets of this machine's libvirt are not for jobs",
    "filterref": "the machine's networks are the administrator's",
    "virtualport": "the machine's networks are the administrator's",
    "script": "scripts run on the host",
    "cpuset": "the machine's CPUs are the administrator's",
    "current": "let it be the number of CPUs that the guest begins with",
    "maxMemory": "a job's memory does not grow; /domain/memory is all of it",
    "resource": "the machine's partitions are the administrator's",
    "memtune": "what a VM may use of the machine is the administrator's to say",
    "blkiotune": "what a VM may use of the machine is the administrator's to say",
    "iotune": "what a VM may use of the machine is the administrator's to say",
    "bandwidth": "what a VM may use of the machine is the administrator's to say",
    "passwd": "a job's display has a one-time password",
    "redirdev": "devices of the host or of its users belong to no job",
    "smartcard": "devices of the host or of its users belong to no job",
    "numatune": "the machine's memory nodes are the administrator's",
    "cputune": "the machine's CPUs are the administrator's",
    "memoryBacking": "how memory is backed is the administrator's to say",
}
"""The reasons why some elements and attributes are not in the list; a general reason applies to all others."""

VALUES = {
    "/domain/os/type/@arch": "jobs have x86_64 and aarch64",
    "/domain/os/type/@machine": "jobs have the machines pc, q35 and virt",
    "/domain/devices/disk/@type": "a job's disks are files, which come with it or which its user can open",
    "/domain/devices/disk/@device": "a job's disks are files, none of them a unit of the host's",
    "/domain/devices/interface/@type": "jobs get the machine's networks: network, bridge or user",
    "/domain/devices/graphics/@type": "a job's display is VNC on loopback",
    "/domain/devices/serial/@type": "a job's serial port is a pty, which goes to vm_console.log",
    "/domain/devices/console/@type": "a job's serial port is a pty, which goes to vm_console.log",
    "/domain/devices/channel/@type": "a job's channels are sockets of libvirt's own, to the guest's agent",
    "/domain/devices/tpm/backend/@type": "a job's TPM is emulated; the host's belongs to no job",
    "/domain/devices/input/@type": "a job has no input devices of the host",
}
"""The reasons why some values are refused, by the path of their element or attribute."""
