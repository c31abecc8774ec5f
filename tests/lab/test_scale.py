"""The reckoning for a pool, and the page that is made of it; what watches many servers, against two of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import simulated_ad
from tests.lab import scale, scale_measure, scale_model, scale_watch
from tests.lab.scale_model import GIB, PoolSize, Transfer, shared
from tests.peer import DAEMON, environment

UNITS = scale.read_units()


# ---- transfers that share a line ----------------------------------------------------------------------


def test_transfers_share_a_line_evenly() -> None:
    assert shared([Transfer(0, 100), Transfer(0, 300)], 9, 10, 10) == pytest.approx([20, 40])
    assert shared([Transfer(0, 100), Transfer(0, 100)], 9, 10, 4) == pytest.approx([25, 25]), "by their own lines"


def test_a_transfer_waits_for_a_place() -> None:
    assert shared([Transfer(0, 100), Transfer(1, 100), Transfer(2, 10)], 1, 10, 10) == pytest.approx([10, 20, 21])


def test_a_line_that_was_idle_gives_no_more_than_it_has() -> None:
    assert shared([Transfer(0, 10), Transfer(100, 10)], 1, 10, 10) == pytest.approx([1, 101])


@given(
    st.lists(st.builds(Transfer, st.floats(0, 100), st.floats(1, 1000)), min_size=1, max_size=40),
    st.integers(1, 50),
    st.floats(1, 100),
    st.floats(1, 100),
)
def test_no_transfer_is_faster_than_its_lines(
    transfers: list[Transfer], places: int, whole: float, each: float
) -> None:
    over = shared(transfers, places, whole, each)
    assert len(over) == len(transfers)
    for transfer, end in zip(transfers, over, strict=True):
        assert end - transfer.begins >= transfer.size / min(whole, each) * (1 - 1e-6) - 1e-6
    first = min(transfer.begins for transfer in transfers)
    assert max(over) - first >= sum(transfer.size for transfer in transfers) / whole * (1 - 1e-6) - 1e-6


# ---- the pool -----------------------------------------------------------------------------------------


def test_the_reckoning_is_the_same_every_time() -> None:
    for make in scale.TABLES.values():
        assert make(PoolSize(), UNITS) == make(PoolSize(), UNITS)


def test_what_is_not_copied_takes_no_line() -> None:
    image, kept, plugin, catalog, none = scale_model.flows(PoolSize(), UNITS)
    assert image.gbit == kept.gbit > plugin.gbit == catalog.gbit > none.gbit == 0
    assert image.way.sent == 4 * GIB
    assert plugin.way.sent == 0


def test_a_pool_fills_faster_by_a_faster_line_only() -> None:
    hundred, twenty, unlimited, faster, alone = scale_model.fillings(PoolSize())
    assert hundred.last == pytest.approx(twenty.last, rel=0.01)
    assert unlimited.half > hundred.half, "all that share a line end together"
    assert faster.last < hundred.last / 5
    assert alone.last > 2 * faster.last, "the lines of twenty nodes are narrower"


def test_startds_that_start_later_are_gentler() -> None:
    most = [storm.updates for storm in scale_model.storms(PoolSize(), UNITS)]
    assert most == sorted(most, reverse=True)


def test_a_fuller_rack_loses_more() -> None:
    lost = [drain.lost for drain in scale_model.drains(PoolSize(), UNITS)]
    assert lost == sorted(lost)
    assert lost[0] == 0 < lost[-1]


def test_the_page_is_what_the_script_says() -> None:
    page = scale.PAGE.read_text()
    assert scale.written(page, UNITS) == page, "scripts/scale --write"


def test_a_page_with_no_place_for_a_table_is_not_written() -> None:
    with pytest.raises(scale.LabError, match="0 places for measured"):
        scale.written("# Nothing\n", UNITS)


def test_what_was_measured_went_well() -> None:
    for found in [*UNITS["simulated"], *UNITS["real"], UNITS["without libvirtd"]]:
        assert found["started"] == found["domains"] == found["number of guardians"] == found["servers"]
        assert found["left"]["processes"] == found["left"]["directories"] == []
        assert found["death"]["last VM"] is not None
    assert max(found["servers"] for found in UNITS["simulated"]) == 200
    assert max(found["servers"] for found in UNITS["real"]) == 20


# ---- words and figures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000123, "123 µs"),
        (0.0123, "12 ms"),
        (0.5, "500 ms"),
        (7.25, "7.2 s"),
        (61, "61 s"),
        (600, "10 min"),
        (9e3, "2.5 h"),
    ],
)
def test_times(value: float, text: str) -> None:
    assert scale.seconds(value) == text


def test_sizes() -> None:
    assert [scale.size(value) for value in (0, 1536, 4 * GIB, 700 * GIB)] == ["0", "1.5 KiB", "4.0 GiB", "700 GiB"]


def test_an_attribute_of_the_probe_is_told_from_others() -> None:
    lines = 'VM_Type = "kvm"', 'VM_TYPES = "kvm"', "HasVirshDefaultNetwork = true", "VM_AvailNum = 4", "Memory = 3"
    assert [line for line in lines if scale_measure.is_ours(line)] == [lines[1], lines[2]]


def test_an_ad_of_another_slot() -> None:
    assert scale_measure.renamed('Name = "slot1@a"\nCpus = 4', "slot1@b.lab").splitlines() == [
        'Name = "slot1@b.lab"',
        'Machine = "b.lab"',
        "Cpus = 4",
    ]


def test_figures_are_kept_with_what_they_are_good_for() -> None:
    assert scale_measure.rounded({"a": [1.23456789, 3], "b": "x", "c": None}) == {"a": [1.235, 3], "b": "x", "c": None}


# ---- what watches -------------------------------------------------------------------------------------


def test_two_servers_at_once(scratch: Path, tmp_path: Path) -> None:
    errors = str(tmp_path / "errors")
    clients = [
        scale_watch.Client([*DAEMON, "-f", "-M", "3"], environment("simulated", scratch), errors) for _ in range(2)
    ]
    assert scale_watch.hear(clients, scale_watch.lines(1)) == []
    late, took = scale_watch.all_at_once(clients, b"VERSION\r\n", scale_watch.lines(1))
    assert late == []
    assert took["max"] >= took["p95"] >= took["median"] > 0
    memory = scale_watch.memory(client.pid for client in clients)
    assert memory["Rss"] >= memory["Pss"] >= memory["Anonymous"] > 1000
    ad = "\r\n".join(["CLASSAD", *simulated_ad(scratch), "CLASSAD_END", ""]).encode()
    scale_watch.all_at_once(clients[:1], ad, scale_watch.lines(2))
    scale_watch.all_at_once(clients[:1], b"CONDOR_VM_START 1 simulated\r\n", scale_watch.lines(2))
    scale_watch.all_at_once(clients[:1], b"RESULTS\r\n", scale_watch.lines(2))
    assert clients[0].data == b"S 1\n1 0 1\n"
    for client in clients:
        client.say(b"QUIT\r\n")
        client.close()


def test_a_program_and_the_files_that_it_opens(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    program = {
        "argv": [sys.executable, "-c", f"open({str(tmp_path / 'a')!r}).read(); print('done')"],
        "environment": dict(os.environ),
        "watched": str(tmp_path),
    }
    found = scale_watch.run(program)
    assert (found["output"], found["opened"], found["read"]) == ("done\n", 1, 1)
    assert found["cpu"] > 0
    with pytest.raises(ValueError, match="exit 1"):
        scale_watch.run(program | {"argv": ["/bin/false"]})
