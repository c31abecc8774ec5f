"""Devices of real guests: firmware, other architectures, TPM, NICs, shared disks and directories."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import MAC, OTHER_MAC, USER_NETWORK, WANTS, Job, done, evict, refused, running, until
from tests.lab.programs import a_program
from tests.peer import Peer
from vmgahp import errors, findings
from vmgahp.commands.submit.machine import Guest, GuestNic, card_name
from vmgahp.drivers.libvirt.start import capabilities

pytestmark = pytest.mark.libvirt

MISMATCHED = "VMGAHP_ERR_JOBCLASSAD_MISMATCHED_HARDWARE_VT"
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")
BAD_DISK = "VMGAHP_ERR_JOBCLASSAD_KVM_INVALID_DISK_PARAM"

UEFI = ('VMPARAM_vm_Firmware = "uefi"', 'VMPARAM_vm_Disk = "guest.img:vda:w:raw"', "JobVMMemory = 128")


def firmware_speaks(job: Job) -> bool:
    """Whether a UEFI firmware with nothing to boot has come to its end, on the serial console: its own shell, where it
    has one."""
    return any(words in job.console() for words in ("Shell", "No bootable option"))


def has_firmware_memory(job: Job) -> bool:
    """Whether libvirt keeps a file for the firmware of the job's VM."""
    directory = Path(capabilities.firmware_directory(support.URI))
    return directory.is_dir() and any(directory.glob(f"{job.name}_*"))


# Firmware


def test_a_guest_of_uefi_goes_on_from_its_checkpoint_and_its_firmwares_memory_goes_with_it(
    job: Job, elsewhere: Path
) -> None:
    with running(job, WANTS, *UEFI) as peer:
        assert job.live().find("os/loader") is not None
        assert has_firmware_memory(job)
        until(lambda: firmware_speaks(job), "the firmware comes to its end")
        done(peer, "SUSPEND")
        assert has_firmware_memory(job)
        done(peer, "RESUME")
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        evict(peer)
    assert not has_firmware_memory(job)
    support.moved(job, elsewhere)
    with running(job, WANTS, *UEFI) as peer:
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        assert has_firmware_memory(job)
        done(peer, "STOP")
        assert not has_firmware_memory(job)
        assert "continues from its saved memory" in peer.quit()


def test_secure_boot_knows_its_keys(job: Job) -> None:
    with running(job, *UEFI, 'VMPARAM_vm_Firmware = "uefi-secure"'):
        assert job.live().find("os/loader").get("secure") == "yes"
        until(lambda: "Violation" in job.console() or "No bootable" in job.console(), "it boots nothing unsigned")
    assert not has_firmware_memory(job)


def test_secure_boot_of_another_architecture_survives_a_checkpoint(job: Job) -> None:
    if os.uname().machine == "aarch64":
        pytest.skip("needs x86-64")
    asks = 'VMPARAM_vm_Arch = "aarch64"', 'VMPARAM_vm_Firmware = "uefi-secure"', "JobVMMemory = 256"
    lines = WANTS, *UEFI, *asks
    with running(job, *lines, VM_ALLOW_EMULATION=True) as peer:
        assert capabilities.installed_firmwares()[job.live().findtext("os/loader")].secure
        evict(peer)
    with running(job, *lines, VM_ALLOW_EMULATION=True) as peer:
        assert "continues from its saved memory" in peer.quit()


def test_an_ide_disk_has_no_place_beside_uefi(job: Job) -> None:
    assert "hda" in refused(job, BAD_DISK, 'VMPARAM_vm_Firmware = "uefi"')


def test_a_guest_of_another_architecture_boots_its_firmware(job: Job) -> None:
    if os.uname().machine == "aarch64":
        pytest.skip("needs x86-64")
    disks = 'VMPARAM_vm_Disk = "guest.img:vda:w:raw,seed.iso:sdb:r:iso"'
    job.put("seed.iso", bytes(1 << 16))
    more = ("JobVMMemory = 256", "JobVMVNCConsole = true", "VMPARAM_vm_TPM = true")
    with running(job, 'VMPARAM_vm_Arch = "aarch64"', disks, *more, VM_ALLOW_EMULATION=True):
        assert job.live().find("os/type").get("arch") == "aarch64"
        until(lambda: "Shell" in job.console() or "BdsDxe" in job.console(), "the firmware comes up")
    assert not has_firmware_memory(job)


# TPM


