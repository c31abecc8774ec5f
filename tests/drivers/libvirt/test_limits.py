"""What a VM may use of its machine: the limits that are set, by whom, and that they outlive a save."""

import os
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree as etree

import libvirt
import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import LINUX, NAT, USER_DATA, USER_NETWORK, WANTS, Job, done, moved, running, until
from vmgahp.domain import build
from vmgahp.drivers.libvirt.life import usage
from vmgahp.drivers.libvirt.life.usage import Limits
from vmgahp.host import proc, system_logs

DOMAIN = "<domain type='{type}'><memory unit='MiB'>{memory}</memory><vcpu>{vcpus}</vcpu>{more}</domain>"


def domain(type="kvm", memory=1024, vcpus=1, more=""):
    return etree.fromstring(DOMAIN.format(type=type, memory=memory, vcpus=vcpus, more=more))


class Domain:
    """A domain that notes what is set, and refuses what it is to refuse."""

    def __init__(self, *refused):
        self.set = []
        self._refused = refused

    def name(self):
        return "alice_lab_1.0"

    def __getattr__(self, name):
        if not name.startswith(("set", "pin")):
            raise AttributeError(name)

        def call(*arguments):
            *said, flags = arguments
            assert flags == libvirt.VIR_DOMAIN_AFFECT_LIVE
            if name in self._refused:
                raise libvirt.libvirtError(f"{name}() failed")
            self.set.append((name, *said))

        return call


def applied(wanted, live=None, refused=()):
    made, log = Domain(*refused), []
    usage.apply_limits(wanted, made, etree.tostring(live or domain(), encoding="unicode"), os.getpid(), log.append)
    return made.set, log


# --- what is set


@pytest.mark.parametrize(
    ("version", "cpus", "weight"), [(1, 4, 4096), (1, 512, 262144), (2, 4, 400), (2, 128, 10000), (0, 2, 200)]
)
def test_the_weight_is_that_of_the_slots_cpus(monkeypatch, version, cpus, weight):
    monkeypatch.setattr(proc, "cgroup_version", lambda controller, pid: version)
    assert applied(Limits(cpus))[0] == [("setSchedulerParametersFlags", {"cpu_shares": weight})]


def test_a_job_that_asks_for_no_end_of_cpus_gets_what_libvirt_can_say():
    found, _ = applied(Limits(10**18, quota=True))
    assert found[1][1]["global_quota"] == 17592186044415


NICS = "<devices>{}</devices>".format(
    "".join(f"<interface><mac address='52:54:00:00:00:0{n}'/></interface>" for n in (1, 2))
)


def test_each_nic_has_the_bandwidth_both_ways():
    found, log = applied(Limits(networks=4 << 20), domain(more=NICS))
    what = {"inbound.average": 4096, "outbound.average": 4096}
    assert found == [("setInterfaceParameters", f"52:54:00:00:00:0{n}", what) for n in (1, 2)]
    assert "network bandwidth of 4096 KiB/s" in log[0]
    assert applied(Limits(networks=1), domain(more=NICS))[0][0][2]["inbound.average"] == 1, "and 0 would be any"
    assert applied(Limits(networks=1), domain()) == ([], [])
    said = domain(more=NICS.replace("<mac", "<bandwidth/><mac"))
    assert applied(Limits(networks=1, said=("bandwidth",)), said)[0] == []
    assert "bandwidth" not in usage.without_limits(Limits(networks=1), etree.tostring(said, encoding="unicode"))


@pytest.mark.libvirt
@pytest.mark.parametrize("kind", ["nat", "user"])
def test_a_vm_whose_network_cannot_be_limited_runs_and_the_log_says_so(job, network, kind):
    """Of user networking no kernel limits anything; of the others one that has the traffic control for it."""
    asks = ("JobVMNetworking = true", f'JobVMNetworkingType = "{kind}"')
    offers = NAT | USER_NETWORK | {"VM_NETWORKING_TYPE": "nat, user"}
    with running(job, *asks, VM_NETWORK_BANDWIDTH="1 Mb", **offers) as peer:
        log = peer.end_by(15)
    assert "no network bandwidth of 1024 KiB/s" in log or (kind == "nat" and "network bandwidth of 1024 KiB/s" in log)


@pytest.mark.parametrize("cpus", [None, 0, -1])
def test_a_slot_without_cpus_has_no_weight(cpus):
    assert applied(Limits(cpus, quota=True))[0] == []


def test_what_is_refused_is_a_line_in_the_log_and_the_rest_is_set():
    found, log = applied(Limits(2, memory=True), refused=("setSchedulerParametersFlags",))
    assert [name for name, *_ in found] == ["setMemoryParameters"]
    assert len(log) == 1
    assert "memory limit of" in log[0]
    assert "no CPU weight of" in log[0]


# --- who has said it already


def test_what_the_administrator_has_said_stays():
    more = "<cputune><shares>7</shares></cputune><memtune><hard_limit>8</hard_limit></memtune>"
    assert applied(Limits(2, (1,), True, True, ("cputune", "memtune")), domain(more=more))[0] == []
    text = etree.tostring(domain(more=more), encoding="unicode")
    assert usage.without_limits(Limits(said=("cputune", "memtune")), text) == text
    left = etree.fromstring(usage.without_limits(Limits(memory=True, said=("cputune",)), text))
    assert [child.tag for child in left][-1] == "cputune"
    assert left.find("memtune") is None


@pytest.mark.parametrize("device", ["<hostdev type='usb'/>", "<shmem/>", "<memory/>"])
def test_a_vm_with_what_nobody_has_measured_has_no_limit_of_memory(device):
    assert applied(Limits(memory=True), domain(more=f"<devices>{device}</devices>"))[0] == []


