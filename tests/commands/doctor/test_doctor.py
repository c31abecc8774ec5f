"""The doctor's verdicts, each thing broken in turn: HTCondor is a pair of scripts here, and the rest is real.

What needs a libvirtd that may be stopped, a whole pool or another user is in pool/test_doctor.py.
"""

import json
import os
import socket
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.commands.doctor.support import AD, Condor, as_root, failure, judged, named, pool, snapshot, tree
from tests.commands.support import absent
from tests.conftest import JOB_UID
from vmgahp import cli
from vmgahp.commands import doctor
from vmgahp.commands.doctor import condor, context, dry_run, host
from vmgahp.commands.doctor.context import Context, User
from vmgahp.config import sources
from vmgahp.config.sources import find_tool
from vmgahp.daemon import probe
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding

__all__ = ["pool"]

# The whole


def test_every_check_is_made_whatever_is_broken(pool: Condor) -> None:
    """With nothing right at all, nothing raises and nothing is left out."""
    pool.address.unlink()
    environ = pool.environ(
        VM_TYPE="nonsense", VM_MEMORY="lots", VM_GAHP_SERVER="gone", EXECUTE="/nonexistent", VM_GAHP_LOG=None
    )
    done = doctor.examine(environ)
    for check in ("settings", "VM_TYPE", "VM_GAHP_SERVER", "hypervisor", "disk space", "startd"):
        assert named(done.findings, check).verdict in (BAD, OFF), check
    assert named(done.findings, "log").verdict == UNKNOWN
    assert done.status == doctor.UNFIT
    assert "begin with settings" in done.verdict()


