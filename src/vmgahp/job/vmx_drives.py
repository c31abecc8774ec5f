"""The drives of a ``.vmx``, in the order of their controllers, with or without images.

All readers of a ``.vmx`` get its drives here. ESXi adds a floppy drive of the console's machine to every VM
("vmware-null-remote-floppy"), and Workstation a CD-ROM drive of the host: these have no image, and neither has a
drive that is not connected when the VM starts. Pure.
"""

import re
from typing import NamedTuple

from vmgahp.job.vmx import Vmx

DISK, CDROM, FLOPPY, OTHER = "disk", "cdrom", "floppy", "other"

DRIVE_NAME = re.compile(r"(?:(scsi|sata|nvme|ide)(0|[1-9][0-9]?):|(floppy))(0|[1-9][0-9]{0,2})", re.IGNORECASE)
"""The name of a drive; the part after its dot is a property of it."""

_DISKS = ("", "disk", "plaindisk", "nvme", *(f"{kind}-harddisk" for kind in ("scsi", "ata", "ide", "sata", "nvme")))
_HOST_CDROMS = ("cdrom-raw", "atapi-cdrom", "scsi-cdrom")
_NO_FILE = ("", "auto detect", "emptybackingstring", "vmware-null-remote-floppy")


class Drive(NamedTuple):
    """A drive that is present."""

    kind: str
    """The kind: `DISK`, `CDROM`, `FLOPPY`, or `OTHER` for anything else, such as a disk of the host."""
    bus: str
    controller: int
    unit: int
    file: str
    """The file name as written."""
    no_image: str = ""
    """The reason why there is no usable image, in words; empty if `file` is one."""
    of_host: bool = False
    """True if it is a device of the host, by its name there, that is connected when the VM starts."""

    @property
    def place(self) -> str:
        """Return its name in VMware, such as ``scsi0:0`` or ``floppy0``."""
        return f"floppy{self.unit}" if self.bus == FLOPPY else f"{self.bus}{self.controller}:{self.unit}"


def drives(vmx: Vmx) -> list[Drive]:
    """Return the drives that are present, sorted by kind of controller, then by the numbers of controller and unit."""
    found = {}
    for name in vmx:
        match = DRIVE_NAME.fullmatch(name.partition(".")[0])
        # A floppy drive is present by default.
        if match and vmx.boolean(f"{match[0]}.present", default=bool(match[3])):
            drive = _drive(vmx, match)
            found[drive.place] = drive
    return sorted(found.values(), key=lambda drive: (drive.bus, drive.controller, drive.unit))


def _drive(vmx: Vmx, match: re.Match[str]) -> Drive:
    name = match[0]
    file = vmx.get(f"{name}.fileName", "").strip()
    bus, controller, unit = (match[1] or match[3]).lower(), int(match[2] or 0), int(match[4])
    word = vmx.get(f"{name}.{'fileType' if bus == FLOPPY else 'deviceType'}", "").strip().lower()
    if bus == FLOPPY:
        kind, of_host = FLOPPY, word != "file"
    elif word == "cdrom-image" or (not word and file.lower().endswith(".iso")):
        kind, of_host = CDROM, False
    elif word in _HOST_CDROMS:
        kind, of_host = CDROM, True
    else:
        kind, of_host = (DISK, False) if word in _DISKS else (OTHER, True)
    no_image = ""
    if kind in (CDROM, FLOPPY):
        if vmx.boolean(f"{name}.clientDevice"):
            no_image = "a drive of the machine with the console"
        elif file.lower() in _NO_FILE or vmx.boolean(f"{name}.autodetect"):
            no_image = "a drive without an image"
        elif not vmx.boolean(f"{name}.startConnected", default=True):
            no_image = "not connected when the VM starts"
    connected = of_host and not no_image
    return Drive(kind, bus, controller, unit, file, no_image or ("a device of the host" if of_host else ""), connected)
