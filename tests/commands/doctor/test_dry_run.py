"""``vmgahp doctor --job``: a job ad against this machine, with nothing started."""

import os
import threading
from pathlib import Path

import pytest

from tests.commands.doctor.support import NAME, Ad, Condor, ad, as_root, judged, named, offers, pool, snapshot, tried
from tests.commands.support import absent
from tests.lab.programs import a_program
from vmgahp import errors
from vmgahp.commands import doctor
from vmgahp.commands.doctor import dry_run
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding

__all__ = ["ad", "pool"]


def test_the_directory_of_the_file_is_the_scratch_directory_and_its_first_ad_counts(
    ad: Ad, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dry_run.read(ad.write()).working_dir() == str(ad.directory)
    assert dry_run.read(ad.write('VM_WORKING_DIR = "/elsewhere"')).working_dir() == "/elsewhere"
    ad.path.write_text("\n-- Schedd: lab\nClusterId = 1\n\nClusterId = 2\n")
    assert dry_run.read(str(ad.path)).integer("ClusterId") == 1
    monkeypatch.setenv("HOME", str(ad.directory))
    assert dry_run.read(f"~/{ad.path.name}").working_dir() == str(ad.directory)


def test_an_ad_may_come_from_a_pipe_that_takes_its_time(ad: Ad) -> None:
    reading, writing = os.pipe()
    late = threading.Timer(0.3, lambda: (os.write(writing, b"ClusterId = 7\n"), os.close(writing)))
    late.start()
    assert dry_run.read(f"/proc/self/fd/{reading}").integer("ClusterId") == 7
    late.join()
    os.close(reading)


@pytest.mark.parametrize("text", ["", "no ad at all\n"])
def test_a_file_that_is_no_ad(pool: Condor, ad: Ad, text: str) -> None:
    ad.path.write_text(text)
    judged(named(tried(pool, str(ad.path)).findings, "job ad"), BAD, hint="condor_q -l")
    assert "cannot be read" in named(tried(pool, "/nonexistent").findings, "job ad").seen
    with pytest.raises(errors.ClientFault):
        dry_run.read(str(ad.directory))


@pytest.mark.parametrize(
    ("line", "seen", "hint"),
    [
        ("JobVMMemory = 4096", "VM_MEMORY", "lower vm_memory"),
        ('VMPARAM_vm_Disk = "gone.img:vda:w:raw"', "gone.img", "transfer_input_files"),
        ('VMPARAM_vm_Disk = "guest.img:vda:w:vmdk"\nJobVMCheckpoint = true', "QEMU cannot save", "-O qcow2"),
        ("JobVMNetworking = true", "VM_NETWORKING", "vm_networking = false"),
        ("JobVMHardwareVT = true", "VM_HARDWARE_VT", "requirements"),
        ("JobUniverse = 5", "JobUniverse = 5", "universe = vm"),
        ('JobVMType = ""', "no JobVMType", "vm_type"),
    ],
)
def test_what_would_hold_the_job(pool: Condor, ad: Ad, line: str, seen: str, hint: str) -> None:
    trial = tried(pool, ad.write(line))
    (found,) = trial.findings
    judged(found, BAD, seen, hint=hint)
    assert trial.description == ""


def test_what_the_machine_does_not_offer_is_told_without_the_files(pool: Condor, ad: Ad) -> None:
    trial = tried(pool, ad.write('VMPARAM_vm_Disk = "gone.img:vda:w:raw"'), offers(VM_Memory=40))
    judged(named(trial.findings, "job memory"), BAD, "VM_Memory is 40")
    judged(named(trial.findings, "job ad"), BAD, "gone.img")


@pytest.mark.parametrize(("form", "found"), [("vmdk", ["job suspend"]), ("qcow2", [])])
def test_a_disk_with_which_no_vm_is_suspended_is_named(pool: Condor, ad: Ad, form: str, found: list[str]) -> None:
    findings = tried(pool, ad.write(f'VMPARAM_vm_Disk = "guest.img:vda:w:{form}"')).findings
    assert [finding.check for finding in findings if finding.verdict == OFF] == found


def test_a_silent_hypervisor_says_nothing_of_networks_and_a_job_of_another_type_is_told(pool: Condor, ad: Ad) -> None:
    offered = offers()
    offered.findings.append(Finding("libvirt", BAD, "libvirt", "libvirt does not answer."))
    path = ad.write("JobVMNetworking = true", 'JobVMNetworkingType = "nat"')
    found = tried(pool, path, offered, VM_NETWORKING="True", VM_NETWORKING_TYPE="nat").findings
    assert "job network" not in [finding.check for finding in found]
    judged(named(tried(pool, ad.write(vm_type="xen")).findings, "job type"), BAD, "offers VM_Type qemu")


@pytest.mark.parametrize(
    ("lines", "attributes", "check", "verdict"),
    [
        ([], {"VM_Memory": 40}, "job memory", BAD),
        (["JobVM_VCPUS = 4"], {"VM_qemu_ATTR_max_vcpus": 2}, "job CPUs", BAD),
        (["JobVMNetworking = true"], {"VM_Networking_Types": "user"}, "job network", BAD),
        (["JobVMCheckpoint = true"], {"VM_qemu_ATTR_checkpoint": False}, "job checkpoint", OFF),
    ],
)
def test_what_the_machine_does_not_offer_now(pool, ad, lines, attributes, check, verdict):
    settings = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "nat"}
    trial = tried(pool, ad.write(*lines), offers(**attributes), **settings)
    assert judged(named(trial.findings, check), verdict).hint


