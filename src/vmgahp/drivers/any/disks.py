"""The disks of a job for the choice of a hypervisor: which files, of what format.

Nothing is refused here but a format that stays open: what else is wrong with an entry, the driver that gets the job
says in its own words.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.images.formats import HEADER, UnclearFormat, proven_format
from vmgahp.job.ad import JobAd
from vmgahp.job.disks import DISK, PERMISSIONS, DiskEntry, bad_disk, entries, kind_of


class AnyDisk(NamedTuple):
    """One entry of vm_disk."""

    entry: str
    """As the job writes it."""
    path: str = ""
    """The image's full path; empty for what is not an image that could be looked at, such as one of the catalog."""
    device: str = ""
    permission: str = ""
    format: str = ""
    """QEMU's name of the image's format; ``iso`` for what is a CD-ROM."""
    original: str = ""
    """The name of the image as the job has it, whichever image took its place since."""
    transferred: bool = False
    """Whether it is in the scratch directory."""

    @property
    def name(self) -> str:
        """The name of the image."""
        return os.path.basename(self.path)

    @property
    def writable(self) -> bool:
        """Whether the guest writes to it."""
        return "w" in self.permission and not self.is_cdrom

    @property
    def is_cdrom(self) -> bool:
        """Whether the guest sees a CD-ROM."""
        return kind_of(self.device, self.name, self.format) == "cdrom"

    @property
    def shared(self) -> bool:
        """Whether other VMs use it at the same time."""
        return self.permission.endswith("s")

    def written(self) -> str:
        """The entry of vm_disk, with its format in any case."""
        if not self.path:
            return self.entry
        place = self.name if self.transferred else self.path
        return ":".join((place, self.device, self.permission, self.format))


def read(ad: JobAd, earlier: Mapping[str, tuple[str, str]], identity: Identity) -> tuple[AnyDisk, ...]:
    """The job's disks, without those that are invalid.

    `earlier` are images that an earlier start made of the job's, and the guest has written to since: name of the
    job's -> name and format of the other one, which takes its place. Raises `JobFault` for an unknown format.
    """
    found = entries(ad.string(DISK) or "")
    return tuple(_disk(entry, ad.working_dir(), earlier, identity) for entry in found)


def _disk(asked: DiskEntry, working_dir: str, earlier: Mapping[str, tuple[str, str]], identity: Identity) -> AnyDisk:
    entry = asked.text
    if asked.is_of_catalog or not asked.is_well_formed or asked.fields[2].lower() not in PERMISSIONS:
        return AnyDisk(entry)
    file, device, permission, said = (*asked.fields, "")[:4]
    permission = permission.lower()
    name = original = os.path.basename(file)
    if name in earlier:
        name, said = earlier[name]
    try:
        descriptor = identity.open_scratch(working_dir, name, os.O_RDONLY)
        path, transferred = os.path.join(working_dir, name), True
    except (OSError, errors.MachineFault):
        try:
            if not file.startswith("/"):
                return AnyDisk(entry)
            descriptor = identity.open_named(file, os.O_RDONLY)
            path, transferred = file, False
        except (OSError, errors.MachineFault):
            return AnyDisk(entry)
    with os.fdopen(descriptor, "rb") as opened:
        header = opened.read(HEADER)
    try:
        image_format = proven_format(name, said, header)
    except UnclearFormat as error:
        hint = "write the format at the end of the entry, such as disk.img:vda:w:raw."
        raise bad_disk(entry, str(error), hint) from error
    return AnyDisk(entry, path, device, permission, image_format, original, transferred)
