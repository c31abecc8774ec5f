"""`vmgahp submit vmx`: the boot order, the drives that are none, encryption, and the report of every entry."""

import time

import pytest

from tests.commands.submit import samples
from tests.commands.support import absent
from vmgahp.commands.submit.report import Outcome
from vmgahp.job.vmx import Vmx

pytestmark = [pytest.mark.qemu, pytest.mark.usefixtures("home")]

HEAD = {".encoding": "UTF-8", "memsize": "64", "displayName": "m"}
ESXI = HEAD | {
    "nvram": "machine.nvram", "floppy0.startConnected": "FALSE", "floppy0.clientDevice": "TRUE",
    "floppy0.fileName": "vmware-null-remote-floppy", "scsi0.virtualDev": "pvscsi", "scsi0.present": "TRUE",
    "scsi0:0.deviceType": "scsi-hardDisk", "scsi0:0.fileName": "machine.vmdk", "scsi0:0.present": "TRUE",
    "ide1:0.deviceType": "cdrom-image", "ide1:0.fileName": "/vmfs/volumes/624d796f-52b87554/iso/install.iso",
    "ide1:0.startConnected": "FALSE", "ide1:0.present": "TRUE", "ethernet0.virtualDev": "vmxnet3",
    "ethernet0.networkName": "VM Network", "ethernet0.addressType": "vpx",
    "ethernet0.generatedAddress": "00:50:56:8a:01:02", "ethernet0.present": "TRUE", "usb_xhci.present": "TRUE",
    "serial0.present": "TRUE", "serial0.fileType": "thinprint", "guestOS": "rhel8-64",
}  # fmt: skip
"""A VM of ESXi's, of which nothing is lost on anybody."""


def drive(place: str, file: str, **more: str) -> dict[str, str]:
    return {f"{place}.{name}": value for name, value in {"present": "TRUE", "fileName": file, **more}.items()}


CDROM = drive("ide1:0", "seed.iso", deviceType="cdrom-image")
FLOPPY = drive("floppy0", "boot.flp", fileType="file")
DISK = drive("scsi0:0", "a.vmdk")


@pytest.fixture
def of(home, submit):
    """Runs the command on a .vmx of these entries, whose images are made: what is read, and what was said."""

    def run(entries, *words, status=0, lax=False):
        vmx = Vmx(entries)
        for name, value in vmx.items():
            path = home / value
            if name.lower().endswith(".filename") and value and not {"/", "\\"} & set(value) and not path.exists():
                if value.endswith(".vmdk"):
                    samples.image(path, "vmdk")
                elif value.endswith((".iso", ".flp")):
                    path.write_bytes(bytes(4096))
        (home / "m.vmx").write_bytes(vmx.encode())
        return submit("vmx", "m.vmx", *words, status=status, lax=lax)

    return run


def files(read):
    return [entry.partition(":")[0] for entry in read["vm_disk"].split(",")]


def test_a_vmx_as_attributes(submit):
    read, said = submit("vmx", "machine.vmx")
    assert (read["executable"], read["vm_memory"], read["vm_vcpus"]) == ("my_machine", "2048", "4")
    assert read["vm_disk"] == "machine.vmdk:sda:w:vmdk"
    assert read["MY.VMPARAM_vm_NICs"] == '"nat:00:50:56:01:02:03:e1000e"'
    assert read["MY.VMPARAM_vm_Topology"] == '"sockets=2,cores=2,threads=1"'
    assert read["MY.VMPARAM_vm_Firmware"] == '"uefi"'
    assert "pciPassthru0.present = TRUE" in samples.lost(said)
    assert absent(samples.part(said, Outcome.NOT_USED), "  sound.present = TRUE\n", "serial0.fileType = pipe") == []
    assert "vmxnet3" not in said  # of a NIC that is not there


def test_a_vm_of_esxi_becomes_a_job_without_further_words(of):
    read, said = of(ESXI)
    assert read["vm_disk"] == "machine.vmdk:sda:w:vmdk"
    assert "left out" not in said.lower()
    drives = "vmware-null-remote-floppy: a drive of the machine with the console", "install.iso: not connected when"
    others = "jobs have no controller pvscsi, the disk is on SATA", "e1000, not vmxnet3"
    assert absent(said, *drives, *others) == []


def test_every_entry_of_a_vmx_is_told_or_used(submit):
    """What a guest would miss is left out, what nobody knows is listed."""
    with open("machine.vmx", "a") as file:
        file.write('something.new = "1"\nsata0:2.present = "TRUE"\nsata0:2.deviceType = "atapi-cdrom"\n')
        file.write('sata0:2.fileName = "/dev/sr0"\npciPassthru1.present = "TRUE"\nscsi0.present = "TRUE"\n')
        file.write('scsi0.sharedBus = "virtual"\nusb.autoConnect.device0 = "0x0529:0x0001"\n')
        file.write('guestinfo.userdata = "I2Nsb3VkLWNvbmZpZwo="\nguestinfo.detailed.data = "x"\n')
        file.write('guestinfo.ignition.config.data = "e30="\nguestinfo.ignition.config.data.encoding = ""\n')
    _, said = submit("vmx", "machine.vmx")
    unused = ("guestinfo.detailed.data = x", "something.new = 1", "scsi0.present = TRUE")
    assert absent(samples.part(said, Outcome.NOT_USED), *unused) == []
    wanted = ("guestinfo.userdata", "guestinfo.ignition.config.data = e30=", "/dev/sr0", "pciPassthru1.present = TRUE")
    assert absent(samples.lost(said), *wanted, "scsi0.sharedBus", "usb.autoConnect") == []


