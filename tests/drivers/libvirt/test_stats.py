"""What real guests use, as libvirt tells it: it grows while they run, and only then."""

import json
import os
from pathlib import Path
from typing import Any

import libvirt
import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import MAC, NAT, URI, WANTS, Job, done, running, started, until
from tests.lab.guest import counts, make_guest
from vmgahp import cli, lifecycle
from vmgahp.drivers.libvirt.life.usage import Meter, devices, from_stats
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection
from vmgahp.metrics.file import NAME


def lines(scratch: Path) -> list[dict[str, Any]]:
    """The whole lines: the last may be in the middle of being written."""
    text = (scratch / NAME).read_text() if (scratch / NAME).exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def samples(scratch: Path) -> list[dict[str, Any]]:
    return [line for line in lines(scratch) if "cpu_seconds" in line]


def writes(sample: dict[str, Any]) -> int:
    return int(sample["block"]["hda"]["write_bytes"])


@pytest.mark.libvirt
def test_a_guest_that_counts_on_its_disk(job: Job) -> None:
    make_guest(job.disk, seconds=None, busy=True)
    with running(job, VM_METRICS_INTERVAL=1) as peer:
        until(lambda: counts(job.console()), "the guest counts")
        until(lambda: samples(job.scratch) and writes(samples(job.scratch)[-1]) > 0, "its writes are seen")
        first = samples(job.scratch)[-1]
        assert (first["state"], first["max_memory_kib"], first["vcpus"]) == ("Running", 64 * 1024, 1)
        assert first["cpu_seconds"] > 0
        until(lambda: writes(samples(job.scratch)[-1]) > writes(first), "its writes grow")
        until(lambda: samples(job.scratch)[-1]["cpu_seconds"] > first["cpu_seconds"], "its CPU time grows")
        done(peer, "SUSPEND")
        saved = lines(job.scratch)[-1]
        assert (saved["event"], saved["state"]) == ("suspend", "Suspended")
        assert saved["bytes"] > 100_000
        before = samples(job.scratch)[-1]
        assert peer.run("STATUS", 1) == ["0", "STATUS=Suspended"]
        done(peer, "RESUME")
        resumed = next(number for number, line in enumerate(lines(job.scratch)) if line.get("event") == "resume")
        assert "event" in lines(job.scratch)[resumed - 1], "nothing is used while it is suspended"
        until(lambda: writes(samples(job.scratch)[-1]) > writes(before), "its writes continue from where they were")
        for then, now in zip(samples(job.scratch), samples(job.scratch)[1:], strict=False):
            assert now["cpu_seconds"] >= then["cpu_seconds"]
            assert writes(now) >= writes(then)
        done(peer, "SOFT_SUSPEND")
        until(lambda: samples(job.scratch)[-1]["state"] == "SoftSuspended", "a paused guest is seen as one")
    assert lines(job.scratch)[-1]["event"] == "end"
    assert (job.scratch / NAME).stat().st_uid == job.scratch.stat().st_uid


@pytest.mark.libvirt
def test_a_checkpoint_takes_the_figures_along(job: Job) -> None:
    with running(job, WANTS, VM_METRICS_INTERVAL=1) as peer:
        until(lambda: samples(job.scratch) and writes(samples(job.scratch)[-1]) > 0, "its writes are seen")
        done(peer, "CHECKPOINT")
    before = samples(job.scratch)[-1]
    with running(job, WANTS, VM_METRICS_INTERVAL=1) as peer:
        until(lambda: len(samples(job.scratch)) and samples(job.scratch)[-1] != before, "a reading")
        after = samples(job.scratch)[-1]
        assert writes(after) >= writes(before) > 0
        assert after["cpu_seconds"] > before["cpu_seconds"]
    events = [line["event"] for line in lines(job.scratch) if "event" in line]
    assert events == ["start", "checkpoint", "end", "start", "end"]


@pytest.mark.libvirt
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_network_card_by_its_address(job: Job, network: "libvirt.virNetwork") -> None:
    with running(job, *support.network_ad("nat"), VM_METRICS_INTERVAL=1, **NAT):
        until(lambda: samples(job.scratch), "a reading")
        nics = samples(job.scratch)[-1]["network"]
        assert list(nics) == [MAC]
        ways = {f"{way}_{what}" for way in ("rx", "tx") for what in ("bytes", "packets", "errors", "drops")}
        assert set(nics[MAC]) == ways


