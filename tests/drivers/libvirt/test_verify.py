"""The domain that libvirt made against the one that was asked for: real domains."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import libvirt
import pytest

from tests.domain.support import SCRIPTED
from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import ASKS, CRITICAL, USER_NETWORK, WANTS, Job, driving, greeted, runs, until
from tests.lab.programs import a_program
from tests.peer import environment
from vmgahp import errors
from vmgahp.domain import verify
from vmgahp.drivers.libvirt.life.machine import LibvirtMachine

pytestmark = pytest.mark.libvirt


@pytest.fixture
def script(tools: Path) -> Path:
    """A script that prints what is in the file xml, with the job's name."""
    name = "$(sed -n 's/^VMPARAM_VM_NAME = \"\\(.*\\)\"$/\\1/p')"
    return a_program(tools / "script", f'name={name}\nsed "s/<name>x</<name>$name</" {tools}/xml')


def test_real_scripts_are_held_to_the_job(job: Job, script: Path) -> None:
    with greeted(job, LIBVIRT_XML_SCRIPT=script) as peer:
        for memory, vcpus, named in ((65, 1, "memory"), (64, 2, "CPUs"), ("lots", 1, "memory")):
            (script.parent / "xml").write_text(SCRIPTED.format(memory=memory, vcpus=vcpus, devices=""))
            text = support.refused_cleanly(peer, job, CRITICAL)
            assert str(script) in text
            assert f"its {named}" in text or f"number of {named}" in text
        (script.parent / "xml").write_text(SCRIPTED.format(memory=64, vcpus=1, devices="<disk type='nonsense'/>"))
        assert str(script) in support.refused_cleanly(peer, job, CRITICAL), (
            "what libvirt does not take is the script's as well"
        )
        other = job.scratch.parent / "other.img"
        other.write_bytes(bytes(512))
        other.chmod(0o666)
        devices = f"""<disk type='file'><source file='{other}'/><target dev='vda' bus='virtio'/></disk>
            <interface type='user'/><sound model='ich6'/><graphics type='vnc' port='-1'/><console type='pty'/>
            <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
            <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>"""
        (script.parent / "xml").write_text(SCRIPTED.format(memory=48, vcpus=1, devices=devices))
        runs(peer, job)
        assert "its memory (KiB) is 49152, and the job asks for 65536" in peer.quit()


POOLS_SCRIPT = r"""#!/usr/bin/awk -f
{ line = $0; sub(/ = .*/, "", line); sub(/^[^=]*= /, ""); gsub(/"/, ""); ad[line] = $0 }
END {
    printf "<domain type='qemu'><name>%s</name><memory>%d</memory>", ad["VMPARAM_VM_NAME"], ad["JobVMMemory"] * 1024
    printf "<vcpu>%d</vcpu><os><type>hvm</type></os><features><acpi/><apic/><pae/></features>", ad["JobVM_VCPUS"]
    print "<devices><console type='pty'><source path='/dev/ptmx'/></console>"
    for (number = split(ad["VMPARAM_vm_Disk"], disks, " *, *"); number > 0; number--) {
        split(disks[number], field, ":")
        file = substr(field[1], 1, 1) == "/" ? field[1] : ad["VM_WORKING_DIR"] "/" field[1]
        print "<disk type='file'><source file='" file "'/><target dev='" field[2] "'/></disk>"
    }
    print "</devices></domain>"
}
"""
"""What a pool's script looks like: the ad's words in between tags, and a console on a terminal of libvirt's choice."""


def test_a_pools_own_script_describes_a_vm_that_runs_with_or_without_a_disk_of_the_jobs(job: Job, script: Path) -> None:
    script.write_text(POOLS_SCRIPT)
    with greeted(job, LIBVIRT_XML_SCRIPT=script) as peer:
        runs(peer, job)
    script.write_text(POOLS_SCRIPT.replace("number > 0", "0"))
    with greeted(job, LIBVIRT_XML_SCRIPT=script) as peer:
        runs(peer, job, 'VMPARAM_vm_Disk = "/dev/null:null:null"')


CHARACTERS = """<serial type='pty'><source path='/dev/pts/77'/><target port='0'/></serial>
    <serial type='null'><target port='1'/></serial>
    <parallel type='null'/>
    <console type='pty'><source path='/dev/ptmx'/><target type='virtio' port='1'/></console>
    <channel type='unix'><source mode='bind'{1}/><target type='virtio' name='agent'/></channel>
    <channel type='unix'><target type='virtio' name='other'/></channel>
    <channel type='pty'><source path='/dev/pts/78'/><target type='virtio' name='third'/></channel>
    <channel type='tcp'><source mode='bind' host='127.0.0.1' service='0'/>
        <target type='virtio' name='fourth'/></channel>
    <channel type='udp'><source mode='connect' host='127.0.0.1' service='9'/>
        <target type='virtio' name='fifth'/></channel>
    <rng model='virtio'><backend model='builtin'/></rng><panic model='isa'/><watchdog model='i6300esb'/>"""
