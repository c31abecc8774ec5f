"""A job's request for a VM of libvirt, checked against the settings, without access to files.

A refusal is a `JobFault`, which holds the job and leaves the machine in service. It names the attribute,
its value and a hint, since its reader sees nothing else. Disks, NICs and the rarer devices are parsed in
`disks`, `vm_spec` and `devices`; here they become one `JobSpec`, whose files `look` finds.

A job that asks for checkpoints, and for a feature with which its hypervisor saves no VM, is held at START, before it
loses any work; QEMU calls such features migration blockers. The front ends and the VM type any ask here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.etree import ElementTree as etree

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.job import cloud_init, run
from vmgahp.job.ad import JobAd
from vmgahp.job.attributes import LIBVIRT_XML, NAMES, Options
from vmgahp.job.devices import Devices, Topology, devices
from vmgahp.job.disks import DISK, Disk, DiskRequest, bad_disk, data_requests, enlarged, made_drive, requests
from vmgahp.job.vm_spec import Nic, VmSpec, nics, with_nics
from vmgahp.job.xen import XenBoot
from vmgahp.text import shown
from vmgahp.vm_types import QEMU

MOST_FILES = 64
"""The most files of one VM, with all backing files: libvirtd keeps them open for all VMs, and has a limit (8192)."""
UNSAVEABLE = ("qcow", "vdi", "vhdx", "vmdk", "vpc")
"""The image formats with a migration blocker, even for a disk that is only read, and for a backing file.