def test_peoples_commands(pool: Condor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in pool.environ(VM_MEMORY=0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VMGAHP_CONFIG", raising=False)
    assert cli.main(["vmgahp", "doctor"]) == doctor.UNFIT
    assert "VM_MEMORY is not set" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["vmgahp", "probe", "--type", "simulated", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["capable"] is False


def test_it_leaves_the_pools_files_as_they_were(pool: Condor, scratch: Path) -> None:
    ad = scratch / "ad.txt"
    ad.write_text('User = "a@b"\nClusterId = 1\nProcId = 0\nJobVMType = "simulated"\nJobVMMemory = 32\n')
    environ = pool.environ()
    before = snapshot(pool.directory), snapshot(scratch)
    doctor.examine(environ, job=str(ad))
    assert (snapshot(pool.directory), snapshot(scratch)) == before


# HTCondor's settings


def test_no_htcondor(pool: Condor) -> None:
    environ = pool.environ() | {"PATH": "/nonexistent"}
    if find_tool(environ):
        pytest.skip("needs a machine without HTCondor")
    done = doctor.examine(environ)
    judged(named(done.findings, "HTCondor"), BAD, hint="install HTCondor")
    assert done.status == doctor.UNFIT


def test_a_machine_with_a_file_of_settings_needs_no_htcondor(pool: Condor) -> None:
    settings = pool.directory / "vmgahp.conf"
    settings.write_text("VM_TYPE = simulated\nVM_MEMORY = 64\n")
    done = doctor.examine({"PATH": "/nonexistent", "VMGAHP_CONFIG": str(settings)})
    assert named(done.findings, "HTCondor").verdict in (OK, OFF)
    assert done.status == doctor.FIT


@pytest.mark.parametrize(
    ("name", "seen", "hint"),
    [(None, "VM_TYPE is not set", "set VM_TYPE = kvm"), ("vbox", "VM_TYPE = vbox", "set VM_TYPE to one of")],
)
def test_vm_type(pool: Condor, name: str | None, seen: str, hint: str) -> None:
    judged(condor.vm_type(pool.context(VM_TYPE=name)), BAD, seen, hint=hint)


def test_settings_that_are_no_values(pool: Condor) -> None:
    done = pool.examine(VM_MEMORY="lots", VM_STOP_TIMEOUT="-1")
    memory, timeout = [finding for finding in done.findings if finding.check == "settings"]
    judged(memory, BAD, "VM_MEMORY = lots")
    judged(timeout, BAD, hint="VM_STOP_TIMEOUT")
    assert "memory" not in [finding.check for finding in done.findings], "said once is enough"


def test_settings_that_cannot_be_read(pool: Condor) -> None:
    """Nothing else is looked at: what cannot be read is not known to be unset."""
    environ = pool.environ()
    pool.script("condor_config_val", 'import sys; sys.exit("Configuration error, line 3")')
    done = doctor.examine(environ, job="/some/ad")
    assert [one.check for one in done.findings] == ["HTCondor", "host name", "settings"]
    judged(named(done.findings, "settings"), BAD, "Configuration error, line 3")
    assert done.status == doctor.UNFIT


def test_a_resolver_that_hangs(pool: Condor, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(probe.Resolver, "_ask", lambda resolver: never.wait())
    monkeypatch.setattr(host, "RESOLVER_PATIENCE", 0.1)
    monkeypatch.setattr(probe, "SLOW_NAME", 0.05)
    judged(named(pool.examine().findings, "host name"), OFF, os.uname().nodename, hint="/etc/resolv.conf")
    never.set()


HANGS = "import time\ntime.sleep(1000)\n"


def test_a_tool_that_hangs_is_one_cause(pool: Condor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DEADLINE", 0.5)
    environ = pool.environ()
    pool.script("condor_config_val", HANGS)
    done = doctor.examine(environ)
    assert [one.check for one in done.findings if one.verdict == BAD and not one.because] == ["settings"]
    assert "condor_config_val did not answer within" in named(done.findings, "settings").seen


def test_a_resolver_for_which_htcondors_tool_waits_is_the_cause(pool, monkeypatch, capsys):
    """HTCondor's tools look this machine's name up, and where nobody can say, again and again."""
    again = Mock(side_effect=socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
    monkeypatch.setattr(probe.Resolver, "_ask", again)
    assert named(pool.examine().findings, "host name").verdict == OFF, "jobs run where HTCondor can be asked"
    environ = pool.environ()
    monkeypatch.setattr(sources, "DEADLINE", 0.5)
    pool.script("condor_config_val", HANGS)
    assert doctor.show(doctor.examine(environ)) == doctor.UNFIT
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("XX") + said.count("✗") == 1
    assert "cannot run here: host name." in said
    assert named(doctor.examine(environ).findings, "settings").because == "host name"


def test_settings_whose_reading_hangs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory of PATH, say, or among the accounts, for which nobody has a deadline."""
    never = threading.Event()
    monkeypatch.setattr(context, "LOOK_DEADLINE", 0.1)
    monkeypatch.setattr(Context, "__init__", lambda *_: never.wait())
    done = doctor.examine({})
    never.set()
    judged(named(done.findings, "settings"), BAD, "had not ended", hint="PATH")
    assert done.status == doctor.UNFIT


def test_a_job_on_a_file_system_that_hangs(pool: Condor, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(dry_run, "read", lambda _path: never.wait())
    environ = pool.environ()
    monkeypatch.setattr(context, "LOOK_DEADLINE", 5.0)
    done = doctor.examine(environ, job="/far/away")
    never.set()
    assert done.trial is not None
    (found,) = done.trial.findings
    judged(found, UNKNOWN, "The check of the job in /far/away had not ended")
    assert done.status == doctor.UNSURE


def test_what_is_well_is_one_sentence_and_more_if_asked(pool: Condor, capsys: pytest.CaptureFixture[str]) -> None:
    environ = pool.environ()
    if os.getuid() != 0:
        pytest.skip("needs root")
    assert doctor.show(doctor.examine(environ)) == doctor.FIT
    said = capsys.readouterr().out
    assert "\n\n" not in said
    assert absent(" ".join(said.split()), "could run here. Looked at: HTCondor, host name, settings", "--verbose") == []
    assert doctor.show(doctor.examine(environ), verbose=True) == doctor.FIT
    assert "looked at condor_config_val" in capsys.readouterr().out


def test_one_cause_is_told_once(pool: Condor, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.show(doctor.examine(pool.environ(VM_TYPE="vbox"))) == doctor.UNFIT
    said = " ".join(capsys.readouterr().out.split())
    assert "Not checked because it depends on this: hypervisor" in said
    assert "cannot run here: VM_TYPE" in said


def test_networking(pool: Condor) -> None:
    assert judged(condor.networking(pool.context(VM_NETWORKING=True)), OFF, "names no kind").hint
    allowed = {"VM_NETWORKING_TYPE": "user, nat", "VM_ALLOW_HOST_LOOPBACK": True}
    judged(condor.networking(pool.context(VM_NETWORKING=True, **allowed)), OK, "jobs may have: user, nat")


def server(pool: Condor, **settings: object) -> Finding:
    found = condor.server(pool.context(**settings))
    assert found is not None
    return found


def test_the_server_is_missing_or_cannot_be_executed(pool: Condor) -> None:
    missing = "/usr/sbin/no-such-server"
    judged(server(pool, VM_GAHP_SERVER=missing), BAD, missing, hint="set VM_GAHP_SERVER")
    assert server(pool, VM_GAHP_SERVER=None).verdict == BAD
    assert "full path" in server(pool, VM_GAHP_SERVER="sbin/it").seen
    assert "not a file" in server(pool, VM_GAHP_SERVER="/").seen
    pool.server.chmod(0o644)
    assert judged(server(pool), BAD, "may not execute").hint == f"chmod 755 {pool.server}"


@as_root
def test_the_startd_runs_other_types_as_its_own_user(pool: Condor) -> None:
    pool.server.parent.chmod(0o700)
    found = server(pool, CONDOR_IDS=f"{JOB_UID}.{JOB_UID}")
    assert (found.verdict, found.hint) == (BAD, f"chmod o+x {pool.server.parent}")
    assert server(pool, VM_TYPE="kvm", CONDOR_IDS=f"{JOB_UID}.{JOB_UID}").verdict == OK, "root passes everywhere"


@as_root
def test_a_server_that_others_can_change_is_not_run(pool: Condor) -> None:
    proof = pool.directory / "ran"
    pool.program(f"#!/bin/sh\ntouch {proof}\n")
    pool.server.chmod(0o777)
    judged(server(pool), OFF, f"Others than root can change {pool.server}")
    pool.server.chmod(0o775)
    assert server(pool).verdict == OFF, "a group is others, whoever is in it"
    pool.server.chmod(0o755)
    pool.server.parent.chmod(0o777)
    assert str(pool.server.parent) in server(pool).hint
    assert not proof.exists()


@as_root
@pytest.mark.parametrize(
    ("script", "verdict", "seen"),
    [
        ("echo '$CondorVersion: 23.9.6 2026-07-12 $'", OFF, "HTCondor's own server"),
        ("echo vmgahp 0.0.1", OFF, "is vmgahp 0.0.1"),
        ("echo no module named vmgahp >&2; exit 1", BAD, "no module named vmgahp"),
        ("exec sleep 60", BAD, "did not say its version"),
    ],
)
def test_what_server_it_is(pool: Condor, script: str, verdict: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in script:
        monkeypatch.setattr(condor, "DEADLINE", 1.0)
    pool.program(f"#!/bin/sh\n{script}\n")
    judged(server(pool), verdict, seen)


# The log setting


def test_a_log_that_cannot_be_written(pool: Condor) -> None:
    assert "not set" in condor.log_file(pool.context(VM_GAHP_LOG=None)).seen
    assert "not a directory" in condor.log_file(pool.context(VM_GAHP_LOG="/nonexistent/log")).seen
    (pool.directory / "log/VMGahpLog").symlink_to("/etc/passwd")
    judged(condor.log_file(pool.context()), OFF, "not a regular file")


# libvirt

LIBVIRTD = {
    "usr__sbin__libvirtd": "",
    "usr__lib__x86_64-linux-gnu__libvirt__connection-driver__libvirt_driver_qemu.so": "",
}
RUNS = {"proc__17__comm": "libvirtd\n"}
SOCKET = {"run__libvirt__libvirt-sock": ""}
MODULAR = {name.replace("libvirtd", "virtqemud"): text for name, text in LIBVIRTD.items()}
BESIDE = {"usr__sbin__virtqemud": "", "run__libvirt__virtqemud-sock": ""}
"""Both may be installed on Fedora; libvirt's clients take virtqemud's socket then."""


@as_root
@pytest.mark.parametrize(
    ("files", "seen", "hint"),
    [
        ({}, "Neither libvirtd nor virtqemud is installed", "libvirt-daemon-system"),
        ({"usr__sbin__libvirtd": ""}, "without its driver for QEMU", "libvirt-daemon-driver-qemu"),
        (LIBVIRTD, "libvirtd is installed and does not run", "systemctl enable --now libvirtd"),
        (LIBVIRTD | SOCKET, "does not run, although", "systemctl start libvirtd"),
        (LIBVIRTD | RUNS, "its socket /run/libvirt/libvirt-sock is missing", "systemctl restart libvirtd.socket"),
        (MODULAR, "virtqemud is installed and does not run", "systemctl enable --now virtqemud.socket"),
        (LIBVIRTD | RUNS | SOCKET | BESIDE, "although /run/libvirt/virtqemud-sock", "systemctl start virtqemud,"),
    ],
)
def test_why_libvirt_is_not_reached(pool: Condor, tmp_path: Path, files: dict[str, str], seen: str, hint: str) -> None:
    said = host.libvirt_cause(pool.context(tree(tmp_path, **files)))
    assert seen in said[0]
    assert hint in said[1]


@pytest.mark.libvirt
def test_a_libvirt_that_waits_for_qemu_keeps_nobody_waiting(pool: Condor, monkeypatch: pytest.MonkeyPatch) -> None:
    from vmgahp.drivers.libvirt.link.connection import LibvirtConnection

    silent = Mock(getCapabilities=threading.Event().wait)
    monkeypatch.setattr(LibvirtConnection, "_connect", lambda _self: silent)
    monkeypatch.setattr(host, "LIBVIRT_DEADLINE", 0.3)
    done = pool.examine(VM_TYPE="qemu", VM_LIBVIRT_URI="qemu+unix:///system?socket=/far")
    judged(named(done.findings, "libvirt"), BAD, "qemu+unix:///system?socket=/far has not answered within")


@as_root
@pytest.mark.libvirt
def test_a_libvirt_that_answers_nobody(pool: Condor) -> None:
    """The machine's own libvirtd runs, or it would be told of that first."""
    done = pool.examine(VM_TYPE="qemu", VM_LIBVIRT_URI="qemu+unix:///system?socket=/nonexistent/libvirt-sock")
    assert judged(named(done.findings, "libvirt"), BAD, "/nonexistent/libvirt-sock").hint
    assert named(done.findings, "startd")
    assert done.status == doctor.UNFIT


# KVM

FLAGS = "processor : 0\nflags\t\t: fpu {}\n"
LOADED = {"sys__module__kvm_intel__refcnt": "0"}


@pytest.mark.parametrize(
    ("files", "seen", "hint"),
    [
        ({"proc__cpuinfo": FLAGS.format("vmx")}, "module kvm_intel is not loaded", "modprobe kvm_intel"),
        ({"proc__cpuinfo": FLAGS.format("svm")}, "module kvm_amd is not loaded", "modprobe kvm_amd"),
        ({"proc__cpuinfo": FLAGS.format("vmx"), **LOADED}, "is loaded and there is no /dev/kvm", "udevadm trigger"),
        ({"proc__cpuinfo": FLAGS.format("sse")}, "neither vmx nor svm", "firmware (BIOS"),
        ({"proc__cpuinfo": FLAGS.format("hypervisor")}, "its host does not let it", "nested=1"),
        ({"proc__cpuinfo": FLAGS.format("hypervisor vmx"), "dev__kvm": ""}, "nested", "host-passthrough"),
    ],
)
def test_why_kvm_does_not_work(pool: Condor, tmp_path: Path, files: dict[str, str], seen: str, hint: str) -> None:
    said = host.kvm_cause(pool.context(tree(tmp_path, **files)))
    assert seen in said[0]
    assert hint in said[1]


def test_emulation_is_named_as_the_other_way(pool: Condor, tmp_path: Path) -> None:
    context = pool.context(tree(tmp_path, proc__cpuinfo=FLAGS.format("vmx")))
    bad = host.explain_kvm(context, Finding("kvm", BAD, "it", "KVM does not work.", "mend KVM."))
    assert absent(bad.hint, "modprobe kvm_intel", "or set VM_ALLOW_EMULATION = True") == []
    assert "until then" in host.explain_kvm(context, bad._replace(verdict=OFF)).hint


@as_root
def test_a_kvm_device_that_libvirts_user_may_not_open(pool: Condor) -> None:
    context = pool.context(tree(pool.directory / "machine", dev__kvm=""), VM_TYPE="kvm")
    context.qemu_user = User("stranger", JOB_UID, JOB_UID, (JOB_UID,))
    device = pool.directory / "machine/dev/kvm"
    for mode in (0o660, 0o664, 0o662):
        device.chmod(mode)
        judged(host.kvm_device(context), OFF, "examines QEMU anew")
    device.chmod(0o666)
    judged(host.kvm_device(context), OK)


# QEMU's user


def scratch(pool: Condor, **settings: object) -> Finding:
    found = host.scratch(pool.context(**{"VM_TYPE": "kvm"} | settings))
    assert found is not None
    return found


@as_root
def test_execute_is_closed_to_the_jobs_user(pool: Condor) -> None:
    execute = pool.directory / "execute"
    assert scratch(pool).verdict == OK
    execute.chmod(0o700)
    for as_user in (True, False):
        found = scratch(pool, VM_RUN_AS_JOB_USER=as_user)
        assert (found.verdict, found.hint) == (BAD, f"chmod o+x {execute}")
    execute.chmod(0o755)
    pool.directory.chmod(0o750)
    assert f"may not pass {pool.directory} " in scratch(pool).seen
    assert "is not a directory" in scratch(pool, EXECUTE="/nonexistent").seen


def test_a_personal_htcondor_is_not_roots(pool: Condor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server runs as the user who asks, and what that user sees is what there is."""
    monkeypatch.setattr(os, "geteuid", lambda: JOB_UID)
    ids = {"CONDOR_IDS": f"{JOB_UID + 1}.{JOB_UID + 1}"}
    assert pool.context(**ids).blind, "the logs are another user's"
    os.chown(pool.address.parent, JOB_UID, -1) if os.getuid() == 0 else pytest.skip("needs root")
    assert not pool.context(**ids).blind
    assert "whose own session" in judged(host.root(pool.context(**ids)), OK).seen
    os.chown(pool.server, JOB_UID, -1)
    judged(condor.server(pool.context(**ids)), OK, "is this daemon")
    assert pool.context(CONDOR_IDS=f"{JOB_UID}.{JOB_UID}").blind, "as whom root's HTCondor writes its logs"


@as_root
def test_a_scratch_file_system_that_hangs_is_told_once(pool: Condor, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(host, "EXECUTE_DEADLINE", 0.1)
    monkeypatch.setattr(host, "may_look", lambda _path: never.wait())
    found = judged(scratch(pool), UNKNOWN, "does not answer")
    never.set()
    assert found.because == probe.DISK_SPACE


def test_selinux_is_named_where_it_enforces(pool: Condor, tmp_path: Path) -> None:
    context = pool.context(tree(tmp_path, sys__fs__selinux__enforce="1"), VM_TYPE="kvm")
    context.is_root = False
    judged(host.confinement(context), UNKNOWN, "SELinux is enforcing")
    context.is_root = True
    judged(host.confinement(context), OFF, "SELinux is enforcing", hint="vmgahp-selinux")
    tree(tmp_path, var__lib__selinux__targeted__active__modules__200__vmgahp__cil="")
    judged(host.confinement(context), OK, "SELinux is enforcing")
    assert host.confinement(pool.context(tree(tmp_path, sys__fs__selinux__enforce="0"), VM_TYPE="kvm")) is None


# Firmware, clock


@pytest.mark.parametrize(
    ("attributes", "verdict", "hint"),
    [({"firmware": "bios,uefi"}, OK, ""), ({"firmware": "bios"}, OFF, "ovmf"), ({}, UNKNOWN, "")],
)
def test_firmware(pool: Condor, attributes: dict[str, str], verdict: str, hint: str) -> None:
    context = pool.context(VM_TYPE="kvm")
    context.probe.attributes = {f"VM_kvm_ATTR_{name}": value for name, value in attributes.items()}
    judged(host.firmware(context), verdict, hint=hint)


def clock(pool: Condor, seconds: float = 0.1, bad: str = "", server: str = OK, **settings: object) -> Finding:
    """The finding of a machine whose probe took so long, with a check that failed, and with such a server."""
    context = pool.context(**settings)
    context.probe.seconds = seconds
    context.probe.findings += [Finding(bad, BAD, "it", "It hangs.")] if bad else []
    context.found.append(Finding("VM_GAHP_SERVER", server, "it", "It is there."))
    return host.clock(context)


@as_root
@pytest.mark.parametrize(("seconds", "verdict"), [(0.4, OK), (4.0, OFF), (5.5, BAD)])
def test_the_clock_of_the_probe(pool: Condor, seconds: float, verdict: str) -> None:
    judged(clock(pool, seconds, server=OFF), verdict, f"{seconds:.1f} s")
    assert clock(pool, seconds, bad="libvirt").because == ("" if verdict == OK else "libvirt")


@as_root
def test_the_startds_probe_is_run_as_the_startd_runs_it(pool: Condor, monkeypatch: pytest.MonkeyPatch) -> None:
    words = pool.directory / "words"
    pool.program(f'#!/bin/sh\necho "$@" $(cat /proc/$PPID/comm) > {words}\necho "VM_Type = 1"\n')
    name = Path("/proc/self/comm").read_text()
    assert clock(pool).verdict == OK
    assert words.read_text().split() == ["-f", "-t", "-M", "0", "vmtype", "simulated", "condor_startd"]
    assert Path("/proc/self/comm").read_text() == name
    pool.program("#!/bin/sh\necho 'No module. Hint: install it. (administrator)' >&2; exit 1\n")
    seen = "run as the user condor, although nothing else was found wrong: No module."
    assert judged(clock(pool, CONDOR_IDS=f"{JOB_UID}.{JOB_UID}"), BAD, seen).hint == "install it."
    monkeypatch.setattr(host, "PROBE_DEADLINE", 0.5)
    monkeypatch.setattr(host, "STARTD_PATIENCE", 0.3)
    pool.program("#!/bin/sh\nexec sleep 60\n")
    assert "waits no longer" in clock(pool).seen


# The startd


def startd(pool: Condor, ad: str | None = None, cause: str = "", **settings: object) -> Finding:
    if ad is not None:
        pool.ad.write_text(ad)
    context = pool.context(**settings)
    context.found += [Finding(cause, BAD, "it", "It hangs.")] if cause else []
    return condor.startd(context)


def test_no_startd(pool: Condor) -> None:
    assert startd(pool).verdict == OK
    pool.script("condor_status", 'import sys; sys.exit("Error: communication error\\nmore")')
    judged(startd(pool), BAD, "communication error")
    pool.address.unlink()
    judged(startd(pool), BAD, "No startd runs", hint="systemctl start condor")


def test_a_machine_that_a_starter_took_out(pool: Condor) -> None:
    ad = AD.replace("HasVM = true", "HasVM = false")
    ad += f'VMOfflineTime = {int(time.time()) - 605}\nVMOfflineReason = "VMGAHP_ERR_\x1b[31mCRITICAL"\n'
    judged(startd(pool, ad), BAD, "10 minutes ago", "VMGAHP_ERR_\\x1b[31mCRITICAL", hint="doctor --recover")


@as_root
def test_it_comes_back_by_recover_once_all_else_is_well(pool: Condor, capsys: pytest.CaptureFixture[str]) -> None:
    offline = AD.replace("HasVM = true", "HasVM = false") + 'VMOfflineReason = "VMGAHP_ERR_CRITICAL"\n'
    pool.ad.write_text(offline)
    pool.script("condor_update_machine_ad", "import sys; sys.exit('DENIED')")
    assert doctor.show(doctor.examine(pool.environ(), recover=True)) == doctor.UNFIT
    assert "The startd does not take HasVM = True: DENIED." in capsys.readouterr().err
    pool.script("condor_update_machine_ad", f"import sys; open({str(pool.ad)!r}, 'a').write(sys.stdin.read())")
    assert doctor.show(doctor.examine(pool.environ(VM_MEMORY=0), recover=True)) == doctor.UNFIT
    assert pool.ad.read_text() == offline, "the machine cannot run VMs"
    assert doctor.show(doctor.examine(pool.environ(), recover=True)) == doctor.FIT
    assert doctor.show(doctor.examine(pool.environ(), recover=True)) == doctor.FIT, "there is nothing to do"
    assert pool.ad.read_text() == f"{offline}HasVM = True\n"


def test_an_htcondor_without_settings_is_told_to_set_up(pool: Condor, capsys: pytest.CaptureFixture[str]) -> None:
    environ = pool.environ(VM_TYPE=None, VM_MEMORY=None, VM_GAHP_LOG=None)
    assert doctor.show(doctor.examine(environ)) == doctor.UNFIT
    said = " ".join(capsys.readouterr().out.split())
    assert "HTCondor is not configured for VMs on this machine" in said
    assert "vmgahp setup as root" in said
    assert said.count("XX") + said.count("✗") == 1
    assert named(doctor.examine(environ, vm_type="simulated").findings, "startd"), "whoever asks for a type gets all"


@pytest.mark.parametrize(
    ("old", "new", "cause", "verdict", "seen"),
    [
        ("HasVM = true", "HasVM = false", "", BAD, "the startd looked earlier"),
        ("HasVM = true", "HasVM = false", "libvirt", BAD, "own probe failed"),
        ("HasVM = true\n", "", "", BAD, "HasVM is not true"),
        ('"simulated"', '"xen"', "", BAD, "VM_TYPE = simulated now"),
        ("VM_Memory = 64", "VM_Memory = 0", "", OFF, "further jobs wait"),
        ("VM_AvailNum = 10000", "VM_AvailNum = 0", "", OFF, "VM_MAX_NUMBER"),
    ],
)
def test_what_the_startd_last_saw(pool: Condor, old: str, new: str, cause: str, verdict: str, seen: str) -> None:
    assert judged(startd(pool, AD.replace(old, new), cause), verdict, seen).hint


def test_the_whole_machine_speaks_and_not_a_slot_of_a_job(pool: Condor) -> None:
    slot = AD.replace("PartitionableSlot = true\n", "").replace("VM_Memory = 64", "VM_Memory = 0")
    assert startd(pool, slot + "\n" + AD).verdict == OK


# The log


def test_the_last_three_failures(pool: Condor) -> None:
    lines = [failure(day, f"VMGAHP_ERR_CRITICAL: Trouble {day}.") for day in (1, 2, 3)]
    again = failure(2, "VMGAHP_ERR_CRITICAL: Trouble 2.").replace("10:00", "11:00")
    pool.log("11/20/26 10:00:00 (pid:7) QUIT received", *lines, again, "no line of ours VMGAHP_ERR_")
    pool.log(failure(4, "VMGAHP_ERR_INTERNAL: Trouble 4."), name="VMGahpLog.alice")
    found = condor.failures(pool.context())
    assert [finding.verdict for finding in found] == [OFF] * 3
    assert found[0].seen.startswith("2026-11-04 10:00:00: START of VM 1 failed: VMGAHP_ERR_INTERNAL: Trouble 4.")
    assert (found[0].hint, "(administrator)" in found[0].seen) == ("do 4.", True)
    assert found[1].seen.startswith("2026-11-03 10:00:00: ")
    assert found[2].seen.startswith("2026-11-02 11:00:00, 2 times: ")


def test_failures_that_are_over_are_not_told(pool: Condor) -> None:
    success = "11/02/26 12:00:00 (pid:7) started alice_lab_7.0 (uuid) by kvm"
    old = [failure(day, f"VMGAHP_ERR_CRITICAL: Trouble {day}.") for day in (1, 2)]
    pool.log(*old, success)
    judged(condor.failures(pool.context())[0], OK, "no failure is in it since a VM last started")
    pool.log(failure(3, "VMGAHP_ERR_CRITICAL: Trouble 3."), name="VMGahpLog.alice")
    (found,) = condor.failures(pool.context())
    judged(found, OFF, "Trouble 3")


def test_a_jobs_own_failure_says_nothing_against_the_machine(pool: Condor) -> None:
    pool.log(failure(1, "VMGAHP_ERR_BAD_IMAGE: No image.", "job's owner"))
    (found,) = condor.failures(pool.context())
    judged(found, OK, "BAD_IMAGE")


def test_the_log_is_hostile(pool: Condor) -> None:
    pool.log(failure(1, 'VMGAHP_ERR_CRITICAL: \x1b]0;owned\x07 ClaimId = "secret#1"'))
    pool.log(failure(2, "VMGAHP_ERR_CRITICAL: Of another file."), name="elsewhere")
    (pool.directory / "log/VMGahpLog.link").symlink_to(pool.directory / "log/elsewhere")
    os.mkfifo(pool.directory / "log/VMGahpLog.fifo")
    found = condor.failures(pool.context())
    text = " ".join(finding.seen for finding in found)
    wrong = ["\x1b", "secret", "another file"]
    assert absent(text, "\\x1b]0;owned\\x07", *wrong) == wrong
    assert [finding.verdict for finding in found] == [UNKNOWN, UNKNOWN, OFF], "what cannot be read is said"


def test_no_log(pool: Condor) -> None:
    assert condor.failures(pool.context())[0].seen == "there is none yet"
    assert condor.failures(pool.context(VM_GAHP_LOG=None))[0].verdict == UNKNOWN
