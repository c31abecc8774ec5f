"""What VirtualBox, VMware and oVirt say beside the standard, such as firmware, TPM and boot order."""

from collections.abc import Mapping, Sequence

from lxml import etree

from vmgahp.commands.submit.machine import BOOT_CLASSES, Guest, GuestDisk
from vmgahp.commands.submit.ovf_envelope import digits
from vmgahp.commands.submit.summary import Summary
from vmgahp.commands.submit.xml_input import Account, children, get, local, text

_OVIRT_FIRMWARE = {"3": "uefi", "4": "uefi-secure"}
_OVIRT_BOOT = ("C", "DC", "N", "CDN", "CND", "DCN", "DNC", "NCD", "NDC", "CD", "D", "CN", "DN", "NC", "ND")
_OVIRT_REMARKS = (
    *("TemplateId", "TemplateName", "Domain", "IsInitilized", "IsInitialized", "IsAutoSuspend", "TimeZone", "VmType"),
    *(
        "DefaultDisplayType",
        "ExportDate",
        "DeleteProtected",
        "SsoMethod",
        "ClusterName",
        "Generation",
        "MinAllocatedMem",
    ),
    *(
        "CustomCompatibilityVersion",
        "ClusterCompatibilityVersion",
        "Quota_id",
        "QuotaId",
        "MigrationSupport",
        "UsbPolicy",
    ),
    *("OriginalTemplateId", "OriginalTemplateName", "CreatedByUserId", "VncKeyboardLayout", "ConsoleDisconnectAction"),
    *("ResumeBehavior", "MultiQueuesEnabled", "UseHostCpu", "UseLatestVersion", "StopTime", "app_list", "Comment"),
    *(
        "RunAndPause",
        "AutoStartup",
        "Priority",
        "IsSmartcardEnabled",
        "IsBootMenuEnabled",
        "IsSpiceFileTransferEnabled",
    ),
    *("IsSpiceCopyPasteEnabled", "AllowConsoleReconnect", "CustomEmulatedMachine", "BalloonEnabled", "MaxMemorySizeMb"),
    *("PredefinedProperties", "UserDefinedProperties", "ClusterId", "VmInit", "CpuPinningPolicy", "StateReason"),
)
"""What oVirt writes of its own keeping, and nothing of it is the guest's."""

_BOOT_NAMES = {"harddisk": "hd", "disk": "hd", "c": "hd", "dvd": "cdrom", "cdrom": "cdrom", "d": "cdrom"}
_BOOT_NAMES |= {"floppy": "fd", "network": "network", "net": "network", "n": "network"}
"""What may be booted from, in the words of the three, in ours."""

_ADAPTER_MODELS = {"82540em": "e1000", "82543gc": "e1000", "82545em": "e1000", "82583v": "e1000e", "virtio": "virtio"}

_WITH_REMARKS = (
    *("File", "Disk", "VirtualSystem", "Content", "VirtualHardwareSection", "Section"),
    *("Item", "StorageItem", "EthernetPortItem"),
)
"""Elements whose other attributes say nothing of the VM."""
_REMARKS = "Caption", "Description", "ElementName", "InstanceID", "InstanceId", "AutomaticAllocation"
_SETTLED_TAGS = {
    **dict.fromkeys(("Reservation", "Limit", "Weight", "ResourceAllocationSection"), "its own tuning"),
    **dict.fromkeys(("NetworkSection", "IpAssignmentSection", "NetworkConfigSection"), "its own networks"),
    **dict.fromkeys(("CreationDate", "ExportDate", "Origin"), "of its export"),
    **dict.fromkeys(("AnnotationSection", "Description", "Annotation"), "a remark"),
    **dict.fromkeys(("StorageSection", "StorageGroupSection"), "where VMware keeps it"),
    **dict.fromkeys(("PlacementGroupSection", "PlacementSection"), "where VMware runs it"),
    **dict.fromkeys(("TagBasedPlacementGroupSection", "TagBasedPlacementSection"), "where VMware runs it"),
    **dict.fromkeys(("StartupSection", "ScaleOutSection", "LeaseSettingsSection"), "of the group of VMs"),
    **dict.fromkeys(_OVIRT_REMARKS, "oVirt's own keeping"),
    "OperatingSystemSection": "a remark about the guest",
    "System": "the family of hardware that it was made for",
    "Strings": "translations",
    "InstallSection": "of its first start elsewhere",
    "EulaSection": "who submits the job accepts it",
    "ProductSection": "a remark about what is installed",
}


def settled(path: str, element: etree._Element) -> str:
    """Why something that nobody has read is left to the execute machine; empty for what is lost."""
    tag = local(element.tag)
    kind = get(element, "type").rpartition(":")[2].removesuffix("_Type") if tag == "Section" else tag
    if path.endswith("/@required") or ("/@" in path and tag in _WITH_REMARKS):
        return "a remark of the exporter"
    if "Item/" in path and tag in _REMARKS and "/@" not in path:
        return "a remark of the exporter"
    if tag == "VirtualSystemCollection" or path.endswith("VirtualSystemCollection/Name"):
        return "of the group of VMs"
    if get(element, "required").lower() == "false":
        return "the exporter says that it is not required"
    if kind.startswith("Is") and text(element).lower() == "false":
        return "what it says is no"
    return _SETTLED_TAGS.get(kind, "")