def test_a_driver_without_a_dry_run(pool: Condor, ad: Ad) -> None:
    trial = tried(pool, ad.write(vm_type="simulated"), offers("simulated"), VM_TYPE="simulated")
    assert named(trial.findings, "job ad").verdict == OK
    judged(named(trial.findings, "dry run"), UNKNOWN, "has no dry run")


def test_a_held_job_makes_the_exit_status(pool: Condor, ad: Ad, capsys: pytest.CaptureFixture[str]) -> None:
    path = ad.write("JobVMMemory = 4096", vm_type="simulated")
    assert doctor.show(doctor.examine(pool.environ(), job=path)) == doctor.UNFIT
    said = " ".join(capsys.readouterr().out.split())
    held = "It would be held, with VMGAHP_ERR_JOBCLASSAD_NO_VM_MEMORY_PARAM"
    assert absent(said, held, "This job cannot run here: job ad") == []


@pytest.mark.libvirt
@as_root
class TestLibvirt:
    """With the real libvirtd."""

    def test_the_domain_that_it_would_be(self, pool: Condor, ad: Ad) -> None:
        trial = tried(pool, ad.write("JobVMVNCConsole = true"), VM_RUN_AS_JOB_USER=True)
        assert {finding.verdict for finding in trial.findings} == {OK}
        assert f"+{ad.directory.stat().st_uid}:" in trial.description, "the job's user"
        parts = (f"<name>{NAME}</name>", f'file="{ad.disk}"', 'passwd="(one-time)"', "verysecret")
        assert absent(trial.description, *parts) == ["verysecret"]

    def test_nothing_is_left_behind(self, pool: Condor, ad: Ad) -> None:
        import libvirt

        path = ad.write()
        environ = pool.environ(VM_TYPE="qemu")
        connection = libvirt.open("qemu:///system")
        before = snapshot(ad.directory), snapshot(pool.directory)
        console = set(Path("/run/vmgahp").glob(f"vmgahp-{os.getpid()}-*"))
        done = doctor.examine(environ, job=path)
        assert done.trial is not None
        assert done.trial.description
        assert (snapshot(ad.directory), snapshot(pool.directory)) == before
        assert set(Path("/run/vmgahp").glob(f"vmgahp-{os.getpid()}-*")) == console
        assert NAME not in [domain.name() for domain in connection.listAllDomains()]
        connection.close()

    def test_a_vm_of_the_jobs_name_keeps_running(self, pool: Condor, ad: Ad) -> None:
        """A start would clear it away, as a leftover; a dry run must not."""
        import libvirt

        connection = libvirt.open("qemu:///system")
        xml = f"<domain type='qemu'><name>{NAME}</name><memory unit='MiB'>32</memory><os><type>hvm</type></os></domain>"
        domain = connection.createXML(xml, libvirt.VIR_DOMAIN_START_PAUSED)
        try:
            assert tried(pool, ad.write()).description
            assert domain.isActive()
        finally:
            domain.destroy()
            connection.close()

    def test_an_administrators_script_is_not_run(self, pool: Condor, ad: Ad) -> None:
        proof = pool.directory / "ran"
        script = a_program(pool.directory / "script", f"touch {proof}")
        found = named(tried(pool, ad.write(), LIBVIRT_XML_SCRIPT=script).findings, "dry run")
        judged(found, UNKNOWN, hint=str(script))
        assert not proof.exists()

    def test_a_network_that_is_not_there(self, pool: Condor, ad: Ad) -> None:
        path = ad.write("JobVMNetworking = true", 'JobVMNetworkingType = "nat"')
        network = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "nat, bridge", "VM_NAT_NETWORK": "vmgahp-none"}
        network["VM_NETWORKING_BRIDGE_INTERFACE"] = "vmgahpnone0"
        done = pool.examine(job=path, VM_TYPE="qemu", **network)
        judged(named(done.findings, "network nat"), OFF)
        judged(named(done.findings, "network bridge"), OFF, "vmgahpnone0")
        assert done.trial is not None
        assert named(done.trial.findings, "job network").verdict == BAD


