"""The report: what a vm_metrics.jsonl says, made to a page and a picture; and what strangers may write into one."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lxml import etree

from tests.commands.support import absent
from vmgahp import cli
from vmgahp.commands import page as units
from vmgahp.commands.report import MOST_EVENTS, MOST_POINTS, Story, page, read_story
from vmgahp.metrics.file import LONGEST_LINE, NAME

BEGIN = 1_795_000_000.0


def event(after: float, what: str, state: str = "", /, **more: object) -> dict[str, object]:
    return {"time": BEGIN + after, "event": what} | ({"state": state} if state else {}) | more


def sample(after: float, cpu: float, written: int = 0, state: str = "Running", **more: object) -> dict[str, object]:
    line: dict[str, object] = {"time": BEGIN + after, "state": state, "cpu_seconds": cpu, "vcpus": 2}
    line |= {"memory_kib": 65536, "max_memory_kib": 65536, "network": {}}
    return line | {"block": {"vda": {"read_bytes": 0, "write_bytes": written}}} | more


LIFE = [
    event(0, "start", "Running", seconds=2.0, name="alice_lab_7.0", pid=4711),
    sample(0, 0.0),
    sample(10, 10.0, 10 << 20),
    sample(20, 30.0, 10 << 20),
    event(25, "suspend", "Suspended", seconds=4.0, bytes=5 << 20),
    event(65, "resume", "Running", seconds=1.0),
    sample(66, 30.0, 10 << 20),
    sample(76, 35.0, 30 << 20),
    event(80, "checkpoint", "Checkpointed", seconds=3.0, bytes=6 << 20),
    event(90, "end", "Stopped", reason="the server has ended: QUIT received"),
]


def write(directory: Path, lines: "list[dict[str, object]]", more: bytes = b"") -> Path:
    path = directory / NAME
    path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + more)
    return path


def story_of(directory: Path, lines: "list[dict[str, object]]") -> Story:
    return read_story(str(write(directory, lines)))


def report(path: Path) -> Path:
    """The page that the command makes."""
    made = path / "out.html" if path.is_dir() else path.with_name("out.html")
    assert cli.main(["vmgahp", "report", str(path), "-o", str(made)]) == 0
    return made


def text_of(made: Path) -> str:
    return " ".join(" ".join(etree.parse(str(made), etree.HTMLParser()).getroot().itertext()).split())


# What a file says


def test_states_one_after_another_and_a_vm_that_vanished_ran_until_it_was_last_seen(tmp_path: Path) -> None:
    found = story_of(tmp_path, LIFE).spans
    assert [(span.state, span.begin - BEGIN, span.end - BEGIN) for span in found] == [
        ("Busy", -2, 0), ("Running", 0, 21), ("Busy", 21, 25), ("Suspended", 25, 64), ("Busy", 64, 65),
        ("Running", 65, 77), ("Busy", 77, 80), ("Checkpointed", 80, 90),
    ]  # fmt: skip
    later = [event(1000, "start", "Running", seconds=1.0), sample(1010, 1.0)]
    found = story_of(tmp_path, LIFE[:4] + later).spans
    assert [(span.state, span.begin - BEGIN, span.end - BEGIN) for span in found] == [
        ("Busy", -2, 0), ("Running", 0, 20), ("Busy", 999, 1000), ("Running", 1000, 1010),
    ]  # fmt: skip


def test_a_program_divides_the_time_in_which_its_guest_runs(tmp_path: Path) -> None:
    moments = {20: "ready", 21: "started", 50: "ended", 52: "taken"}
    told = [event(after, "program", "Running", reason=stage) for after, stage in moments.items()]
    saved = [event(30, "checkpoint", "Checkpointed", seconds=2.0), event(35, "end", "Stopped")]
    saved.append(event(40, "start", "Running", seconds=3.0))
    lines = [*LIFE[:1], sample(10, 1.0), *told[:2], *saved, sample(45, 3.0), *told[2:], event(53, "end", "Stopped")]
    found = story_of(tmp_path, lines).spans
    assert [(span.state, span.begin - BEGIN, span.end - BEGIN) for span in found] == [
        ("Busy", -2, 0), ("Booting", 0, 21), ("Program", 21, 28), ("Busy", 28, 30), ("Checkpointed", 30, 35),
        ("Busy", 37, 40), ("Program", 40, 50), ("Ending", 50, 53),
    ]  # fmt: skip
    assert absent(text_of(report(tmp_path)), "Booting 21.0 s", "The program runs 17.0 s", "power off 3.0 s") == []


def test_rates_with_a_gap_where_nobody_looked_or_nothing_ran_however_short(tmp_path: Path) -> None:
    told = story_of(tmp_path, LIFE)
    rates = told.rates()
    cpu = [(rate.begin - BEGIN, rate.end - BEGIN, round(rate.value, 3)) for rate in rates["cpu"]]
    assert cpu == [(0, 10, 50.0), (10, 20, 100.0), (66, 76, 25.0)], "per cent of two vCPUs"
    assert [rate.value for rate in rates["written"]] == [1 << 20, 0, 2 << 20]
    assert told.totals() == ({"vda": (0, 30 << 20)}, {})
    rates = story_of(tmp_path, [*LIFE[:4], sample(500, 40.0), sample(510, 41.0)]).rates()
    assert [rate.begin - BEGIN for rate in rates["cpu"]] == [0, 10, 500]
    short = [event(21, "suspend", "Suspended"), event(23, "resume", "Running"), sample(24, 31.0), sample(34, 36.0)]
    rates = story_of(tmp_path, LIFE[:4] + short).rates()
    assert [(rate.begin - BEGIN, rate.end - BEGIN) for rate in rates["cpu"]] == [(0, 10), (10, 20), (24, 34)]


def test_counters_that_go_down_make_no_negative_rate_and_a_disk_that_was_left_out_makes_no_peak(tmp_path: Path) -> None:
    rates = story_of(tmp_path, [sample(0, 50.0, 100), sample(10, 60.0, 200), sample(20, 5.0, 30)]).rates()
    assert [rate.value for rate in rates["written"]] == [10, 0]
    assert [rate.value for rate in rates["cpu"]] == [50, 0]
    lines = [sample(0, 1.0, 5 << 30), sample(10, 2.0, block={"vda": {}}), sample(20, 3.0, 5 << 30)]
    told = story_of(tmp_path, lines)
    assert [rate.value for rate in told.rates()["written"]] == [0, 0]
    assert told.totals()[0]["vda"][1] == 5 << 30


def test_a_long_life_is_thinned_out_and_its_totals_are_not(tmp_path: Path) -> None:
    told = story_of(tmp_path, [sample(number * 60, number * 30.0, number << 20) for number in range(5_000)])
    cpu = told.rates()["cpu"]
    assert MOST_POINTS / 2 < len(cpu) < 2 * MOST_POINTS
    assert {round(rate.value, 6) for rate in cpu} == {25.0}
    assert told.totals()[0]["vda"][1] == 4_999 << 20


# What comes of it


def test_the_page_says_what_happened_and_needs_nothing_else(tmp_path, monkeypatch, capsys):
    write(tmp_path, LIFE)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["vmgahp", "report"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    text = text_of(tmp_path / "report.html")
    words = ("alice_lab_7.0", "Suspended to disk", "6.0 MiB", "the server has ended: QUIT received", "CPU time 35.0 s")
    assert absent(text, *words) == []
    content = (tmp_path / "report.html").read_text()
    for bad in ("<script", "http://", "https://", "url(", "@import", "src="):
        assert bad not in content.replace(page.SVG, ""), bad
    page_of = etree.parse(str(tmp_path / "report.html"), etree.HTMLParser())
    assert len([row for row in page_of.xpath("//table[last()]/tbody/tr") if "".join(row.itertext())]) >= 5
    assert page_of.xpath("string(//*[local-name()='svg']/@role)") == "img"
    described = page_of.xpath("string(//*[local-name()='svg']/@aria-label)")
    assert absent(described, "states", "CPU", "Memory", "Disks", "Network") == ["Network"], "there is no NIC"
    states = page_of.xpath("//*[local-name()='rect']/@class")
    assert (states.count("Running"), states.count("Suspended")) == (2, 1)
    assert absent(text, "checkpoint, 6.0 MiB in 3.0 s", "100 %", "MiB/s", "since 20") == []


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ('{"exit_code": 3, "ended_by": "powered off"}', "How it ended powered off The guest's exit code 3"),
        ('{"exit_code": null, "ended_by": "crashed"}', "How it ended crashed"),
        ('{"exit_code": true, "ended_by": ["<script>"]}', ""),
        ("[" * 60_000, ""),
    ],
)
def test_how_it_ended(tmp_path: Path, content: str, shown: str) -> None:
    write(tmp_path, LIFE)
    (tmp_path / "vm_exit.json").write_text(content)
    text = text_of(report(tmp_path))
    assert shown in text
    assert ("How it ended" in text) == bool(shown)
    assert ("exit code" in text) == ("exit code" in shown)


def test_a_vm_that_never_started_says_why_and_has_no_picture(tmp_path: Path) -> None:
    error = "VMGAHP_ERR_BAD_IMAGE: guest.img is damaged. (job's owner)"
    made = report(write(tmp_path, [event(0, "start", seconds=1.4, name="alice_lab_7.0", error=error)]))
    text = text_of(made)
    assert f"The VM never started: {error}" in text
    assert absent(text, "CPU time", "Read from disks", "Checkpoints") == ["CPU time", "Read from disks", "Checkpoints"]
    assert "<svg" not in made.read_text()
    made = report(write(tmp_path, [event(0, "start", error=error), *LIFE]))
    assert "never started" not in text_of(made)


@pytest.mark.parametrize(
    ("lines", "charts"),
    [
        ([sample(0, 1.0)], None),
        ([event(0, "end", "Stopped")], None),
        ([event(0, "start", "Running", seconds=1.0), event(9, "stop", "Stopped")], []),
        ([sample(0, 0.0), sample(9, 0.0)], ["Memory"]),
        (
            [sample(0, 0.0), sample(9, 3.0, 1 << 20)],
            ["CPU, per cent of the VM's vCPUs", "Memory", "Disks, all together"],
        ),
    ],
)
def test_there_is_no_empty_chart(tmp_path: Path, lines: list[dict[str, object]], charts: list[str] | None) -> None:
    made = etree.parse(str(report(write(tmp_path, lines))), etree.HTMLParser())
    pictures = made.xpath("//*[local-name()='svg' and @role]")
    assert len(pictures) == (charts is not None)
    for picture in pictures:
        assert [head.text for head in picture.xpath(".//*[@class='head']")] == charts


def test_the_axis_counts_from_the_beginning(tmp_path: Path) -> None:
    told = story_of(tmp_path, [event(0, "start", "Running"), event(4 * 3600, "stop", "Stopped")])
    assert {"0", "1 h", "2 h", "3 h", "4 h"} <= set(page.picture(told, []).itertext())


MEASURED = """<body><script>
const pages = PAGES, widths = {};
for (const page of pages) {
  const frame = document.createElement("iframe");
  frame.width = 360; frame.height = 800; frame.src = page;
  frame.onload = () => {
    widths[page] = frame.contentDocument.documentElement.scrollWidth;
    if (Object.keys(widths).length == pages.length) document.title = JSON.stringify(widths);
  };
  document.body.append(frame);
}
</script>
"""


@pytest.mark.skipif(shutil.which("chromium-headless-shell") is None, reason="needs chromium-headless-shell")
def test_nothing_is_wider_than_a_phone(tmp_path: Path) -> None:
    long = "a-user-with-a-long-name_at-a-site-with-a-long-domain.example.org_123456789.12345"
    disks = {f"a-disk-of-a-long-name-in-the-xml-of-the-job-{number}": {"read_bytes": 1 << 50} for number in range(3)}
    pages = {
        "life": LIFE,
        "failed": [event(0, "start", name=long, error="VMGAHP_ERR_JOBCLASSAD_XEN_NO_ROOT_DEVICE_PARAM: " + "x" * 300)],
        "long": [event(0, "start", "Running", name=long), sample(9, 1e9, 1 << 50), sample(99, 2e9, block=disks)],
    }
    for name, lines in pages.items():
        report(write(tmp_path, lines)).rename(tmp_path / f"{name}.html")
    (tmp_path / "measure.html").write_text(MEASURED.replace("PAGES", json.dumps([f"{name}.html" for name in pages])))
    browser = ["chromium-headless-shell", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    browser += ["--allow-file-access-from-files", "--disable-web-security", "--virtual-time-budget=10000", "--dump-dom"]
    browser += [f"file://{tmp_path}/measure.html"]
    done = subprocess.run(browser, capture_output=True, text=True, timeout=100, check=True)
    found = re.search("<title>(.*)</title>", done.stdout)
    assert found, done.stderr
    widths = json.loads(found[1])
    assert sorted(widths) == ["failed.html", "life.html", "long.html"]
    assert max(widths.values()) <= 360, widths


def test_times_are_local_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        text = text_of(report(write(tmp_path, LIFE)))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert absent(text, "since 2026-11-18 16:36:38 (IST, UTC+0530)", "2026-11-18 16:38:10") == []


@pytest.mark.parametrize(
    ("shown", "figure", "text"),
    [
        (units.size, 1023, "1023 B"), (units.size, 1024, "1.0 KiB"), (units.size, 2**63, "8.0 EiB"),
        (units.duration, 0.04, "40 ms"), (units.duration, 59.96, "1 min"), (units.duration, 185, "3 min 5 s"),
        (units.duration, 7800, "2 h 10 min"), (units.duration, 90000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_sizes_and_durations(shown: Callable[[float], str], figure: float, text: str) -> None:
    assert shown(figure) == text


# Strangers


def test_what_a_job_writes_is_shown_and_never_acted_upon(tmp_path: Path) -> None:
    evil = "</svg></style><script>alert(1)</script>\x1b[31m\u202e\ud800\0"
    lines = [
        event(0, evil, evil, name=evil, reason=evil, error=evil, pid=-1, seconds=1e300),
        sample(1, 1.0, state=evil, block={evil: {"write_bytes": 5}}, network={evil: {"rx_bytes": 7}}),
        sample(2, 2.0, state=evil, block={evil: {"write_bytes": 9}}, network={evil: {"rx_bytes": 9}}),
    ]
    content = report(write(tmp_path, lines)).read_bytes()
    for bad in ("<script", "\x1b", "\u202e"):
        assert bad.encode() not in content


def test_nonsense_is_counted(tmp_path: Path) -> None:
    nonsense = b"\xff\n[]\n{}\n" + b"[" * 50_000 + b"\n" + b"x" * (3 * LONGEST_LINE) + b"\n"
    nonsense += b'{"time":1e400,"event":"x"}\n{"time":-1,"event":"x"}\n{"time":true,"cpu_seconds":1}\n'
    path = write(tmp_path, LIFE, nonsense)
    told = read_story(str(path))
    assert (len(told.events), len(told.samples), told.bad_lines) == (5, 5, 8)
    assert "8 lines of the file make no sense" in text_of(report(path))


def test_a_file_that_is_made_to_be_much_work_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    many: list[dict[str, object]] = []
    for number in range(2 * MOST_EVENTS):
        state = "Running" if number % 2 else "SoftSuspended"
        devices = {f"vd{number % 100}": {"read_bytes": number}}
        many.append(sample(number / 10, number, state=state, block=devices))
        if number % 100:
            many.append(event(number / 10, "start", "Running", name=f"a_{number}.0"))
    assert len(page.render(story_of(tmp_path, many))) < 3 << 20


def test_more_than_is_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmgahp.commands.report.MOST_EVENTS", 3)
    told = story_of(tmp_path, LIFE)
    assert (len(told.events), told.left_out) == (3, 2)
    assert b"too long" in page.render(told)


@pytest.mark.parametrize("line", [b"x\n", b"\n", b'{"time":1700000001,"cpu_seconds":1}\n'])
def test_a_file_of_many_lines_is_not_read_whole(tmp_path: Path, line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 million lines that make no sense took a minute and a half."""
    monkeypatch.setattr("vmgahp.commands.report.MOST_LINES", 1000)
    told = read_story(str(write(tmp_path, LIFE, line * 2000)))
    assert len(told.samples) + len(told.events) + told.bad_lines <= 1000
    assert told.left_out == 1
    assert b"too long" in page.render(told)