class Exporter:
    """What one VM's exporter says, put into the guest that its items made."""

    def __init__(self, system: etree._Element, account: Account, made: Guest, summary: Summary) -> None:
        self._system, self._account, self._made, self._summary = system, account, made, summary

    def read(self, hardware: etree._Element, drives: Mapping[str, GuestDisk]) -> None:
        """All of it. `drives` has the disks by the instances of their items."""
        machine = next((element for element in self._system.iter() if local(element.tag) == "Machine"), None)
        if machine is not None:
            self._virtualbox(machine)
        self._vmware(hardware, drives)
        for element in self._system.iter():
            self._ovirt(element)
            kind = (get(element, "osType") + text(element)).lower()
            if local(element.tag) in ("OperatingSystemSection", "OSType") and (kind[:4] == "arm-" or "arm64" in kind):
                self._set("Arch", "aarch64", element)

    def _set(self, option: str, value: str | bool, element: etree._Element) -> None:
        self._made.options[option] = value
        self._made.places[option] = self._account.place(element)

    def _boot(self, element: etree._Element, words: Sequence[str], *, after: bool = False) -> list[str]:
        """An order of kinds as classes of disks; `after` says that a disk comes before them."""
        names = [_BOOT_NAMES.get(word.lower(), "") for word in words]
        place = self._account.place(element)
        if names[:1] == ["network"] and not after:
            self._summary.lose(place, "boot from the network first", "VMs boot from disks")
        elif "network" in names:
            self._summary.settle(place, "boot from the network", "VMs boot from disks first")
        return [name for name in dict.fromkeys(names) if name in BOOT_CLASSES]

    def _vmware(self, hardware: etree._Element, drives: Mapping[str, GuestDisk]) -> None:
        """UEFI, with Secure Boot or without, and what to boot from: a section for each drive."""
        configs = {get(element, "key"): element for element in children(hardware, "Config")}
        firmware, secure = configs.get("firmware"), configs.get("bootOptions.efiSecureBootEnabled")
        for element in filter(lambda each: each is not None, (firmware, secure)):
            assert element is not None
            self._account.take(element, "key", "value", "required")
        if firmware is not None and get(firmware, "value").lower() == "efi":
            is_secure = secure is not None and get(secure, "value").lower() == "true"
            self._set("Firmware", "uefi-secure" if is_secure else "uefi", firmware)
        for number, section in enumerate(children(self._system, "BootOrderSection"), start=1):
            self._account.take_all(section)
            drive = drives.get(get(section, "instanceId"))
            if drive is not None:
                drive.boot = drive.boot or number
            if drive is None:
                classes = self._boot(section, [get(section, "type")], after=number > 1)
                self._made.boot = [*self._made.boot, *classes] if number > 1 else classes

    def _ovirt(self, element: etree._Element) -> None:
        tag, value = local(element.tag), text(element)
        if tag == "BiosType":
            self._account.take(element)
            if value in _OVIRT_FIRMWARE:
                self._set("Firmware", _OVIRT_FIRMWARE[value], element)
        elif tag == "DefaultBootSequence" and value and digits(value) < len(_OVIRT_BOOT):
            self._account.take(element)
            self._made.boot = self._boot(element, list(_OVIRT_BOOT[digits(value)]))

    def _virtualbox(self, machine: etree._Element) -> None:
        """VirtualBox's own description, of which the items have the most."""
        self._account.take_all(machine)
        place = self._account.place(machine)
        self._summary.settle(place, "VirtualBox's own description", "what else is in it is of VirtualBox or its host")
        self._made.boot = ("fd", "cdrom", "hd")  # which it does not write down
        adapters = []
        for element in machine.iter():
            tag, kind = local(element.tag), get(element, "type")
            if tag == "Boot":
                order = sorted(children(element, "Order"), key=lambda each: digits(get(each, "position")))
                words = [device for each in order if (device := get(each, "device")) != "None"]
                self._made.boot = self._boot(element, words)
            elif tag == "Firmware" and kind.upper().startswith("EFI"):
                self._set("Firmware", "uefi", element)
            elif tag == "TrustedPlatformModule" and kind.lower() in ("v2_0", "swtpm"):
                self._set("TPM", True, element)
                self._made.changed["TPM"] = "it is a new one, without what the old one keeps"
            elif tag == "TrustedPlatformModule" and kind.lower() not in ("", "none"):
                self._summary.lose(self._account.place(element), f"a TPM {kind}", "jobs have a TPM 2.0")
            elif tag == "SharedFolder":
                what = f"the shared folder {get(element, 'name')}"
                self._summary.lose(self._account.place(element), what, "it is in the machine that it was made on")
            elif tag == "Adapter" and get(element, "enabled") == "true":
                adapters.append(element)
            elif (tag == "Platform" and get(element, "architecture").upper() == "ARM") or (
                element is machine and get(element, "OSType").lower().endswith("arm64")
            ):
                self._set("Arch", "aarch64", element)
        adapters.sort(key=lambda each: digits(get(each, "slot")))
        if len(adapters) == len(self._made.nics):
            for adapter, nic in zip(adapters, self._made.nics, strict=True):
                nic.link_up = nic.link_up and get(adapter, "cable") != "false"
                nic.model = nic.model or _ADAPTER_MODELS.get(get(adapter, "type").lower(), "")