@pytest.mark.libvirt
def test_top_shows_it(job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_guest(job.disk, seconds=None, busy=True)
    monkeypatch.setenv("_CONDOR_VM_LIBVIRT_URI", URI)

    def top() -> dict[str, Any]:
        assert cli.main(["vmgahp", "top", "--json", "--execute", str(job.scratch.parent)]) == 0
        (row,) = [row for row in json.loads(capsys.readouterr().out)["vms"] if row["name"] == job.name]
        return dict(row)

    with running(job) as peer:
        until(lambda: counts(job.console()), "the guest counts")
        row = top()
        assert (row["source"], row["state"], row["vcpus"]) == ("libvirt", "Running", 1)
        assert (row["scratch"], row["max_memory_kib"]) == (str(job.scratch), 64 * 1024)
        assert row["cpu_percent"] > 0
        assert row["age"] >= 0
        done(peer, "SUSPEND")
        row = top()
        assert (row["source"], row["state"], row["cpu_percent"]) == ("metrics", "Suspended", None)


class Busy:
    """A libvirt that answers the first question in full, and the second as while it saves the domain."""

    def __init__(self) -> None:
        self.asked = 0

    def call(self, function: "object") -> object:
        return function(self)  # type: ignore[operator]

    def lookupByUUIDString(self, _uuid: str) -> "Busy":
        return self

    lookupByName = lookupByUUIDString

    def name(self) -> str:
        return "alice_lab_1.0"

    def UUIDString(self) -> str:
        return "11111111-1111-1111-1111-111111111111"

    def ID(self) -> int:
        return 5

    def XMLDesc(self) -> str:
        return "<domain><devices/></domain>"

    def domainListGetStats(self, *_: object) -> "list[tuple[Busy, dict[str, object]]]":
        self.asked += 1
        stats: dict[str, object] = {"cpu.time": self.asked, "block.count": 1, "block.0.name": "vda"}
        return [(self, stats | ({} if self.asked == 2 else {"block.0.wr.bytes": 7}))]


def test_half_an_answer_is_none() -> None:
    meter = Meter(Busy(), "alice_lab_1.0", "11111111-1111-1111-1111-111111111111")  # type: ignore[arg-type]
    readings = [meter.read() for _ in range(3)]
    assert [reading and reading.block for reading in readings] == [
        {"vda": {"write_bytes": 7}},
        None,
        {"vda": {"write_bytes": 7}},
    ]


def test_a_driver_of_libvirts_without_that_answer_is_asked_piece_by_piece() -> None:
    """libvirt's test driver, which is in the library and has made-up figures, that grow."""
    way = LibvirtConnection("test:///default", pytest.fail)
    meter = Meter(way, "test", way.call(lambda connection: connection.listAllDomains()[0].UUIDString()))
    first, second = meter.read(), meter.read()
    way.close()
    assert (first.state, first.vcpus, first.max_memory_kib) == (lifecycle.RUNNING, 2, 8 << 20)
    assert first.block["vda"]["write_bytes"] >= 0
    assert first.network["aa:bb:cc:dd:ee:ff"]["tx_packets"] >= 0
    assert second.cpu_seconds >= first.cpu_seconds


def test_libvirts_answer_in_our_words() -> None:
    _, nics = devices(
        "<domain><devices><disk><target dev='vda'/></disk>"
        "<interface><mac address='52:54:00:AA:00:01'/><target dev='vnet7'/></interface>"
        "<interface><mac address='52:54:00:AA:00:02'/></interface>"
        "<hostdev><target dev='vnet8'/><mac address='52:54:00:AA:00:03'/></hostdev></devices></domain>"
    )
    stats: dict[str, object] = {
        "state.state": libvirt.VIR_DOMAIN_RUNNING, "cpu.time": 2_500_000_000, "vcpu.current": 2, "vcpu.maximum": 2,
        "vcpu.0.time": 1_000_000_000, "vcpu.1.time": 500_000_000, "net.count": 2, "net.1.name": "vnet7",
        "net.1.rx.bytes": 90, "block.count": 1, "block.0.name": "vda", "block.0.wr.bytes": 4096,
    }  # fmt: skip
    found = from_stats(stats, "3", nics)
    assert (found.cpu_seconds, found.vcpus, found.vcpu_seconds) == (2.5, 2, {"0": 1.0, "1": 0.5})
    assert found.network == {"52:54:00:aa:00:01": {"rx_bytes": 90}}
    assert found.block == {"vda": {"write_bytes": 4096}}
    assert found.state == lifecycle.RUNNING
    assert from_stats(stats | {"state.state": libvirt.VIR_DOMAIN_SHUTOFF}, "3", nics) is None


def test_the_cpu_time_of_a_qemu_that_has_ended_is_no_reading() -> None:
    """libvirt says that it is 0."""
    gone: dict[str, object] = {"state.state": libvirt.VIR_DOMAIN_SHUTDOWN, "cpu.time": 0, "vcpu.current": 1}
    assert from_stats(gone, "3", {}) is None


@pytest.mark.libvirt
@pytest.mark.parametrize("state", [libvirt.VIR_DOMAIN_SHUTDOWN, libvirt.VIR_DOMAIN_RUNNING])
def test_no_status_takes_cpu_time_back(job: Job, monkeypatch: pytest.MonkeyPatch, state: int) -> None:
    with started(job, []) as machine, monkeypatch.context() as patch:
        before = machine.status().cpu_seconds
        assert before > 0
        patch.setattr(libvirt.virDomain, "info", lambda _domain: [state, 65536, 65536, 1, 0])
        assert machine.status().cpu_seconds == before
        patch.setattr(libvirt.virDomain, "info", lambda _domain: [state, 65536, 65536, 1, int(before * 1e9) + 1])
        assert machine.status().cpu_seconds == pytest.approx(before, abs=1e-6)
