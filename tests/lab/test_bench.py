"""The pure parts of the bench, and its measuring client against a server with the simulated hypervisor."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import simulated_ad
from tests.lab import bench, stopwatch
from tests.lab.bench import OURS, REFERENCE, ROWS, Line, Spread
from tests.peer import DAEMON, environment
from vmgahp.job.ad import JobAd

positive = st.floats(min_value=1e-3, max_value=1e6)


def found(key: str, ours: list[float], theirs: list[float]) -> list[dict[str, object]]:
    return [
        {"round": turn, "server": server, "row": key, "value": value}
        for server, values in ((OURS, ours), (REFERENCE, theirs))
        for turn, value in enumerate(values)
    ]


# ---- statistics -------------------------------------------------------------------------------------


def test_quartiles() -> None:
    assert bench.quartiles([5, 1, 4, 2, 3]) == Spread(3, 2, 4)
    assert bench.quartiles([7]) == Spread(7, 7, 7)


@given(st.lists(positive, min_size=1, max_size=30))
def test_a_median_lies_in_its_interval(values: list[float]) -> None:
    spread = bench.quartiles(values)
    assert min(values) <= spread.low <= spread.value <= spread.high <= max(values)


def test_a_ratio_without_noise_is_sure_of_itself() -> None:
    assert bench.ratio([3.0] * 8, [2.0] * 8) == Spread(1.5, 1.5, 1.5)


def test_the_interval_of_a_ratio_holds_what_was_put_in() -> None:
    draw = random.Random(7)
    theirs = [draw.gauss(10, 1) for _ in range(40)]
    ours = [draw.gauss(12, 1) for _ in range(40)]
    ratio = bench.ratio(ours, theirs)
    assert ratio.low < 1.2 < ratio.high
    assert ratio.high - ratio.low < 0.2
    assert bench.ratio(ours, theirs) == ratio, "the same values give the same interval"


def test_the_noise_of_a_round_is_no_difference() -> None:
    """Rounds that were slow for both servers leave the ratio as it is."""
    noise = [1.0, 1.0, 5.0, 1.0, 9.0, 2.0, 1.0, 3.0]
    ratio = bench.ratio([2 * n for n in noise], noise)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2, 2, 2))


def test_only_rounds_of_both_servers_count() -> None:
    values = found("START", [10.0, 30.0, 1000.0], [20.0, 20.0])
    [line] = bench.summarize(bench.collect(values))
    assert line.ours.value == 20
    assert line.ratio.value == 1


# ---- output -----------------------------------------------------------------------------------------


def lines() -> list[Line]:
    values = found("probe", [90.0, 90.0], [30.0, 30.0]) + found("idle Rss", [11264.0], [22528.0])
    return bench.summarize(bench.collect(values))


def test_the_rows_come_in_their_order_and_units() -> None:
    assert [line.row.key for line in lines()] == ["probe", "idle Rss"]
    assert lines()[1].ours.value == 11
    keys = [row.key for row in ROWS]
    assert len(keys) == len(set(keys))


def test_the_table() -> None:
    head, probe, memory, *rest = bench.table(lines()).splitlines()
    assert head.split() == ["this", "reference", "this", "/", "reference"]
    assert "ms   90.0 (90.0 - 90.0)  30.0 (30.0 - 30.0)  3.00 (3.00 - 3.00)  ! [1]" in probe
    assert memory.endswith("0.50 (0.50 - 0.50)")
    assert rest[-1].startswith("[1] ")
    assert all(line == line.rstrip() for line in (head, probe, memory, *rest))


def test_the_report_is_json_with_every_value() -> None:
    samples = bench.collect(found("VERSION", [0.002, 0.004], [0.002, 0.002]))
    report = json.loads(json.dumps(bench.report(bench.summarize(samples), samples, {OURS: "1"})))
    [row] = report["rows"]
    assert row["values"][OURS] == [2.0, 4.0], "microseconds"
    assert row["ratio"]["value"] == 1.5
    assert report["versions"] == {OURS: "1"}


def test_the_ad_is_as_large_as_a_real_one() -> None:
    text = bench.JOB_AD.read_text().splitlines()
    assert len(text) == 146
    names = [pair[0] for line in text if (pair := JobAd.parse_line(line))]
    assert len(set(names)) == 146
    assert f'VM_WORKING_DIR = "{bench.SCRATCH}"' in text


# ---- the measuring client ---------------------------------------------------------------------------


def test_a_conversation_with_a_server(scratch: Path, tmp_path: Path) -> None:
    environ = environment("simulated", scratch)
    ad = [line.encode() for line in simulated_ad(scratch)]
    errors = str(tmp_path / "errors")
    with stopwatch.Server([*DAEMON, "-f", "-M", "3"], environ, errors) as server:
        assert server.lines(1)[0].startswith(b"$VMGahpVersion")
        assert 0 < server.version() < server.since_start() * 1e6
        assert server.statuses(3, b"99", b"Stopped") > 0
        assert server.block(ad, piecewise=False) > 0
        assert server.block(ad, piecewise=True) > 0
        taken, vm_id = server.result(b"CONDOR_VM_START", 1, b"simulated")
        assert taken > 0
        assert vm_id == b"1"
        assert server.statuses(3, vm_id, b"Running") > 0
        memory = dict(server.memory(b"there is no such process"))
        assert memory["Rss"] >= memory["Pss"] >= memory["Anonymous"] > 1000
        assert server.quit() > 0


def test_an_answer_that_is_none_ends_the_measurement(scratch: Path, tmp_path: Path) -> None:
    environ = environment("simulated", scratch)
    with stopwatch.Server([*DAEMON, "-f", "-M", "3"], environ, str(tmp_path / "errors")) as server:
        server.lines(1)
        with pytest.raises(ValueError, match="CONDOR_VM_START"):
            server.result(b"CONDOR_VM_START", 1, b"xen")
    with stopwatch.Server(["/bin/true"], environ, str(tmp_path / "errors")) as server, pytest.raises(EOFError):
        server.lines(1)