def swtpms(peer: Peer, job: Job) -> list[int]:
    """The process ids of what the job's user runs as swtpm for a daemon, whose number its directories have."""
    found = []
    for pid in support.processes(f"-{peer.process.pid}-"):
        with contextlib.suppress(OSError):
            place = Path(f"/proc/{pid}")
            if (place / "comm").read_text() == "swtpm\n" and place.stat().st_uid == job.scratch.stat().st_uid:
                found.append(pid)
    return found


def test_a_tpm_lives_as_long_as_its_vm(job: Job, elsewhere: Path) -> None:
    options = ("VMPARAM_vm_TPM = true", WANTS)
    with running(job, *options) as peer:
        directory = Path(job.live().find("devices/tpm/backend/source").get("path", "")).parent
        assert len(swtpms(peer, job)) == 1
        done(peer, "SUSPEND", "RESUME")
        assert peer.run("STATUS", 1)[1] == "STATUS=Running"
        assert len(swtpms(peer, job)) == 1
        evict(peer)
    assert not swtpms(peer, job)
    assert not directory.exists()
    support.moved(job, elsewhere)
    with running(job, *options) as peer:
        assert len(swtpms(peer, job)) == 1
        assert "continues from its saved memory" in peer.quit()
    assert not swtpms(peer, job)


def test_a_server_that_was_killed_leaves_no_tpm_and_no_memory_of_a_firmware(job: Job) -> None:
    with running(job, *UEFI, "VMPARAM_vm_TPM = true") as peer:
        assert has_firmware_memory(job)
        directory = Path(job.live().find("devices/tpm/backend/source").get("path", "")).parent
        assert {path.name for path in directory.iterdir()} == {"tpm", "state", "pid"}
        peer.end_by(signal.SIGKILL)
    until(lambda: job.domain() is None and not swtpms(peer, job), "the guardian clears up")
    until(lambda: not directory.exists() and not has_firmware_memory(job), "the guardian removes what both kept")


def test_a_tpm_that_does_not_work_fails_the_start_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    program = a_program(job.scratch.parent / "swtpm", "exit 1")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert "swtpm does not answer" in refused(job, MISMATCHED, "VMPARAM_vm_TPM = true")


# NICs and CPUs


def test_network_cards_are_as_the_list_says(job: Job) -> None:
    nics = f'"user:{MAC}, user:e1000:down, user:rtl8139, user:down:{OTHER_MAC.replace(":", "-")}"'
    with running(job, f"VMPARAM_vm_NICs = {nics}", **USER_NETWORK) as peer:
        found = [
            [part.get(name) if (part := nic.find(path)) is not None else None for path, name in FACTS]
            for nic in job.live().iterfind("devices/interface")
        ]
        models = ["virtio", "e1000", "rtl8139", "virtio"]
        assert [facts[1:] for facts in found] == [list(pair) for pair in zip(models, [None, "down"] * 2, strict=True)]
        assert [found[0][0], found[3][0]] == [MAC, OTHER_MAC]
        assert support.words_of(peer.run("STATUS", 1))["MAC"] == MAC


FACTS = (("mac", "address"), ("model", "type"), ("link", "state"))


@pytest.mark.parametrize("lines", [(), ("JobVMVNCConsole = true",), UEFI], ids=["pc", "display", "q35"])
def test_network_cards_are_where_vmgahp_submit_says(job: Job, lines: tuple[str, ...]) -> None:
    """It tells people how Linux calls them."""
    options = {"Firmware": "uefi"} if lines == UEFI else {}
    guest = Guest("job", nics=[GuestNic("user"), GuestNic("user")], options=options)
    with running(job, 'VMPARAM_vm_NICs = "user, user"', *lines, **USER_NETWORK):
        addresses = [nic.find("address") for nic in job.live().iterfind("devices/interface")]
        places = [tuple(int(address.get(name), 16) for name in ("bus", "slot")) for address in addresses]
    expected = guest.card_names(guest.chipset(), has_display=lines == ("JobVMVNCConsole = true",))
    assert [card_name(guest.chipset(), *place) for place in places] == expected


# Disks


def test_a_vm_can_have_many_disks_of_all_kinds(job: Job) -> None:
    entries = ["guest.img:hda:w:raw"]
    devices = [f"vd{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"] + [f"sd{letter}" for letter in "abcdefgh"]
    for number, device in enumerate([*devices, "sdi", "hdc", "fda"]):
        image = job.put(f"{number}.img", bytes(1474560))
        kind = "r:iso" if device in ("hdc", "sdh") else "r:raw" if device in ("sdi", "vdz") else "w:raw"
        entries.append(f"{image.name}:{device}:{kind}")
    with running(job, f'VMPARAM_vm_Disk = "{",".join(entries)}"'):
        kinds = [disk.get("device") for disk in job.live().iterfind("devices/disk")]
        assert (len(kinds), kinds.count("cdrom"), kinds.count("floppy")) == (len(entries), 2, 1)
        until(lambda: "1\n" in job.console(), "the guest boots from the first disk")