DISPLAYS = """<graphics type='vnc' port='-1' keymap='en-us'><listen type='socket'/></graphics><sound model='ich9'/>
    <input type='tablet' bus='usb'/><audio id='1' type='none'/>
    <video><model type='vga'/></video><video><model type='virtio'/></video><hub type='usb'/>"""
STORAGE = """<controller type='scsi' model='virtio-scsi'/><disk type='file' device='cdrom'><target dev='sdb'/></disk>
    <disk type='file' device='floppy'><target dev='fda'/></disk><filesystem type='mount' accessmode='mapped'>
    <source dir='/usr//share'/><target dir='tag'/></filesystem>
    <shmem name='{0}'><model type='ivshmem-plain'/><size unit='M'>4</size></shmem><memballoon model='none'/>
    <interface type='user'><mac address='52:54:00:AB:CD:EF'/></interface>"""


@pytest.mark.parametrize("devices", [CHARACTERS, DISPLAYS, STORAGE], ids=["characters", "displays", "storage"])
def test_whatever_libvirt_takes_of_a_script_runs(job: Job, script: Path, devices: str) -> None:
    earlier = " path='/var/lib/libvirt/qemu/channel/target/domain-9-x/agent'" if os.getuid() == 0 else ""
    devices = devices.format(f"vmgahp-{os.getpid()}", earlier)
    disk = f"<disk type='file'><source file='{job.disk}'/><target dev='hda'/></disk>"
    (script.parent / "xml").write_text(SCRIPTED.format(memory=64, vcpus=1, devices=disk + devices))
    with greeted(job, LIBVIRT_XML_SCRIPT=script) as peer:
        runs(peer, job)


def test_a_vm_that_is_not_as_asked_never_runs(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    make = LibvirtMachine.make

    def tampered(self: LibvirtMachine, image: int | None, xml: str, check: object) -> None:
        rng = "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng></devices>"
        make(self, image, xml.replace("</devices>", rng), check)  # type: ignore[arg-type]

    with driving(job, []) as (driver, ad):
        with monkeypatch.context() as patch:
            patch.setattr(LibvirtMachine, "make", tampered)
            with pytest.raises(errors.HypervisorFault, match="was not asked for, rng") as caught:
                driver.start(ad)
        assert "destroyed before it ran" in caught.value.problem
        assert job.domain() is None
        until(lambda: not support.left_behind(job.name, os.getpid()), "all of it to go")
        assert job.console() == "", "its CPUs never ran"
        driver.start(ad).destroy()


def test_a_restored_vm_that_is_not_as_asked_boots_afresh(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    support.vacate(job)
    against_job, seen = verify.against_job, []

    def once(*arguments: object) -> None:
        assert job.domain().info()[0] == libvirt.VIR_DOMAIN_PAUSED
        seen.append(arguments)
        if len(seen) == 1:
            raise verify.Mismatch(["it has a device that was not asked for, hostdev"])
        against_job(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(verify, "against_job", once)
    log: list[str] = []
    with support.started(job, log, WANTS):
        until(lambda: job.console().count("vmgahp guest up") == 2, "the guest boots again")
        assert (job.scratch / "vm_checkpoint.mem.refused-1").exists()
        assert any("was not asked for, hostdev" in line for line in log)


KILLED = """
import os, signal, sys
from vmgahp.domain import verify
def killed(*_):
    print("paused", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
verify.against_job = killed
from vmgahp.cli import daemon
sys.exit(daemon(["vmgahp", "-f", "-t", "-M", "3"]))
"""
"""A server that is killed when the VM is made and does not run yet."""


def test_a_server_killed_before_its_vm_runs_leaves_none(job: Job) -> None:
    environ = environment("kvm", job.scratch, VM_ALLOW_EMULATION=True)
    lines = ["CLASSAD", *job.ad(), "CLASSAD_END", "CONDOR_VM_START 1 kvm", ""]
    command = [sys.executable, "-P", "-c", KILLED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, env=environ, cwd=job.scratch, text=True) as process:
        assert process.stdin
        assert process.stderr
        process.stdin.write("\r\n".join(lines))
        process.stdin.flush()
        assert "paused" in process.stderr.read()
        assert process.wait(60) == -signal.SIGKILL
    until(lambda: job.domain() is None, "the guardian destroys it")
    until(lambda: not [each for each in support.left_behind(job.name, 0) if "vmgahp" in each], "the guardian ends")
    assert job.console() == ""


def test_a_start_is_nobodys_pause(job: Job, elsewhere: Path) -> None:
    with support.running(job, WANTS, *ASKS, **USER_NETWORK) as peer:
        assert peer.run("STATUS", 1)[-5] == "STATUS=Running"
        until(lambda: "2\n" in job.console(), "the guest counts to two")
        support.done(peer, "CHECKPOINT")
        log = peer.quit()
    support.moved(job, elsewhere)
    with support.running(job, WANTS, *ASKS, **USER_NETWORK) as peer:
        assert peer.run("STATUS", 1)[-5] == "STATUS=Running"
        log += peer.quit()
    assert "continues from its saved memory" in log
    assert "it was paused" not in log
    assert "it was resumed" not in log
