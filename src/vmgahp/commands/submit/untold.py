"""What becomes of the parts of libvirt's domain XML for which the job ad has no word.

What the execute machine or HTCondor settles by itself, and what no program in a guest would miss, is left to the
machine; without anything else the VM would be another one.
"""

import re

from lxml import etree

from vmgahp.commands.submit.xml_input import local
from vmgahp.domain.job_xml.allow_list import DOMAIN, NEVER

_SERVED = "how it serves an image"
_NOBODY = "nobody sits before it"
_DRIVER = (
    "@cache @discard @discard_no_unref @detect_zeroes @io @iothread @queues @queue_size @event_idx @ioeventfd "
    "@copy_on_read @error_policy @rerror_policy @ats @iommu @packed @page_per_vq metadata_cache iothreads"
)
_OF_ARCHITECTURE = "architecture and firmware have one"

_SETTLED = {
    f"/domain/{path}": reason
    for reason, paths in (
        ("a number of the moment", "@id"),
        ("VM_TYPE and VM_ALLOW_EMULATION", "@type"),
        ("HTCondor names the VM", "uuid genid title description"),
        ("of the program that wrote the file", "metadata"),
        ("its own control groups", "resource"),
        ("its own security", "seclabel devices/disk/source/seclabel"),
        (
            "its own tuning",
            "cputune memtune numatune blkiotune iothreads iothreadids defaultiothread vcpu/@placement vcpu/@cpuset "
            "memoryBacking memory/@dumpCore perf devices/disk/iotune devices/interface/driver devices/interface/tune "
            "devices/interface/coalesce devices/interface/backend devices/controller/driver",
        ),
        (_SERVED, " ".join(f"devices/disk/driver/{part}" for part in _DRIVER.split()) + " devices/disk/@snapshot"),
        ("all memory and CPUs are there from the start", "currentMemory maxMemory vcpus"),
        (
            "VM_CPU_MODE",
            "cpu/@mode cpu/@match cpu/@check cpu/@migratable cpu/model cpu/vendor cpu/feature cpu/cache "
            "cpu/maxphysaddr",
        ),
        ("the job ends with the guest", "on_poweroff on_crash on_lockfailure"),
        ("a guest that reboots goes on", "on_reboot"),
        ("HTCondor suspends the job", "pm"),
        ("nobody is there to choose, or to see it", "os/bootmenu os/bios"),
        ("every VM has it", "features/acpi features/apic features/pae"),
        ("for VMware's tools", "features/vmport"),
        ("for dumps of the guest's memory", "features/vmcoreinfo"),
        ("it comes with the firmware", "features/smm os/loader/@stateless"),
        ("it comes with the architecture", "features/gic features/ioapic"),
        ("its own QEMU", "devices/emulator"),
        ("it goes with the devices", "devices/controller"),
        ("it goes with the console", "devices/input devices/video"),
        (_NOBODY, "devices/graphics devices/redirdev devices/redirfilter devices/smartcard"),
        ("nobody hears it", "devices/sound devices/audio"),
        ("USB ports are there as they are needed", "devices/hub"),
        ("the guest's console is its serial port", "devices/console"),
        ("every VM has one", "devices/memballoon"),
        ("guests have other randomness", "devices/rng"),
        ("VMs have one where its libvirt knows it", "devices/panic"),
        (
            "libvirt's own",
            "devices/disk/alias devices/disk/address devices/interface/alias devices/interface/address "
            "devices/interface/target devices/tpm/alias devices/tpm/address devices/disk/@model devices/disk/acpi "
            "devices/disk/boot/@loadparm devices/interface/boot/@loadparm devices/interface/rom",
        ),
        ("found in the image", "devices/disk/backingStore"),
        (
            "of the moment",
            "devices/disk/mirror devices/disk/privateData devices/disk/source/privateData "
            "devices/disk/diskSecretsPlacement devices/interface/actual",
        ),
        ("the image is there, or the job is held", "devices/disk/source/@startupPolicy devices/disk/source/@fdgroup"),
        (
            "its own network of that kind",
            "devices/interface/source devices/interface/filterref devices/interface/virtualport "
            "devices/interface/vlan devices/interface/bandwidth devices/interface/port devices/interface/script "
            "devices/interface/@trustGuestRxFilters devices/interface/@managed devices/interface/mac/@type "
            "devices/interface/mac/@check devices/interface/backenddomain devices/interface/guest",
        ),
        ("what the guest's firmware knows", "devices/tpm/@model"),
        ("its own way to keep it", "devices/tpm/backend/@persistent_state devices/tpm/backend/@debug"),
    )
    for path in paths.split()
}
"""Path -> why what is there is left to the execute machine, or not missed."""