def test_a_disk_has_two_writers_where_both_say_so(job: Job, elsewhere: Path) -> None:
    common = job.put(job.scratch.parent / "common.img", bytes(1 << 20))
    second = Job(elsewhere, job._connection)

    def disks(permission: str) -> str:
        return f'VMPARAM_vm_Disk = "guest.img:hda:w:raw,{common}:vdb:{permission}:raw"'

    with running(job, disks("ws")):
        with running(second, disks("rws")):
            assert second.live().find("devices/disk/shareable") is not None
        refused(second, BAD_DISK, disks("w"))


# A shared directory


@pytest.mark.parametrize(("option", "name"), [("true", ""), ('"share"', "share")])
def test_a_directory_of_the_jobs_is_shared_where_the_machine_allows_it(job: Job, option: str, name: str) -> None:
    with running(job, f"VMPARAM_vm_Share = {option}", VM_SHARE_SCRATCH="9p") as peer:
        share = job.live().find("devices/filesystem")
        assert share.get("accessmode") == "mapped"
        assert share.find("source").get("dir") == str(job.scratch / name).rstrip("/")
        assert (job.scratch / name).stat().st_uid == job.scratch.stat().st_uid
        assert peer.run("SUSPEND", 1) == ["1", "VMGAHP_ERR_VM_NO_SUPPORT_SUSPEND"]
        done(peer, "SOFT_SUSPEND")


@pytest.mark.parametrize(
    ("settings", "option", "said"),
    [
        ({}, "VMPARAM_vm_Share = true", "VM_SHARE_SCRATCH"),
        ({"VM_SHARE_SCRATCH": "9p"}, "VMPARAM_vm_Share = true\nJobVMCheckpoint = true", "JobVMCheckpoint"),
    ],
)
def test_no_other_directory_is_shared(job: Job, settings: dict[str, str], option: str, said: str) -> None:
    assert said in refused(job, MISMATCHED, *option.splitlines(), **settings)


def two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "groups_for_qemu", lambda _domain_type: {991, 992})


@as_root
def test_libvirts_own_user_shares_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where QEMU cannot run as the job's user, the job is held, and the machine says so."""
    two_groups(monkeypatch)
    with support.driving(job, [], "VMPARAM_vm_Share = true", VM_SHARE_SCRATCH="9p") as (driver, ad):
        with pytest.raises(errors.JobFault, match="QEMU cannot run as the job's user"):
            driver.start(ad)
        assert driver.survey(time.monotonic() + 20).attributes["share"] == "none"


@as_root
@pytest.mark.parametrize("as_job_user", [False, True])
def test_only_a_job_that_shares_has_a_qemu_of_its_users(job: Job, as_job_user: bool) -> None:
    for option, expected in (("false", as_job_user), ("true", True)):
        with running(
            job, f"VMPARAM_vm_Share = {option}", VM_SHARE_SCRATCH="9p", VM_RUN_AS_JOB_USER=as_job_user
        ) as peer:
            pid = peer.run("GETPID", 1)[1]
            assert (os.stat(f"/proc/{pid}").st_uid == job.scratch.stat().st_uid) == expected


@as_root
def test_two_groups_are_the_machines_fault_if_qemu_is_the_jobs_user(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe says so; no job is tried."""
    two_groups(monkeypatch)
    with support.driving(job, [], VM_RUN_AS_JOB_USER=True) as (driver, ad):
        [found] = [found for found in driver.survey(time.monotonic() + 20).findings if found.check == "QEMU's user"]
        assert found.verdict == findings.BAD
        assert "chmod o+x /var/lib/libvirt/qemu" in found.hint
        with pytest.raises(errors.MachineFault, match="two groups"):
            driver.start(ad)


# What nobody knows


def test_an_unknown_wish_is_refused_by_name_and_ignored_on_request(job: Job) -> None:
    assert "VMPARAM_vm_Firmwear" in refused(job, MISMATCHED, 'VMPARAM_vm_Firmwear = "uefi"')
    with running(job, 'VMPARAM_vm_Firmwear = "uefi"', "VMPARAM_vm_Ignore_Unknown = true") as peer:
        assert "VMPARAM_vm_Firmwear" in peer.quit()