@pytest.mark.parametrize(
    ("entries", "order"),
    [
        (FLOPPY | CDROM | DISK, ["a.vmdk", "seed.iso", "boot.flp"]),
        (
            drive("scsi0:10", "10.vmdk") | drive("scsi1:0", "b.vmdk") | drive("scsi0:2", "2.vmdk"),
            ["2.vmdk", "10.vmdk", "b.vmdk"],
        ),
        (drive("nvme0:0", "n.vmdk") | drive("sata0:0", "s.vmdk"), ["s.vmdk", "n.vmdk"]),
        (CDROM | DISK | {"bios.bootOrder": "CDROM,hdd"}, ["seed.iso", "a.vmdk"]),
        (FLOPPY | CDROM | DISK | {"bios.bootOrder": " floppy , cdrom"}, ["boot.flp", "seed.iso", "a.vmdk"]),
        (CDROM | DISK | {"bios.bootOrder": "hdd,ethernet0,cdrom"}, ["a.vmdk", "seed.iso"]),
    ],
)
def test_the_order_of_booting(of, entries, order):
    read, said = of(HEAD | entries)
    assert files(read) == order
    assert "left out" not in said.lower()


def test_the_guest_keeps_the_names_of_its_disks_whatever_boots_first(of):
    entries = drive("scsi0:0", "a.vmdk") | drive("scsi0:1", "b.vmdk") | {"bios.hddOrder": "scsi0:1"}
    assert of(HEAD | entries)[0]["vm_disk"] == "b.vmdk:sdb:w:vmdk,a.vmdk:sda:w:vmdk"


def test_an_order_that_is_made_to_be_much_work_is_not(of):
    drives = {f"sata{at // 999}:{at % 999}.{name}": "1" for at in range(7000) for name in ("present", "fileName")}
    began = time.process_time()
    of(HEAD | drives | {"bios.hddOrder": "a," * 300_000}, status=1)
    assert time.process_time() - began < 8


def test_what_no_job_boots_from_is_left_out(of):
    entries = HEAD | drive("scsi0:0", "a.vmdk") | {"bios.bootOrder": "ethernet0,hdd"}
    _, said = of(entries, status=1)
    assert "boot from ethernet0" in samples.lost(said)
    assert files(of(entries, lax=True)[0]) == ["a.vmdk"]


def test_disks_on_several_kinds_of_controllers_are_pointed_out(of):
    entries = HEAD | drive("scsi0:0", "a.vmdk") | drive("ide0:0", "b.vmdk")
    assert "more than one kind of controller" in of(entries)[1]
    assert "more than one kind of controller" not in of(entries | {"bios.hddOrder": "scsi0:0"})[1]


@pytest.mark.parametrize("words", [[], ["--as-is"]])
def test_an_encrypted_vm_is_called_that(of, words):
    entries = {".encoding": "UTF-8", "encryption.keySafe": "vmware:key/list/x", "encryption.data": "abc="}
    assert absent(of(entries, *words, status=1)[1], "m.vmx is encrypted", "take the encryption away") == []


@pytest.mark.parametrize(
    ("entries", "name", "value"),
    [
        ({"firmware": "efi", "uefi.secureBoot.enabled": "TRUE", "nvram": "m.nvram"}, "Firmware", '"uefi-secure"'),
        ({"managedVM.autoAddVTPM": "software", "firmware": "efi"}, "TPM", "true"),
        ({"guestOS": "arm-debian12-64", "firmware": "efi"}, "Arch", '"aarch64"'),
        ({"guestOS": "windows9-64"}, "Clock", '"localtime"'),  # VMware gives it to guests with Windows
        ({"guestOS": "debian12-64", "rtc.diffFromUTC": "3600"}, "Clock", '"localtime"'),
        ({"guestOS": "windows9-64", "rtc.diffFromUTC": "0"}, "Clock", None),
        ({"guestOS": "debian12-64"}, "Clock", None),
    ],
)
def test_what_is_of_no_device(of, entries, name, value):
    read, said = of(HEAD | drive("sata0:0", "a.vmdk") | entries)
    assert read.get(f"MY.VMPARAM_vm_{name}") == value
    assert ("new UEFI variables" in said) is ("nvram" in entries)
    assert ("Clock: VMPARAM_vm_Clock = localtime" in said) is (value == '"localtime"')