(``migrate_add_blocker`` in QEMU's ``block/vmdk.c`` and so on. Internal snapshots of a qcow2 image block no save to a
file: libvirt refuses only a migration to another machine with them.)
"""

_UNSAVEABLE_DEVICES = (
    ("devices/filesystem", "its guest can mount a directory of the machine (VMPARAM_vm_Share, VMPARAM_vm_Share_Dirs)"),
    ("devices/hostdev[@type!='usb']", "a device of the machine is passed through to it (hostdev)"),
    ("devices/interface[@type='hostdev']", "a device of the machine is passed through to it (hostdev)"),
    ("devices/video/model/acceleration[@accel3d='yes']", "its display has 3D acceleration (virgl)"),
    ("launchSecurity", "its memory is encrypted (launchSecurity)"),
    ("devices/controller[@type='nvme']", "it has an NVMe controller"),
    ("features/hyperv[@mode='passthrough']", "it has all of Hyper-V's features (hyperv mode passthrough)"),
)
"""The elements of libvirt's XML, and what they say about the VM. Only XML of the administrator's has most of them."""


def is_saved_by_qemu(vm_type: str, settings: Settings) -> bool:
    """Tell if VMs of the type are saved by QEMU, so that its blockers count."""
    return vm_type in QEMU and settings.string("VM_LIBVIRT_DOMAIN_TYPE") in ("", "kvm", "qemu")


def require_saveable(devices: Devices, requests: Iterable[DiskRequest], options: Options) -> None:
    """Make sure that nothing that the job asks for rules out its checkpoints. Raises `JobFault`."""
    if devices.shares:
        problem = "JobVMCheckpoint = true contradicts it, for a VM that shares a directory cannot be saved"
        hint = "set vm_checkpoint = false, or hand the files over on a disk."
        raise options.refused("Share_Dirs" if options.has("Share_Dirs") else "Share", problem, hint)
    for request in requests:
        if request.format in UNSAVEABLE:
            raise bad_disk(request.entry, _contradiction(request.format), _cure(request.format, request.file))


def require_saveable_disks(disks: Iterable[Disk]) -> None:
    """Make sure that no image that was found, or its backing file, rules out checkpoints. Raises `JobFault`."""
    for disk in disks:
        for path, image_format in ((disk.path, disk.format), *((image.path, image.format) for image in disk.backing)):
            if image_format in UNSAVEABLE:
                problem = f"{DISK}, image {shown(path)} of {disk.device}: {_contradiction(image_format)}."
                raise JobFault(errors.INVALID_DISK_PARAM, problem, _cure(image_format, path))


def require_snapshot(where: str, independent: Sequence[str]) -> None:
    """Refuse `independent` disks: vSphere takes no snapshot with memory of them. Raises `JobFault`."""
    if independent:
        why = "vSphere takes no snapshot with memory of a VM with an independent disk."
        hint = f"remove {independent[0]}.mode from the .vmx, or set vm_checkpoint = false."
        problem = f"{where}, {independent[0]}.mode: JobVMCheckpoint = true contradicts it, for {why}"
        raise JobFault(errors.MISMATCHED, problem, hint)


def _contradiction(image_format: str) -> str:
    return f"JobVMCheckpoint = true contradicts it, for QEMU cannot save a VM with a {image_format} image"


def _cure(image_format: str, path: str) -> str:
    return f"convert it (qemu-img convert -f {image_format} -O qcow2 {path} NEW.qcow2), or set vm_checkpoint = false."


def save_blocker(xml: str) -> str:
    """Return the reason for which QEMU cannot save the VM of this domain XML, as half a sentence; empty for none."""
    try:
        domain = etree.fromstring(xml)  # noqa: S314 - from libvirt and this daemon, which has checked that of a job
    except etree.ParseError:
        return ""  # libvirt refuses it
    for disk in domain.iterfind("devices/disk"):
        name = next((target.get("dev", "") for target in disk.iterfind("target")), "")
        above = {driver.get("type") for driver in disk.iterfind("driver")}
        below = {form.get("type") for form in disk.iterfind(".//backingStore/format")}
        for found, place in ((above, "is"), (below, "is on")):
            if image_format := next((each for each in UNSAVEABLE if each in found), ""):
                return f"its disk {name} {place} a {image_format} image, which QEMU cannot save; convert it to qcow2"
        if disk.get("type") == "dir" and disk.find("readonly") is None:
            return f"its disk {name} is a directory that it can write to (vvfat)"
    for device in domain.iterfind("devices/shmem"):
        if device.get("role") != "master":
            return "it shares memory with others and is not their master (ivshmem)"
    return unsaveable_feature(domain)


def unsaveable_feature(domain: etree.Element) -> str:
    """Return the reason for which QEMU cannot save a VM, apart from its disks, as `save_blocker` does."""
    if domain.find("clock/timer[@name='tsc'][@frequency]") is None:  # with one its counter goes on elsewhere
        for feature in domain.iterfind("cpu/feature[@name='invtsc']"):
            if feature.get("policy", "require") in ("require", "force"):
                return "its CPU has a counter of constant speed (invtsc), which the next machine may not continue"
    return next((reason for path, reason in _UNSAVEABLE_DEVICES if domain.find(path) is not None), "")


class JobSpec(NamedTuple):
    """A virtual machine of libvirt."""

    vm: VmSpec
    disks: tuple[Disk, ...]
    """The disks found for the requests; empty before `vmgahp.job.look` finds them."""
    vnc: bool
    devices: Devices = Devices()
    ignored: tuple[str, ...] = ()
    """The unknown attributes about devices, of a job that ignores them."""
    xen: XenBoot | None = None
    """The way in which a Xen job boots; None for other jobs."""
    requests: tuple[DiskRequest, ...] = ()

    @property
    def macs(self) -> tuple[str, ...]:
        """Return the MAC addresses that the job has chosen."""
        return tuple(nic.mac for nic in self.vm.nics if nic.mac)

    @classmethod
    def parse(
        cls, ad: JobAd, settings: Settings, *, diskless: bool = False, networks: Sequence[str] | None = None
    ) -> JobSpec:
        """Read and check the job ad. A job that may be `diskless` need not name a disk.

        `networks` are the kinds of network on offer, if not those of the settings. Raises `JobFault` for a mistake of
        the job's owner, `ClientFault` for one that the starter owes, `MachineFault` for invalid settings.
        """
        options = Options(ad, others_know=bool(settings.xml_script()))
        common = with_nics(ad, settings, nics(ad, settings, options, networks))
        found = () if diskless and ad.string(DISK) is None else requests(ad, any_word=bool(settings.xml_script()))
        if found and options.has("Disk_Size"):
            found = (enlarged(options, found[0]), *found[1:])
        found += data_requests(options, found)
        if len(found) > MOST_FILES:  # before any of them is opened or made
            problem = f"{DISK} and VMPARAM_vm_Data_Disk name {len(found)} disks; a VM has {MOST_FILES} files at most."
            raise JobFault(errors.INVALID_DISK_PARAM, problem, "use fewer.")
        made = cls(
            vm=common,
            disks=(),
            requests=found,
            vnc=bool(ad.boolean("JobVMVNCConsole")),
            devices=devices(options, settings, common.vcpus, common.working_dir),
            ignored=options.ignored,
        )
        if ad.boolean("JobVMHardwareVT") and not settings.boolean("VM_HARDWARE_VT"):
            problem = "JobVMHardwareVT = true, and this machine offers no hardware virtualization (VM_HARDWARE_VT)."
            raise JobFault(errors.MISMATCHED, problem, "add VM_HardwareVT to the job's requirements.")
        if made.devices.ssh and not made.vm.nics:
            raise options.refused("SSH", "the VM has no network by which it is reached", "set vm_networking = true.")
        made = _with_run(made, ad, settings, options)
        made = _with_seed(made, ad, options)
        if made.vm.checkpoint:
            judged = made.requests if is_saved_by_qemu(made.vm.vm_type, settings) else ()
            require_saveable(made.devices, judged, options)
        _require_our_description(settings, options)
        return made


def _with_run(made: JobSpec, ad: JobAd, settings: Settings, options: Options) -> JobSpec:
    asked = [option for option in NAMES if option.startswith("Run") and options.has(option)]
    if not asked:
        return made
    if "Run" not in asked:
        name = options.attribute("Run")
        raise options.refused(asked[0], f"it is of no use without {name}", f"set {name}, or remove it.")
    if ad.value(LIBVIRT_XML) is not None:
        problem = "the job brings XML of its own, and only into our own description the program's ports are put"
        raise options.refused("Run", problem, f"leave {LIBVIRT_XML} out, or the program.")
    wanted = run.wanted(options, ad, settings)
    return made._replace(devices=made.devices._replace(run=wanted), requests=(*made.requests, run.drive(made.requests)))


def _with_seed(made: JobSpec, ad: JobAd, options: Options) -> JobSpec:
    begins = made.devices.run is not None and made.devices.run.boot == run.CLOUD_INIT
    seed = cloud_init.wanted(options, ad, begins) if begins or any(map(options.has, cloud_init.FILES)) else None
    if seed is None:
        return made
    requests = (*made.requests, made_drive(made.requests, cloud_init.SEED_FILE, "VMPARAM_vm_User_Data"))
    return made._replace(devices=made.devices._replace(user_data=seed), requests=requests)


def _require_our_description(settings: Settings, options: Options) -> None:
    """Refuse options about drives, sockets and ports of this daemon, which a script that describes VMs cannot use."""
    for option in ("User_Data", "Run", "Disk_Size", "Exit_Port", "Share_Dirs", "SSH"):
        if settings.xml_script() and options.has(option):
            described = "VMs of this machine are described by a script of its administrator's (LIBVIRT_XML_SCRIPT)"
            hint = "remove it, or run the job on another machine."
            raise options.refused(option, f"{described}, in whose description there is none", hint)


__all__ = ["Devices", "Disk", "JobSpec", "Nic", "Topology"]