# --- with libvirt

CGROUPS = pytest.mark.skipif(
    os.getuid() != 0 or not proc.cgroup_controllers(), reason="needs root" if os.getuid() else "needs control groups"
)
SLOT = ("JobVM_VCPUS = 2", "RequestCpus = 2")


def figures(job: Job) -> tuple[int, int]:
    """The weight and the limit of memory that a domain has."""
    made = job.domain()
    return made.schedulerParameters()["cpu_shares"], made.memoryParameters()["hard_limit"]


@pytest.mark.libvirt
@CGROUPS
def test_a_vm_has_its_limits_from_the_start_on_and_after_a_save(job: Job) -> None:
    with running(job, *SLOT, "JobVMCheckpoint = true") as peer:
        weight = 2 * usage.WEIGHT[proc.cgroup_version("cpu")]
        limit = build.limit_mib(job.live()) << 10
        assert figures(job) == (weight, limit)
        done(peer, "SUSPEND")
        assert job.domain() is None
        done(peer, "RESUME")
        assert figures(job) == (weight, limit)
        done(peer, "CHECKPOINT", "RESUME")
        assert figures(job) == (weight, limit)
        log = peer.end_by(15)
    assert f"CPU weight of {weight}" in log


@pytest.mark.libvirt
def test_the_disks_have_their_bandwidth_from_the_start_on_and_after_a_save(job: Job) -> None:
    def bandwidth() -> tuple[object, object]:
        found = job.domain().blockIoTune("hda")
        return found["total_bytes_sec"], found["group_name"]

    with running(job, "JobVMCheckpoint = true", VM_DISK_BANDWIDTH="8 Mb") as peer:
        assert bandwidth() == (8 << 20, "vmgahp")
        done(peer, "SUSPEND", "RESUME")
        assert bandwidth() == (8 << 20, "vmgahp")
        support.evict(peer)
    with running(job, "JobVMCheckpoint = true", VM_DISK_BANDWIDTH="4 Mb") as peer:
        assert bandwidth()[0] == 4 << 20
        assert "continues from its saved memory" in peer.end_by(15), "a checkpoint brings no limit of another machine's"


@pytest.mark.libvirt
@CGROUPS
def test_what_the_administrator_turns_off_is_not_set(job: Job) -> None:
    with running(job, *SLOT, VM_MEMORY_LIMIT=False, VM_CPU_QUOTA=True):
        assert job.domain().memoryParameters()["hard_limit"] > 1 << 40
        assert job.domain().schedulerParameters()["global_quota"] == 200000


@pytest.mark.libvirt
@pytest.mark.parametrize("wanted", [True, False])
def test_a_vm_is_kept_to_the_cores_of_its_slot(job: Job, wanted: bool) -> None:
    if os.cpu_count() == 1:
        pytest.skip("needs two processors")
    core = max(os.sched_getaffinity(0))
    with running(job, *SLOT, VM_CPU_AFFINITY=wanted, STARTD_ASSIGNED_AFFINITY=core) as peer:
        pid = int(peer.run("GETPID", 1)[1])
        threads = Path(f"/proc/{pid}/task").iterdir()
        # Without control groups a thread that was there before stays where it is, but for the guest's CPUs.
        working = [pid, *(int(each.name) for each in threads if (each / "comm").read_text().startswith("CPU "))]
        assert len(working) > 1
        assert all(os.sched_getaffinity(thread) == {core} for thread in working) is wanted


@pytest.mark.libvirt
@CGROUPS
def test_a_vm_that_comes_to_its_limit_ends_and_says_so(linux: Job) -> None:
    fill = "mkdir /m && mount -t tmpfs -o size=90% m /m && cat /dev/zero >/m/x"
    (linux.scratch / "user-data").write_text(f"#!/bin/sh\nsleep 2; {fill}\n")
    with running(linux, *LINUX, USER_DATA) as peer:
        made = linux.domain()

        def bound() -> bool:
            """Whether a limit could be set that is near: none can below what is used, and the guest boots on."""
            with suppress(libvirt.libvirtError):
                return made.setMemoryParameters({"hard_limit": made.memoryStats()["rss"] + (8 << 10)}, 1) == 0
            return False

        until(bound, "the limit to be set")
        found = support.run_to_its_end(peer, linux)
        peer.quit(status=1)
    if not _reads_the_kernels_log():  # in a container nobody can tell why
        assert found["ended_by"] == "crashed"
        return
    assert found["ended_by"] == "out of memory"
    assert "the VM's limit was" in str(found["reason"])


FIRST_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the kernel (include/linux/proc_ns.h)."""


def _reads_the_kernels_log() -> bool:
    if os.readlink("/proc/self/ns/pid") != FIRST_NAMESPACE:  # processes have other numbers in the log
        return False
    try:
        os.close(os.open(system_logs.KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.mark.libvirt
def test_a_checkpoint_goes_on_with_another_bound_of_tcgs_cache(job: Job, elsewhere: Path) -> None:
    """Such as one of a release that had none."""
    support.vacate(job, VM_TB_CACHE=0)
    moved(job, elsewhere)
    with running(job, WANTS, VM_TB_CACHE=48) as peer:
        live = job.live()
        if live.get("type") != "qemu":
            pytest.skip("needs a machine without KVM")
        assert build.tb_cache_mib(live) == 48
        until(lambda: "3\n" in job.console(), "the guest counts on")
        assert job.console().count("1\n") == 1, "it has not booted afresh"
        assert "continues from its saved memory" in peer.end_by(15)
