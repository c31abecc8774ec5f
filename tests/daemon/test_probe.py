"""The report of the probe on what its checks found, and its check of containers; the others are in drivers/."""

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

import pytest

from tests.lab.programs import a_program
from tests.peer import DAEMON, daemon, environment
from vmgahp import __version__, config, errors, findings
from vmgahp.cli import PROBE
from vmgahp.config import Settings
from vmgahp.daemon import containers, probe
from vmgahp.drivers.base import Driver, Machine, Survey
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding, Late
from vmgahp.host import libvirt_daemons, proc
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.log import Log

PHYSICAL = proc.physical_memory_mib()


class Surveyed(Driver):
    """A driver whose survey is given; one that is None raises."""

    outcome: Survey | None = Survey()

    def start(self, job: JobAd) -> Machine:
        raise NotImplementedError

    def kill(self, match: str, uuid: str = "") -> bool:
        return False

    def survey(self, end: float) -> Survey:
        if self.outcome is None:
            raise errors.MachineFault("Nothing is there.", "install something.")
        return self.outcome


def look(survey: Survey | None, **settings: object) -> probe.Probe:
    values = {"VM_MEMORY": "64"} | {name: str(value) for name, value in settings.items()}
    made = Settings(values)
    driver = Surveyed("kvm", made, Identity(54321, 54321), lambda _line: None)
    driver.outcome = survey
    return probe.probe("kvm", made, driver, identity=ME)


def works() -> Survey:
    return Survey(
        [Finding("hypervisor", OK, "it", "works")],
        attributes={"accel": "kvm", "suspend": True, "checkpoint": True},
        machine_attributes={"HasVirshDefaultNetwork": True},
        networking=["nat", "user"],
        hypervisors=["kvm", "qemu"],
        vm_types=["kvm"],
    )


def finding(found: probe.Probe, check: str) -> Finding:
    return next(finding for finding in found.findings if finding.check == check)


def test_the_attributes_and_their_order_which_htcondors_own_engine_reads(tmp_path: Path) -> None:
    found = look(works(), EXECUTE=tmp_path, VM_HARDWARE_VT=True)
    assert found.trouble is None
    assert 0 <= found.attributes["VM_Probe_Time"] < probe.DEADLINE
    lines = probe.render(found.attributes | {"VM_Probe_Time": 0.25}).splitlines()
    assert lines == [
        *('VM_GAHP_VERSION = "0.0.1"', 'VM_Type = "kvm"', "VM_Memory = 64", "VM_Networking = TRUE"),
        *('VM_Networking_Types = "nat,user"', "VM_HardwareVT = TRUE", 'VM_TYPES = "kvm"'),
        *('VM_HYPERVISORS = "kvm,qemu"', "HasVirshDefaultNetwork = TRUE", 'VM_kvm_ATTR_accel = "kvm"'),
        *(
            "VM_kvm_ATTR_suspend = TRUE",
            "VM_kvm_ATTR_checkpoint = TRUE",
            "VM_Probe_Time = 0.25",
            f'VM_VMGAHP_VERSION = "{__version__}"',
        ),
    ]
    import classad2

    values = {"A": 'say "hi" \\\\ there', "B": True, "C": 0.5, "D": 7}
    lines = probe.render(dict(values)).splitlines()
    ad = classad2.ClassAd(f"[{';'.join(lines)}]")
    assert {name: ad[name] for name in values} == values


def test_the_memory_that_is_promised() -> None:
    found = look(works(), VM_MEMORY="")
    assert found.trouble.check == "memory"
    assert "VM_MEMORY is not set" in found.trouble.seen
    found = look(works(), VM_MEMORY=PHYSICAL * 2)
    assert found.attributes["VM_Memory"] == PHYSICAL
    assert finding(found, "memory").verdict == OFF
    assert found.trouble is None
    assert look(works(), VM_MEMORY=PHYSICAL).attributes["VM_Memory"] == PHYSICAL


def test_without_room_in_execute_or_without_it(tmp_path: Path) -> None:
    assert look(works(), EXECUTE=tmp_path).attributes["VM_kvm_ATTR_suspend"] is True
    found = look(works(), VM_MEMORY=2**40, EXECUTE=tmp_path)
    assert found.attributes["VM_kvm_ATTR_suspend"] is False
    assert found.attributes["VM_kvm_ATTR_checkpoint"] is False
    assert finding(found, "disk space").verdict == OFF
    assert f"EXECUTE = {tmp_path}" in finding(found, "disk space").seen
    assert found.trouble is None
    found = look(works(), EXECUTE=tmp_path / "nowhere")
    assert found.trouble.check == "disk space"
    assert look(works()).trouble is None
    assert finding(look(works()), "disk space").verdict == UNKNOWN