@pytest.mark.parametrize(("slot", "card"), [("160", "ens160"), ("1184", ""), ("-1", "")])
def test_a_nic_has_another_name_in_the_guest(of, slot, card):
    nic = {"ethernet0.present": "TRUE", "ethernet0.virtualDev": "vmxnet3", "ethernet0.pciSlotNumber": slot}
    said = samples.changed(of(HEAD | drive("sata0:0", "a.vmdk") | nic)[1])
    assert ("Linux may call it" in said) == bool(card)
    assert not card or f"Linux may call it ens2, in place of {card}; --as-is keeps it" in said


@pytest.mark.parametrize(
    ("entries", "kind"),
    [
        ({"ethernet0.connectionType": "custom", "ethernet0.vnet": "/dev/vmnet8"}, "nat"),
        ({"ethernet0.connectionType": "custom", "ethernet0.vnet": "VMnet0"}, "bridge"),
        ({"ethernet0.connectionType": "BRIDGED"}, "bridge"),
    ],
)
def test_the_networks_of_workstation(of, entries, kind):
    read, _ = of(HEAD | drive("sata0:0", "a.vmdk") | {"ethernet0.present": "TRUE"} | entries)
    assert read["vm_networking_type"] == kind


@pytest.mark.parametrize("name", [r"C:\VMs\mine\machine.vmdk", "/vmfs/volumes/624d796f/mine/machine.vmdk"])
def test_a_disk_that_another_machine_had_elsewhere_may_be_beside_the_vmx(home, of, name):
    assert of(HEAD | drive("sata0:0", name))[0]["transfer_input_files"] == f"{home}/machine.vmdk"
    (home / "machine.vmdk").rename(home / "other.vmdk")
    of(HEAD | drive("sata0:0", name), status=1)


def test_a_vm_of_ones_own_with_snapshots_is_converted_to_one_disk(home, of):
    samples.overlay("machine-000001.vmdk", "machine.vmdk", "vmdk", "vmdk")
    entries = HEAD | drive("sata0:0", "machine-000001.vmdk")
    assert "say --own --convert" in of(entries, status=1)[1]
    read, _ = of(entries, "--own", "--convert")
    assert read["vm_disk"] == "machine-000001.qcow2:sda:w:qcow2"


# --- as it is


def test_a_vmx_as_it_is(home, submit):
    read, _ = submit("vmx", "machine.vmx", "--as-is")
    assert (read["vm_type"], read["MY.VMPARAM_VMware_VMX_File"]) == ("vmrun", '"machine.vmx"')
    assert read["MY.VMPARAM_VMware_VMDK_Files"] == '"machine.vmdk"'
    assert read["transfer_input_files"] == f"{home}/machine.vmx, {home}/machine.vmdk"
    assert "vm_disk" not in read
    read, _ = submit("vmx", "machine.vmx", "--as-is", "--shared", "--type", "vsphere")
    assert (read["vm_type"], read["MY.VMPARAM_VMware_Transfer"]) == ("vsphere", "false")
    assert read["transfer_input_files"] == f"{home}/machine.vmx"


def test_the_nvram_goes_with_a_vmx_as_it_is(home, of):
    (home / "machine.nvram").write_bytes(b"MRVN")
    read, said = of(ESXI, "--as-is")
    assert read["transfer_input_files"] == f"{home}/m.vmx, {home}/machine.vmdk, {home}/machine.nvram"
    assert "nvram = machine.nvram: goes with the job" in said
    (home / "machine.nvram").unlink()
    assert "VMware makes a new one" in of(ESXI, "--as-is")[1]
    (home.parent / "mine.nvram").write_bytes(b"mine")
    assert "and would go with the job" in of(ESXI | {"nvram": "../mine.nvram"}, "--as-is", status=1)[1]


def test_what_a_vm_of_vmwares_has_of_it_is_told(of):
    cpus = {"cpuid.coresPerSocket": "2", "numvcpus": "4"}
    _, said = of(ESXI | cpus | {"firmware": "efi", "ethernet0.virtualDev": "e1000e"}, "--as-is")
    wanted = ("Topology: sockets=2,cores=2,threads=1", "Firmware: uefi")
    assert absent(said, *wanted, "NIC bridged (VM Network), e1000e: bridge [ethernet0]") == []
    _, said = of(ESXI | {"vtpm.present": "TRUE"}, "--as-is", status=1)
    assert "a vTPM" in samples.lost(said)


@pytest.mark.parametrize("vm_type", ["vmrun", "vsphere"])
def test_what_no_machine_with_vmware_would_run_is_not_written(home, of, vm_type):
    words = ("--as-is", "--type", vm_type)
    _, said = of(HEAD | drive("scsi0:0", "machine.vmdk", deviceType="rawDisk"), *words, status=1, lax=True)
    assert "The execute machine would hold the job" in said
    assert of(ESXI, *words)[0]["vm_type"] == vm_type
