"""The pure parts of the bench, and its measuring client against a server with the simulated hypervisor."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import simulated_ad
from tests.lab import bench, bench_table, stopwatch, watched
from tests.lab.bench_table import FLOOR, OURS, REFERENCE, ROWS, SCALE, Goal, Line, Spread
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
    assert bench_table.quartiles([5, 1, 4, 2, 3]) == Spread(3, 2, 4)
    assert bench_table.quartiles([7]) == Spread(7, 7, 7)


@given(st.lists(positive, min_size=1, max_size=30))
def test_a_median_lies_in_its_interval(values: list[float]) -> None:
    spread = bench_table.quartiles(values)
    assert min(values) <= spread.low <= spread.value <= spread.high <= max(values)


def test_a_ratio_without_noise_is_sure_of_itself() -> None:
    assert bench_table.ratio([3.0] * 8, [2.0] * 8) == Spread(1.5, 1.5, 1.5)


def test_the_interval_of_a_ratio_holds_what_was_put_in() -> None:
    draw = random.Random(7)
    theirs = [draw.gauss(10, 1) for _ in range(40)]
    ours = [draw.gauss(12, 1) for _ in range(40)]
    ratio = bench_table.ratio(ours, theirs)
    assert ratio.low < 1.2 < ratio.high
    assert ratio.high - ratio.low < 0.2
    assert bench_table.ratio(ours, theirs) == ratio, "the same values give the same interval"


def test_the_noise_of_a_round_is_no_difference() -> None:
    """Rounds that were slow for both servers leave the ratio as it is."""
    noise = [1.0, 1.0, 5.0, 1.0, 9.0, 2.0, 1.0, 3.0]
    ratio = bench_table.ratio([2 * n for n in noise], noise)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2, 2, 2))


def test_only_rounds_of_both_servers_count() -> None:
    values = found("START", [10.0, 30.0, 1000.0], [20.0, 20.0])
    [line] = bench_table.summarize(bench_table.collect(values))
    assert line.ours.value == 20
    assert line.ratio.value == 1


def test_who_answers_nobody_is_no_floor_of_an_answer() -> None:
    values = found("meanwhile 256", [1.0], [300.0]) + found("START", [150.0], [100.0])
    values += [{"round": 0, "server": FLOOR, "row": row, "value": 90.0} for row in ("meanwhile 256", "START")]
    assert [line.floor for line in bench_table.summarize(bench_table.collect(values))] == [90.0, None]


# ---- output -----------------------------------------------------------------------------------------


def lines() -> list[Line]:
    values = found("probe", [99.0, 99.0], [30.0, 30.0]) + found("idle Rss", [11264.0], [22528.0])
    values.append({"round": 0, "server": FLOOR, "row": "probe", "value": 60.0})
    return bench_table.summarize(bench_table.collect(values))


def test_the_rows_come_in_their_order_and_units() -> None:
    assert [line.row.key for line in lines()] == ["probe", "idle Rss"]
    assert lines()[1].ours.value == 11


@pytest.mark.parametrize("column", ["key", "title"])
def test_no_two_rows_have_one_name(column: str) -> None:
    names = [getattr(row, column) for row in ROWS]
    assert len(names) == len(set(names))


def test_each_row_is_measured_in_a_unit_that_is_known() -> None:
    assert {row.unit for row in ROWS} == SCALE.keys()
    assert {row.part for row in ROWS} == bench.ROUNDS_OF.keys() == stopwatch.PARTS.keys() | {"silent"}


def test_only_the_parts_are_measured_whose_rows_were_asked_for() -> None:
    assert bench_table.parts([]) == list(dict.fromkeys(row.part for row in ROWS))
    assert bench_table.parts(["pss"]) == ["many"]
    assert bench_table.parts(["probe", "boot"]) == ["probe"]
    assert bench_table.parts(["there is none"]) == []
    assert bench.rounds_of(4, ["suspend", "gib"]) == {"1 GiB": 1}


def test_the_table() -> None:
    head, probe, memory, *rest = bench_table.table(lines()).splitlines()
    assert head.split() == ["this", "reference", "this", "/", "reference", "goal", "floor"]
    assert probe.split() == ["the", "probe", "ms", "99.0", "30.0", "3.30", "3.0", "!", "60.0", "[1]"]
    assert memory.split() == ["RSS", "without", "a", "job", "MiB", "11.0", "22.0", "0.50"]
    assert rest[-1].startswith("[1] ")
    assert all(line == line.rstrip() for line in (head, probe, memory, *rest))


def test_a_spread_is_in_the_table() -> None:
    [line] = bench_table.summarize(bench_table.collect(found("probe", [90.0, 100.0, 110.0], [30.0, 30.0, 30.0])))
    assert "100 (95-105)" in bench_table.table([line])


def test_what_is_above_its_goal_is_told_from_what_is_within() -> None:
    values = found("silent CPU", [400.0], [10.0]) + found("live Anonymous", [9.5 * 1024], [3072.0])
    within, above = sorted(bench_table.summarize(bench_table.collect(values)), key=Line.above_goal)
    assert (within.row.key, above.row.key) == ("silent CPU", "live Anonymous")
    assert within.row.goal == Goal(0.5, ratio=False)
    assert bench_table.distances([within, above]) == "- **its own with a VM**: 9.50 MiB where the goal allows 9.00."
    assert bench_table.distances([within]).startswith("None:")


def test_a_distance_says_what_the_floor_is_of_it_and_what_else_was_measured() -> None:
    values = found("probe anew", [300.0], [30.0]) + found("probe instructions", [9e6], [2e6])
    text = bench_table.distances(lines() + bench_table.summarize(bench_table.collect(values)))
    assert max(map(len, text.splitlines())) <= 120
    assert " ".join(text.split()) == (
        "- **the probe**: 99.0 ms where the goal allows 90.0. The floor is 60.0 ms, within the goal; 39.0 ms are this"
        " server's own. Beside it: instructions of the probe 9000 thousand, reference 2000; the probe after a boot"
        " 300 ms, reference 30.0."
    )


def test_what_is_said_beside_a_distance_is_a_row() -> None:
    keys = {row.key for row in ROWS}
    assert bench_table.BESIDE.keys() <= keys
    assert {key for beside in bench_table.BESIDE.values() for key in beside} <= keys


# ---- the page ---------------------------------------------------------------------------------------

PAGE = f"# Title\n\n{bench_table.BEGIN}\nold\n{bench_table.END}\n\nafter\n"
VERSIONS = {OURS: "1", REFERENCE: "2", "python": "3", "libvirt": "4"}


def test_the_page_keeps_what_is_around_the_table() -> None:
    page = bench_table.written(PAGE, lines(), VERSIONS)
    assert page.startswith("# Title\n\n")
    assert page.endswith("\n\nafter\n")
    assert "old" not in page
    assert bench_table.written(page, lines(), VERSIONS) == page


def test_the_page_is_read_as_it_was_written() -> None:
    assert bench_table.committed(bench_table.written(PAGE, lines(), VERSIONS)) == {
        "the probe": (99, 3.3),
        "RSS without a job": (11, 0.5),
    }


def test_all_rows_of_the_page_are_read() -> None:
    values = {row.key: {server: {0: 1.0, 1: 3.0} for server in (OURS, REFERENCE, FLOOR)} for row in ROWS}
    page = bench_table.written(PAGE, bench_table.summarize(values), VERSIONS)
    assert bench_table.committed(page).keys() == {row.title for row in ROWS}


@pytest.mark.parametrize(
    ("key", "values", "departs"),
    [
        ("probe", [99.0] * 9, False),
        ("probe", [117.0] * 9, False),
        ("probe", [120.0] * 9, True),
        ("probe", [60.0] * 9, True),
        ("probe", [200.0] * 4 + [99.0] * 5, False),
        ("idle Rss", [11264.0], False),
        ("idle Rss", [11600.0], True),
        ("idle Rss", [10900.0], True),
        ("QUIT", [1.0], True),
        ("silent CPU", [450.0], False),
        ("silent CPU", [550.0], True),
        ("meanwhile 256", [3.0], False),
        ("meanwhile 256", [30.0], True),
    ],
    ids=str,
)
def test_what_departs_from_the_page_is_named(key: str, values: list[float], departs: bool) -> None:
    """A ratio by a fifth, for sure; a count by more than the seed of the hashes moves it; a row that is new."""
    theirs = {"probe": 30.0, "idle Rss": 22528.0, "QUIT": 1.0, "silent CPU": 10.0, "meanwhile 256": 100.0}[key]
    more = found("silent CPU", [400.0], [10.0]) + found("meanwhile 256", [1.0], [100.0])
    page = bench_table.written(PAGE, lines() + bench_table.summarize(bench_table.collect(more)), VERSIONS)
    [line] = bench_table.summarize(bench_table.collect(found(key, values, [theirs] * len(values))))
    named = bench_table.departures(page, [line])
    assert len(named) == departs
    assert all(text.startswith(line.row.title) and part == line.row.part for text, part in named.items())


def test_the_report_is_json_with_every_value() -> None:
    samples = bench_table.collect(found("VERSION", [0.002, 0.004], [0.002, 0.002]))
    report = json.loads(json.dumps(bench_table.report(bench_table.summarize(samples), samples, {OURS: "1"})))
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
    with watched.Server([*DAEMON, "-f", "-M", "3"], environ, errors) as server:
        assert server.lines(1)[0].startswith(b"$VMGahpVersion")
        assert 0 < server.version() < server.since_start() * 1e6
        assert server.statuses(3, b"99", b"Stopped") > 0
        assert server.block(ad, piecewise=False) > 0
        assert server.block(ad, piecewise=True) > 0
        taken, vm_id = server.result(b"CONDOR_VM_START", 1, b"simulated")
        assert taken > 0
        assert vm_id == b"1"
        assert server.statuses(3, vm_id, b"Running") > 0
        pids = watched.family([server], b"there is no such process")
        assert server.pid in pids
        memory = watched.memory(pids)
        assert memory["Rss"] >= memory["Pss"] >= memory["Anonymous"] > 1000
        assert watched.work(pids)[0] > 0
        [(unit, count)] = watched.counted(server.pid, server.version, 5)
        assert unit in ("instructions", "calls")
        assert count > 0
        taken, words, versions = server.result_beside_versions(b"CONDOR_VM_SUSPEND", 2, vm_id)
        assert taken > 0
        assert words == b"NULL"
        assert versions
        assert server.quit() > 0


def test_a_server_without_a_counter_has_its_calls_counted(scratch: Path, tmp_path: Path) -> None:
    with watched.Server([*DAEMON, "-f", "-M", "3"], environment("simulated", scratch), str(tmp_path / "err")) as server:
        server.lines(1)
        server.version()
        calls = watched.Calls(server.pid)
        before = calls.read()
        server.version()
        assert calls.read() - before >= 2


def test_the_floor_answers_as_a_server_does(scratch: Path, tmp_path: Path) -> None:
    template = tmp_path / "domain.xml"
    template.write_text(bench.DOMAIN_XML)
    floor = [sys.executable, "-I", "-S", str(Path(bench.__file__).with_name("floor.py")), "/nowhere", str(template)]
    ad = [line.encode() for line in simulated_ad(scratch)]
    with watched.Server(floor, environment("kvm", scratch), str(tmp_path / "errors")) as server:
        assert server.lines(1)[0].startswith(b"$VMGahpVersion")
        assert server.version() > 0
        assert server.statuses(3, b"99", b"Stopped") > 0
        assert server.block(ad, piecewise=True) > 0
        assert server.quit() > 0


def test_an_answer_that_is_none_ends_the_measurement(scratch: Path, tmp_path: Path) -> None:
    environ = environment("simulated", scratch)
    with watched.Server([*DAEMON, "-f", "-M", "3"], environ, str(tmp_path / "errors")) as server:
        server.lines(1)
        with pytest.raises(ValueError, match="CONDOR_VM_START"):
            server.result(b"CONDOR_VM_START", 1, b"xen")
    with watched.Server(["/bin/true"], environ, str(tmp_path / "errors")) as server, pytest.raises(EOFError):
        server.lines(1)