@pytest.mark.parametrize("survey", [None, Survey([Finding("kvm", BAD, "kvm", "it is broken", "fix it")])])
def test_a_driver_that_does_not_work_stops_all(survey: Survey | None) -> None:
    found = look(survey)
    assert found.trouble is not None
    assert found.document()["capable"] is False
    assert found.document()["attributes"] == {}


def test_the_startd_reads_nothing_from_a_machine_that_cannot(scratch: Path) -> None:
    ended = daemon(environment("simulated", scratch, VM_MEMORY=0), PROBE, "vmtype", "simulated")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "VM_MEMORY is not set" in ended.stderr
    ended = daemon(environment("simulated", scratch), PROBE, "vmtype", "simulated")
    assert ended.returncode == 0
    assert 'VM_Type = "simulated"\nVM_Memory = 1024\n' in ended.stdout


@pytest.mark.parametrize("value", [":/opt/x", "/opt/x:", "/opt::/srv", ".", "lib:/opt/x"])
def test_a_machine_whose_loader_looks_into_working_directories_takes_no_jobs(value: str, scratch: Path) -> None:
    """There a job's libc.so.6 would be loaded by root's programs, before any of them can object."""
    environ = environment("simulated", scratch) | {"LD_LIBRARY_PATH": value}
    ended = daemon(environ, PROBE, "vmtype", "simulated")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"LD_LIBRARY_PATH={value}, in HTCondor's environment" in ended.stderr
    assert daemon(environ | {"LD_LIBRARY_PATH": "/opt/x:/srv"}, PROBE, "vmtype", "simulated").returncode == 0


def probe_that_hangs(scratch: Path, line: str) -> "subprocess.CompletedProcess[str]":
    """Run a probe whose driver hangs, after a line of Python in which it is `p`."""
    code = (
        "import sys, threading, vmgahp.daemon.probe as p, vmgahp.cli as c\n"
        f"{line}\n"
        "p.find_surveyor = lambda _type: lambda *_: threading.Event().wait()\n"
        "status = p.run('simulated', c.os.environ, to_stderr=True)\n"
        "sys.stderr.flush(); c.os._exit(status)\n"
    )
    command, environ = [sys.executable, "-c", code], environment("simulated", scratch)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_the_probe_ends_in_time_from_the_start_of_its_process(scratch: Path) -> None:
    """Here the driver itself hangs while it is loaded, which no check could have a deadline for."""
    ended = probe_that_hangs(scratch, "p.DEADLINE, p.proc.age = 2.0, lambda pid: 0.0")
    assert (ended.returncode, ended.stdout) == (1, "")
    # A busy machine adds to the 2 s.
    assert re.search(r"had not ended after [\d.]+ s\. It waited for the driver of VM type simulated\.", ended.stderr)
    # A Python that was slow to start has that much less, for the startd's patience began with it.
    ended = probe_that_hangs(scratch, "p.proc.age = lambda pid: p.DEADLINE - 0.5")
    assert re.search(
        r"had not ended after [0-3]\.[0-9] s\. It waited for the driver of VM type simulated", ended.stderr
    )


