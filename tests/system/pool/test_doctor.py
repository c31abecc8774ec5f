"""The doctor on a machine that is broken for real: in a namespace, with libvirt and HTCondor of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lab.guest import make_guest
from tests.lab.namespace import LAB, OUR_SERVER, VMGAHP, LabError, Namespace, require_namespace, wheel_of
from tests.lab.pool import Pool

pytestmark = pytest.mark.pool

SETTINGS = f"""\
VM_TYPE = kvm
VM_MEMORY = 256
VM_GAHP_SERVER = {OUR_SERVER}
VM_GAHP_LOG = {LAB}/VMGahpLog
VM_ALLOW_EMULATION = True
LOG = {LAB}
EXECUTE = /var/lib/condor/execute
"""
FILE = "/etc/condor/config.d/99-doctor.config"

DEVICES = """\
mkdir -p /tmp/dev && mount -t tmpfs -o mode=755 tmpfs /tmp/dev && cd /tmp/dev
mknod -m 666 null c 1 3; mknod -m 666 zero c 1 5; mknod -m 666 random c 1 8; mknod -m 666 urandom c 1 9
mknod -m 666 tty c 5 0; mkdir pts shm; mount --bind /dev/pts pts; ln -s pts/ptmx ptmx
mount --move /tmp/dev /dev
"""
"""A /dev of the namespace's own, without KVM."""


def examined(namespace: Namespace, *words: str, user: str | None = None) -> tuple[int, dict[str, Any]]:
    """The exit status and the findings, by their names."""
    done = namespace.run(VMGAHP, "doctor", "--json", *words, user=user, check=False)
    assert done.stdout, done.stderr
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_namespace()
    return wheel_of(tmp_path_factory)


@pytest.fixture
def namespace(wheel: Path, tmp_path: Path) -> Iterator[Namespace]:
    """A namespace for one test, with libvirt, and an HTCondor that has settings and does not run."""
    with Namespace(tmp_path / "exchange") as namespace:
        namespace.install(wheel)
        namespace.start_libvirt()
        namespace.run("install", "-d", "-o", "condor", "/var/lib/condor/execute")
        configure(namespace, SETTINGS)
        yield namespace


def configure(namespace: Namespace, lines: str) -> None:
    with namespace.path(FILE).open("a") as file:
        file.write(lines)


def libvirt(namespace: Namespace) -> dict[str, str]:
    status, found = examined(namespace)
    assert status == 1
    finding: dict[str, str] = found["libvirt"]
    assert finding["verdict"] == "bad", finding
    return finding


def end_libvirtd(namespace: Namespace, signal: str = "KILL") -> None:
    for pid, words in namespace.processes().items():
        if words.startswith("libvirtd"):
            namespace.kill(pid, signal)


def test_libvirts_daemon_is_not_there(namespace: Namespace) -> None:
    end_libvirtd(namespace)
    finding = libvirt(namespace)
    assert "libvirtd does not run, although /run/libvirt/libvirt-sock is there" in finding["seen"]
    assert "systemctl start libvirtd" in finding["hint"]
    namespace.run("sh", "-c", "rm /run/libvirt/*-sock*")
    assert "nothing listens" in libvirt(namespace)["seen"]
    namespace.run("mv", "/usr/sbin/libvirtd", "/usr/sbin/libvirtd.away")
    finding = libvirt(namespace)
    assert "Neither libvirtd nor virtqemud is installed" in finding["seen"]
    assert "libvirt-daemon-system" in finding["hint"]


def test_libvirt_has_lost_its_socket_or_hangs(namespace: Namespace) -> None:
    end_libvirtd(namespace, "STOP")
    assert "does not answer" in libvirt(namespace)["seen"]
    end_libvirtd(namespace, "CONT")
    namespace.run("sh", "-c", "rm /run/libvirt/libvirt-sock*")
    finding = libvirt(namespace)
    assert "its socket /run/libvirt/libvirt-sock is missing" in finding["seen"]
    assert "systemctl restart libvirtd.socket" in finding["hint"]


def test_libvirt_without_its_qemu_driver(namespace: Namespace) -> None:
    end_libvirtd(namespace, "TERM")
    namespace.run("sh", "-c", "rm /usr/lib/*/libvirt/connection-driver/libvirt_driver_qemu.so; sleep 1; libvirtd -d")
    finding = libvirt(namespace)
    assert "without its driver for QEMU" in finding["seen"]
    assert "libvirt-daemon-driver-qemu" in finding["hint"]