def test_the_jobs_own_xml_is_read_as_by_a_start_and_what_is_of_another_machine_is_told(ad: Ad, pool: Condor) -> None:
    disk = "<disk type='file'><driver type='raw'/><source file='guest.img'/><target dev='vda'/><alias name='a'/></disk>"
    xml = f"<domain><devices><emulator>/usr/bin/kvm</emulator>{disk}</devices></domain>"
    (ad.directory / "domain.xml").write_text(xml)
    found = tried(pool, ad.write('VMPARAM_Libvirt_XML = "domain.xml"'))
    judged(named(found.findings, "job XML"), OK, "devices/emulator, devices/disk/alias")
    (ad.directory / "domain.xml").write_text(xml.replace("</devices>", "<hostdev/></devices>"))
    found = tried(pool, ad.write('VMPARAM_Libvirt_XML = "domain.xml"'))
    (bad,) = [finding for finding in found.findings if finding.verdict == BAD]
    assert "/domain/devices/hostdev" in bad.seen


def test_a_job_of_a_hypervisor_with_attributes_of_its_own_needs_no_disk_of_libvirts(pool: Condor, ad: Ad) -> None:
    ad.path.write_text("")
    lines = ('VMPARAM_VMware_VMX_File = "gone.vmx"', "VMPARAM_vm_Disk = undefined")
    found = tried(pool, ad.write(*lines, vm_type="vmware"), VM_TYPE="vmrun", VMWARE_VMRUN="/bin/true").findings
    assert "gone.vmx" in named(found, "job ad").seen


def test_the_directories_of_the_administrator_are_known(pool: Condor) -> None:
    context = pool.context(VM_SHARE_DIRS="data", VM_SHARE_DIR_DATA="/srv", VM_SHARE_DIR_DATA_IF="Owner == 1")
    assert context.settings.string("VM_SHARE_DIR_DATA") == "/srv"
    assert context.settings.string("VM_SHARE_DIR_DATA_IF") == "Owner == 1"


def test_a_job_that_leaves_its_type_open(pool: Condor, ad: Ad) -> None:
    """What it asks for is looked at as the type would that it gets; nothing is made."""
    ad.disk.rename(ad.directory / "disk.vhdx")
    path = ad.write('VMPARAM_vm_Disk = "disk.vhdx:vda:w:vhdx"', vm_type="any")
    before = snapshot(ad.directory)
    trial = tried(pool, path, offers("any"), VM_TYPE="any", VM_ANY_TYPES="qemu")
    assert named(trial.findings, "dry run").verdict == OK
    assert trial.description == "The job would run by qemu; disk.vhdx as qcow2.\n"
    assert snapshot(ad.directory) == before
    trial = tried(pool, ad.write('VMPARAM_vm_Types = "kvm, xen"'))
    judged(named(trial.findings, "job ad"), BAD, "VMPARAM_vm_Types")