_TESTS = (
    ("clock", "@offset = 'utc' or not(@offset)", "every VM's clock is UTC's, with QEMU's own timers"),
    ("clock", "@offset = 'variable' and @adjustment = 0 and not(@basis = 'localtime')", "the same as UTC"),
    ("os/type/@machine", "starts-with(@machine, 'pc')", _OF_ARCHITECTURE),
    ("os/type/@machine", "starts-with(@machine, 'q35') or starts-with(@machine, 'virt')", _OF_ARCHITECTURE),
    ("os/type/@machine", "starts-with(@machine, 'rhel') or starts-with(@machine, 'ubuntu')", _OF_ARCHITECTURE),
    ("cpu/numa", "count(cell) = 1", "one node is all of it"),
    ("os/type/@machine", "starts-with(@machine, 'xen')", _OF_ARCHITECTURE),
    ("os/loader", "contains(text(), 'hvmloader')", "Xen's own firmware"),
    ("bootloader", "/domain/@type = 'xen'", "XEN_BOOTLOADER"),
    ("features/hap", "/domain/@type = 'xen'", "how Xen serves its guests"),
    ("os/smbios", "@mode = 'emulate' or @mode = 'host'", "what QEMU says of itself"),
    ("devices/serial", "not(target/@port) or target/@port = 0", "its own, which goes to vm_console.log"),
    ("devices/channel", "starts-with(@type, 'spice') or @type = 'qemu-vdagent' or @type = 'dbus'", _NOBODY),
    ("devices/channel", "starts-with(target/@name, 'com.redhat.spice.')", _NOBODY),
    ("devices/channel", "starts-with(target/@name, 'org.qemu.guest_agent.')", "every VM has it (VM_GUEST_AGENT)"),
    ("devices/watchdog", "@action = 'none'", "it does nothing"),
    ("devices/watchdog", "@model = 'itco'", "it comes with the machine"),
    ("devices/memory", "@model = 'dimm'", "it is in the VM's memory, all of which is there from the start"),
)
"""Path, test and reason: the same of what is so only where the test holds of the element."""

_WHERE: dict[str, list[tuple[etree.XPath, str]]] = {}
for _path, _test, _reason in _TESTS:
    _WHERE.setdefault(f"/domain/{_path}", []).append((etree.XPath(f"boolean({_test})"), _reason))

_LOST = {
    f"/domain/{path}": reason
    for path, reason in (
        ("os/boot", "jobs do not boot from the network"),
        ("devices/interface/boot", "jobs do not boot from the network"),
        ("os/dtb", "jobs bring no device tree"),
        ("clock", "every VM's clock is UTC's"),
        ("devices/serial", "jobs have one serial port"),
        ("devices/parallel", "jobs have no parallel port"),
        ("devices/vsock", "jobs have no socket to their machine"),
        ("devices/tpm", "jobs have an emulated TPM 2.0"),
        ("devices/channel", "what is at the other end is not on the execute machine"),
        ("devices/memory", "jobs have no such memory"),
        ("devices/lease", "locks of this machine's are not on the execute machine"),
        ("devices/disk/transient", "what the guest writes stays on the disk"),
        ("launchSecurity", "the memory of jobs is not encrypted"),
        ("cpu/numa", "jobs have one node of memory"),
        ("devices/iommu", "jobs pass no devices on"),
        ("cpu/topology", "its CPUs are not as many as the VM's"),
    )
}
"""Path -> why it cannot be carried over, where there is more to say than that there is no word."""


def settled(path: str, element: etree._Element) -> str:
    """Why something is left to the execute machine; empty for what makes another VM."""
    at: etree._Element | None = element
    while path and at is not None:
        for holds, reason in _WHERE.get(path, ()):
            if holds(at):
                return reason
        if path in _SETTLED:
            return _SETTLED[path]
        if "/@" not in path:
            at = at.getparent()
        path = path.rpartition("/")[0]
    return ""


def lost(path: str, element: etree._Element) -> str:
    """Why something that is not settled cannot be carried over."""
    never = "" if "/@" in path else NEVER.get(local(element.tag))
    reason = _LOST.get(path) or never or "the job ad has no word for it"
    return reason + ("; --as-is lets the XML say it" if _has_a_word(path, element) else "")


def _has_a_word(path: str, element: etree._Element) -> bool:
    """Whether a job's own XML can say it, which is for QEMU's VMs."""
    if element.getroottree().getroot().get("type") == "xen":
        return False
    elements, _, attribute = path.partition("/@")
    allowed = DOMAIN
    for tag in elements.split("/")[2:]:
        if tag not in allowed.children:
            return False
        allowed = allowed.children[tag]
    given = (
        {attribute: element.get(attribute, "")} if attribute else {local(key): value for key, value in element.items()}
    )
    return all(
        name in allowed.attributes and re.fullmatch(allowed.attributes[name], str(value), re.ASCII)
        for name, value in given.items()
    )