@pytest.mark.parametrize("kind", ["nothing", "fifo", "empty", "of another kind", "directory"])
def test_nothing_to_report_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = tmp_path / NAME
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty":
        path.write_text("\n\n")
    elif kind == "of another kind":
        path.write_text("root:x:0:0:root:/root:/bin/bash\n{}\n\x7fELF\0\n")
    elif kind == "directory":
        path.mkdir()
    assert cli.main(["vmgahp", "report", str(tmp_path), "-o", str(tmp_path / "out.html")]) == 1
    said = capsys.readouterr().err
    assert (said.startswith("vmgahp report: "), NAME in said) == (True, True)
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("words", [[], ["-o", "mine.html"]])
def test_a_link_in_a_jobs_directory_is_not_written_through(tmp_path, monkeypatch, capsys, words):
    """Root makes a report where the job can have put one."""
    victim = tmp_path / "victim"
    victim.write_text("root's")
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    write(tmp_path / "job", LIFE)
    name = words[-1] if words else "report.html"
    Path(name).symlink_to(victim)
    assert cli.main(["vmgahp", "report", *words]) == 1
    assert "not a regular file" in capsys.readouterr().err
    Path(name).unlink()
    Path(name).hardlink_to(victim)
    assert cli.main(["vmgahp", "report", *words]) == 0
    assert victim.read_text() == "root's"
    assert Path(name).stat().st_size > 1000
    assert sorted(os.listdir()) == sorted((NAME, name))