def test_kvms_device_is_missing_or_closed(namespace: Namespace) -> None:
    namespace.run("sh", "-c", DEVICES)
    _, found = examined(namespace)
    assert found["kvm"]["verdict"] == "off"
    assert "/dev/kvm does not exist" in found["kvm"]["seen"]
    assert "kvm device" not in found
    namespace.run("mknod", "-m", "600", "/dev/kvm", "c", "10", "232")
    _, found = examined(namespace)
    assert found["kvm device"]["verdict"] == "off"
    assert "libvirt-qemu may not open /dev/kvm" in found["kvm device"]["seen"]
    assert "chmod 666 /dev/kvm" in found["kvm device"]["hint"]
    configure(namespace, "VM_ALLOW_EMULATION = False\n")
    namespace.run("rm", "/dev/kvm")
    status, found = examined(namespace)
    assert (status, found["kvm"]["verdict"]) == (1, "bad")


def test_execute_is_closed_to_the_jobs_user(namespace: Namespace) -> None:
    namespace.run("chmod", "700", "/var/lib/condor")
    for as_job in (True, False):
        configure(namespace, f"VM_RUN_AS_JOB_USER = {as_job}\n")
        _, found = examined(namespace)
        finding = found["QEMU's user"]
        assert finding["verdict"] == "bad"
        assert "may not pass /var/lib/condor " in finding["seen"]
        assert finding["hint"] == "chmod o+x /var/lib/condor"


def test_the_settings_as_htcondor_has_them(namespace: Namespace) -> None:
    """Where each comes from, what is wrong with them; the same at the probe, of which the startd sees nothing.

    HTCondor's own names, all of its defaults, are no misspellings.
    """
    _, found = examined(namespace)
    assert found["settings"]["verdict"] == "ok", found["settings"]
    configure(namespace, "VM_RACK = 7\nVM_GAHP.VM_MEMORY = 128\nVMWARE_PERL = perl\nuse FEATURE : PartitionableSlot\n")
    configure(namespace, "STARTER.VM_NAT_NETWORK = x\nVM_STATUS_INTERVAL = 45\nVM_NETWORKING_TYPES = nat\n")
    configure(namespace, "VM_STOP_TIMEOUT @=end\n5\n@end\n")
    document = json.loads(namespace.run(VMGAHP, "config", "--json").stdout)
    rows = {row["name"]: (row["value"], row["from"]) for row in document["settings"]}
    assert rows["VM_TYPE"] == ("kvm", f"{FILE}, line 1")
    assert rows["VM_MEMORY"] == ("128", f"{FILE}, line 9")
    assert rows["VM_STATUS_INTERVAL"] == ("45", f"{FILE}, line 13")
    assert rows["VM_STOP_TIMEOUT"][0] == "5"
    assert rows["VM_RECHECK_INTERVAL"] == ("600", "HTCondor's default")
    assert rows["VM_METRICS_INTERVAL"] == ("60", "default")
    wanted = ["HTCondor no longer reads VMWARE_PERL", "STARTER.VM_NAT_NETWORK", "did you mean VM_NETWORKING_TYPE?"]
    seen = [finding["seen"] for finding in document["findings"]]
    assert len(seen) == len(wanted), seen
    for part in (*wanted, f"VM_NETWORKING_TYPES ({FILE}, line 14)"):
        assert any(part in sentence for sentence in seen)
    probed = json.loads(namespace.run(VMGAHP, "probe", "--json", check=False).stdout)
    assert [one["seen"] for one in probed["findings"] if one["check"] == "settings"] == seen
    who = ("VMGAHP_USER_UID=1201", "VMGAHP_USER_GID=1201")
    told = namespace.run("env", *who, OUR_SERVER, "-f", "-M", "0", "vmtype", "kvm").stdout
    assert "VM_Memory = 128" in told
    assert "PERL" not in told


ASK = """\
import json, os, subprocess
from vmgahp import config
from vmgahp.config import sources
settings, tool = config.load(os.environ), sources.find_tool(os.environ)
def alone(name):
    done = subprocess.run([tool, "-subsystem", "VM_GAHP", name], capture_output=True, text=True)
    return None if done.stderr.startswith("Not defined") else done.stdout.strip()
print(json.dumps({name: [settings.string(name), settings.where(name), alone(name)] for name in config.BY_NAME}))
"""


def test_condor_config_val_says_the_same_of_one_name_and_of_all(namespace: Namespace) -> None:
    configure(namespace, "MY_SIZE = 256\nVM_MEMORY = 2 * $(MY_SIZE)\nVM_NETWORKING_TYPE =\n")
    configure(namespace, "VM_GAHP.VM_STOP_TIMEOUT = 7\nVM_STOP_TIMEOUT = 3\n")
    environ = ("_condor_vm_gahp_log=/log", "_CONDOR_VM_GAHP.VM_NAT_NETWORK=lab")
    found = json.loads(namespace.run("env", *environ, "/opt/vmgahp/bin/python", "-c", ASK).stdout)
    said = {name: value for name, (value, where, _) in found.items() if where != "default"}
    assert said == {name: alone for name, (_, _, alone) in found.items() if alone is not None}
    expected = {"VM_MEMORY": "2 * 256", "VM_STOP_TIMEOUT": "7", "VM_GAHP_LOG": "/log", "VM_NAT_NETWORK": "lab"}
    assert said.items() >= expected.items()
    assert "VM_NETWORKING_TYPE" not in said, "empty is not set"