@pytest.mark.parametrize("vm_type", ["kvm", "any", "vsphere"])
def test_libvirt_is_woken_before_the_settings_are_read(vm_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def load(_environ: object) -> Settings:
        done.append("settings")
        raise errors.MachineFault("There are none.", "write some.")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(libvirt_daemons, "wake", lambda: done.append("libvirt"))
    monkeypatch.setattr(config, "load", load)
    probe.look(vm_type, {}, Log(), monotonic() + 60, to_stderr=False)
    assert done == (["settings"] if vm_type == "vsphere" else ["libvirt", "settings"])


def test_a_resolver_that_is_merely_slower_than_the_probe_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(probe.Resolver, "_ask", lambda resolver: never.wait())
    monkeypatch.setattr(probe, "SLOW_NAME", 600.0)
    assert probe.Resolver().judge().verdict == UNKNOWN
    monkeypatch.setattr(probe, "SLOW_NAME", 0.0)
    assert probe.Resolver().judge().verdict == OFF
    never.set()


@pytest.mark.parametrize(
    ("trouble", "slow", "seen"),
    [
        (socket.EAI_AGAIN, 600.0, "no nameserver answers, and HTCondor's programs ask again"),
        (socket.EAI_NONAME, 600.0, ""),
        (None, 0.0, "this machine's name, took "),
    ],
)
def test_what_a_resolver_says(monkeypatch: pytest.MonkeyPatch, trouble: int | None, slow: float, seen: str) -> None:
    """A resolver without a nameserver says at once that nobody knows, and HTCondor's tools then ask for a minute."""

    def answer(_resolver: probe.Resolver) -> None:
        if trouble is not None:
            raise socket.gaierror(trouble, "so it is")

    monkeypatch.setattr(probe.Resolver, "_ask", answer)
    monkeypatch.setattr(probe, "SLOW_NAME", slow)
    resolver = probe.Resolver()
    resolver.wait(60)
    found = resolver.judge()
    assert (found.verdict, seen in found.seen) == (OFF if seen else OK, True), found


def test_a_file_system_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(probe, "_free_mib", lambda _execute: never.wait())
    made = Settings({"VM_MEMORY": "64", "EXECUTE": "/somewhere/far"})
    driver = Surveyed("kvm", made, Identity(54321, 54321), lambda _line: None)
    found = finding(probe.probe("kvm", made, driver, 0.2), "disk space")
    never.set()
    assert found.verdict == BAD
    assert found.seen.startswith("EXECUTE = /somewhere/far does not answer: ")


def test_a_probe_that_hangs_names_the_program_and_the_resolver(scratch: Path) -> None:
    """HTCondor's tool waits for the resolver, as it does where the nameserver does not answer."""
    tool = a_program(scratch / "condor_config_val", "exec sleep 1000")
    line = "p.DEADLINE, p.SLOW_NAME, p.proc.age = 2.0, 0.2, lambda pid: 0.0\n"
    line += "p.Resolver._ask = lambda resolver: threading.Event().wait()\n"
    line += "del c.os.environ['VMGAHP_CONFIG']\n"
    line += f"c.os.environ['PATH'] = '{scratch}:/usr/bin:/bin'"
    ended = probe_that_hangs(scratch, line)
    assert f"It waited for the settings, which {tool} reads." in ended.stderr
    assert f"The address of {os.uname().nodename}, this machine's name, is not known after" in ended.stderr


def test_a_probe_that_is_late_has_the_next_one_answer(tmp_path, monkeypatch, capsys):
    left_behind: list[dict[str, str]] = []
    monkeypatch.setattr(probe.runtime_dir, "ROOT_BASE", str(tmp_path))
    for name in ("make_root_base", "claim", "is_claimed", "remove"):
        monkeypatch.setattr(probe.runtime_dir, name, lambda *_name: "")
    monkeypatch.setattr(probe.subprocess, "Popen", lambda _command, env, **_more: left_behind.append(env))
    monkeypatch.setattr(probe.proc, "age", lambda _pid: 0.0)
    monkeypatch.setattr(probe, "DEADLINE", 3.0)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    said = {"VM_MEMORY": "64"}
    trouble: list[Finding] = []
    over = threading.Event()

    def look(vm_type, environ, log, end, *, to_stderr, awaited, loaded_as):
        loaded_as(Settings(dict(said)))
        if probe.LATER not in environ:
            over.wait(30)
        found = probe.Probe(vm_type, *trouble)
        found.attributes = {"VM_Type": vm_type, "VM_Memory": 64}
        return found

    def run(**environ: str) -> tuple[int, str]:
        over.clear()
        status = probe.run("kvm", environ, to_stderr=False)
        over.set()
        return status, capsys.readouterr().out

    monkeypatch.setattr(probe, "look", look)
    assert run() == (1, "")
    assert [set(environ) for environ in left_behind] == [{probe.LATER}]
    assert run(**left_behind[0])[0] == 0
    assert run() == (0, 'VM_Type = "kvm"\nVM_Memory = 64\n'), "what was found meanwhile"
    said["VM_MEMORY"] = "128"
    assert run() == (1, ""), "it was found with other settings"
    said["VM_MEMORY"] = "64"
    trouble.append(Finding("kvm", BAD, "/dev/kvm", "it is broken", "mend it"))
    assert run(**left_behind[0])[0] == 1
    assert run() == (1, ""), "it has found meanwhile that nothing can run"
    assert [path.name for path in tmp_path.iterdir()] == ["probe-kvm.json"]


def test_for_people_everything_has_its_reason() -> None:
    found = look(Survey([Finding("network nat", OFF, "the network", "it is down", "start it")]))
    document = json.loads(json.dumps(found.document()))
    assert (document["vm_type"], document["capable"]) == ("kvm", True)
    told = {"verdict": "off", "subject": "the network", "seen": "it is down", "hint": "start it", "because": ""}
    assert {"check": "network nat", **told} in document["findings"]
    assert {entry["verdict"] for entry in document["findings"]} <= set(findings.VERDICTS)


def test_a_policy_that_cannot_be_used_keeps_jobs_away(tmp_path: Path) -> None:
    """Else the first job would fail, and take the machine out of service."""
    missing = look(works(), VM_POLICY=tmp_path / "none.xsl")
    assert finding(missing, "policy").verdict == (BAD if os.geteuid() == 0 else UNKNOWN)
    assert "No such file" in finding(missing, "policy").seen
    assert finding(look(works(), VM_POLICY_REQUIREMENTS="(("), "policy").verdict != OK
    fine = look(works(), VM_POLICY_REQUIREMENTS="JobVMMemory < 100")
    assert fine.trouble is None
    assert finding(fine, "policy").verdict == OK
    assert not [each for each in look(works()).findings if each.check == "policy"]


def test_a_probe_without_standard_error_prints_all_the_same(scratch: Path) -> None:
    probe_it = f"exec {shlex.join(DAEMON)} -f -M 0 vmtype simulated 2>&-"
    ended = subprocess.run(
        ["sh", "-c", probe_it], env=environment("simulated", scratch), stdout=subprocess.PIPE, text=True, check=True
    )
    assert 'VM_Type = "simulated"' in ended.stdout
    assert ended.stdout.endswith("\n")


def test_no_program_outlives_the_probe(tmp_path: Path, scratch: Path) -> None:
    """Here HTCondor's tool, which still lists the configuration when all else is known."""
    pid, held, tool = tmp_path / "pid", tmp_path / "held", tmp_path / "condor_config_val"
    os.mkfifo(held)
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    tool.write_text(
        f'#!/bin/sh\ncase "$*" in *-dump*) exec 3>{held}; echo $$ > {pid}; exec sleep infinity ;; esac\n'
        'for name; do case $name in -*|VM_GAHP) ;; *) echo "Not defined: $name" >&2 ;; esac; done\n'
    )
    tool.chmod(0o755)
    environ = environment("simulated", scratch) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    del environ["VMGAHP_CONFIG"]
    daemon(environ, PROBE, "vmtype", "simulated")
    try:
        watch = select.poll()
        watch.register(reading, select.POLLIN)
        assert [event for _, event in watch.poll(10_000)] == [select.POLLHUP], "nobody holds its other end"
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)