def test_a_plain_user_is_told_what_could_not_be_looked_at(namespace: Namespace) -> None:
    _, found = examined(namespace, user="alice")
    unknown = {check for check, finding in found.items() if finding["verdict"] == "unknown"}
    assert {"root", "libvirt", "kvm", "QEMU's user", "clock"} <= unknown
    assert [check for check, finding in found.items() if finding["verdict"] == "bad"] == ["startd"]
    assert "as root" in found["kvm"]["hint"]
    end_libvirtd(namespace)
    _, found = examined(namespace, user="alice")
    assert found["libvirt"]["verdict"] == "bad", "that it does not run is to be seen by all"


def state(namespace: Namespace) -> str:
    """All files with what would show a change, and libvirt's domains and networks.

    EXECUTE itself, but not what is in it, is left out: libvirtd is tried with a file there, which changes its time.
    """
    listing = namespace.run(
        *("find", "/etc", "/var/lib", "/var/tmp", "/tmp", "/usr", "/root", "/run", LAB, "-xdev", "-type", "f,d,l,p,s"),
        *("!", "-path", "/var/lib/condor/execute"),
        *("-printf", "%p %y %m %u %g %s %T@ %i\\n"),
    ).stdout
    return "\n".join([listing, *namespace.domains(), namespace.virsh("net-list", "--all")])


def test_the_machine_is_left_as_it_was(namespace: Namespace) -> None:
    namespace.run("install", "-d", "-o", "alice", f"{LAB}/scratch")
    ad = 'ClusterId = 7\nProcId = 0\nUser = "alice@lab"\nJobVMType = "kvm"\nJobVMMemory = 64\n'
    ad += 'VMPARAM_vm_Disk = "guest.img:vda:w:raw"\nJobVMVNCConsole = true\n'
    (namespace.exchange / "scratch/ad.txt").write_text(ad)
    (namespace.exchange / "scratch/guest.img").write_bytes(bytes(1 << 20))
    namespace.run("chown", "-R", "alice", f"{LAB}/scratch")
    configure(namespace, "VM_NETWORKING = True\nVM_NETWORKING_TYPE = nat, user\nVM_ALLOW_HOST_LOOPBACK = True\n")
    namespace.run("rm", "/usr/bin/passt")  # it is tried with a socket in /tmp, whose time that changes
    namespace.virsh("capabilities")  # libvirt writes what it knows of QEMU to its cache when it is first asked
    before = state(namespace)
    done = namespace.run(VMGAHP, "doctor", "--job", f"{LAB}/scratch/ad.txt", check=False)
    assert "<name>alice_lab_7.0</name>" in done.stdout
    assert sorted(set(state(namespace).splitlines()) ^ set(before.splitlines())) == []


def test_a_machine_that_a_starter_took_out(wheel: Path, tmp_path: Path) -> None:
    """A libvirtd that is gone takes the machine out, and its return alone does not bring it back."""
    with Pool(tmp_path / "pool").running(wheel) as pool:
        status, found = examined(pool.namespace)
        assert (status, found["startd"]["verdict"]) == (0, "ok"), found
        end_libvirtd(pool.namespace)
        pool.watched = False  # or the next line would fail
        pool.submit("broken", lambda directory: make_guest(directory / "guest.img", None))
        pool.wait_until("the machine to be offline", lambda: pool.machine().get("VMOfflineReason"), 120)
        status, found = examined(pool.namespace)
        assert status == 1
        assert "took this machine out of the VM universe 0 minutes ago" in found["startd"]["seen"]
        assert "doctor --recover" in found["startd"]["hint"]
        assert "VMGAHP_ERR_CRITICAL: libvirt cannot be reached" in found["log"]["seen"]
        assert "start libvirtd" in found["log"]["hint"]

        pool.namespace.run("libvirtd", "-d")
        # VM_RECHECK_INTERVAL is 10 s here.
        now = pool.machine()["MyCurrentTime"]
        later = lambda: pool.machine().get("MyCurrentTime", 0) > now + 20  # noqa: E731
        pool.wait_until("the startd's ad of after a recheck", later, 60)
        _, found = examined(pool.namespace)
        assert found["libvirt"]["verdict"] == "ok"
        assert found["startd"]["verdict"] == "bad"
        pool.watched = True
        with pytest.raises(LabError, match="the pool is dead: a starter took the machine out of service: VMGAHP_ERR_"):
            pool.wait_until("what never comes", lambda: None, 240)
        pool.watched, pool.dead = False, ""
        pool.namespace.run(VMGAHP, "doctor", "--recover", check=False)
        pool.wait_until("the machine's return", lambda: pool.machine().get("HasVM") is True, 60)
        status, found = examined(pool.namespace)
        assert status == 0, found