ME = Identity(os.getuid(), os.getgid())

RUNS = """case $1 in -v) echo "Docker version 20.10.24, build x"; exit ;; esac
echo "$@" >>{log}
for word in "$@"; do
    case $word in
    import | rmi) exit 0 ;;
    run) exit 37 ;;
    esac
done
exit 9
"""


def stand_in(tmp_path: Path) -> str:
    return str(a_program(tmp_path / "docker", RUNS.format(log=tmp_path / "asked")))


def seen(name: str, path: str, seconds: float = 60) -> str:
    return containers.version(name, path, ME, monotonic() + seconds)


def test_a_container_that_ran_and_what_the_startd_is_told(tmp_path: Path) -> None:
    assert seen("docker", stand_in(tmp_path)) == "Docker version 20.10.24, build x"
    assert "rmi --force localhost/vmgahp-probe:" in (tmp_path / "asked").read_text(), "the image is forgotten"
    works = {"docker": "Docker version 20.10.24, build x", "podman": "podman version 5.4.2"}
    attributes, found = containers.judge(works)
    assert attributes == {"HasDocker": True, "DockerVersion": "Docker version 20.10.24, build x", "HasPodman": True}
    assert {one.verdict for one in found} == {OK}
    for fault, verdict in ((errors.MachineFault("no daemon", ""), OFF), (Late("not yet", ""), UNKNOWN)):
        attributes, found = containers.judge(dict.fromkeys(works, fault))
        assert attributes == {}, "false would take the place of what the startd has seen"
        assert {one.verdict for one in found} == {verdict}
    assert containers.judge({})[1][0].verdict == OFF


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 1", "Cannot connect to the Docker daemon"),
        ('for word in "$@"; do [ "$word" = run ] && exit 0; done; exit 0', "it says nothing"),
        ("kill -9 $$", "it says nothing"),
    ],
)
def test_one_that_did_not(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(errors.MachineFault, match=f"docker runs no container: {reason}"):
        seen("docker", str(a_program(tmp_path / "docker", text)))


def test_a_program_that_hangs_says_nothing_and_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"docker": str(a_program(tmp_path / "hanging", "exec sleep 600")), "podman": stand_in(tmp_path)}
    monkeypatch.setattr(containers, "CLEANUP", 0.1)
    monkeypatch.setattr(containers, "which", paths.get)
    with pytest.raises(Late, match="docker had run no container"):
        seen("docker", paths["docker"], 0.2)
    attributes, found = containers.judge(containers.look(ME, monotonic() + 5))
    assert attributes == {"HasPodman": True}
    assert [one.verdict for one in found] == [UNKNOWN, OK]


def test_it_is_asked_where_the_administrator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "look", lambda _identity, _end: {"podman": "podman version 5"})
    for value, expected in (("true", True), ("false", None)):
        found = look(works(), VM_PROBE_DOCKER=value)
        assert found.attributes.get("HasPodman") is expected
        assert "HasDocker" not in found.attributes
