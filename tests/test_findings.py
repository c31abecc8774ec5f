"""Checks run side by side, and what a finding is made of."""

import threading
from time import monotonic
from unittest.mock import Mock

import pytest

from vmgahp import errors, findings
from vmgahp.findings import BAD, OFF, OK, UNKNOWN, Finding


def test_checks_run_at_the_same_time() -> None:
    """Each waits for the other; one after the other they would never end."""
    met = threading.Barrier(2, timeout=10)
    outcomes = findings.side_by_side({"one": met.wait, "two": met.wait}, monotonic() + 20)
    assert sorted(str(outcome) for outcome in outcomes.values()) == ["0", "1"]


def test_one_that_has_not_ended_in_time_does_not_work_and_keeps_nobody_waiting() -> None:
    never = threading.Event()
    outcomes = findings.side_by_side({"slow": never.wait, "quick": lambda: "here"}, monotonic() + 2)
    assert outcomes["quick"] == "here"
    assert isinstance(outcomes["slow"], errors.MachineFault)
    assert "had not ended" in outcomes["slow"].problem
    never.set()


def test_one_that_no_thread_can_make_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Thread.start

    def start_all_but_one(thread: threading.Thread) -> None:
        if "second" in thread.name:
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start_all_but_one)
    outcomes = findings.side_by_side({"first": lambda: 1, "second": lambda: 2}, monotonic() + 20)
    assert outcomes["first"] == 1
    assert isinstance(outcomes["second"], errors.MachineFault)


def test_a_fault_is_an_outcome_and_so_is_a_bug() -> None:
    fault = errors.MachineFault("It is broken.", "fix it.")
    outcomes = findings.side_by_side({"broken": Mock(side_effect=fault), "bug": lambda: 1 // 0}, monotonic() + 10)
    assert outcomes["broken"] is fault
    assert isinstance(outcomes["bug"], errors.HypervisorFault)
    assert "ZeroDivisionError" in outcomes["bug"].problem


def test_a_check_is_waited_for_when_it_is_needed_and_one_that_hangs_delays_no_other() -> None:
    never = threading.Event()
    checks = findings.Checks(monotonic() + 60)
    checks.begin("hanging", never.wait)
    checks.begin("first", lambda: 1)
    assert checks.outcome("first") == 1
    checks.begin("second", lambda: 2)
    assert checks.outcome("second") == 2
    assert isinstance(checks.outcome("hanging", monotonic()), findings.Late)
    never.set()
    assert isinstance(checks.outcome("hanging"), findings.Late), "it stays what it was said to be"
    assert checks.outcome("never begun") is None


def test_judging_and_that_the_first_bad_finding_is_the_one() -> None:
    fault = errors.MachineFault("It is broken.", "fix it.")
    assert findings.judge("it", "what", fault, "good") == Finding("it", BAD, "what", "It is broken.", "fix it.")
    assert findings.judge("it", "what", fault, "good", OFF).verdict == OFF
    assert findings.judge("it", "what", 7, lambda: "seven") == Finding("it", OK, "what", "seven")

    def finding(name: str, verdict: str) -> Finding:
        return Finding(name, verdict, "", "")

    found = [finding("a", OK), finding("b", OFF), finding("c", BAD), finding("d", BAD)]
    assert findings.first_bad(found) == found[2]
    assert findings.first_bad(found[:2]) is None


def test_findings_are_sorted_and_a_failure_names_its_cause_also_in_a_circle() -> None:
    found = [
        Finding("network nat", OFF, "", ""), Finding("cpu", findings.UNKNOWN, "", ""),
        Finding("a driver's own", OK, "", ""), Finding("kvm", BAD, "", ""), Finding("libvirt", OFF, "", ""),
        Finding("firmware", BAD, "", "", because="cpu"),
    ]  # fmt: skip
    causes = {one.check: one.because for one in findings.explained(found)}
    assert list(causes) == ["a driver's own", "libvirt", "kvm", "cpu", "network nat", "firmware"]
    assert causes["cpu"] == causes["firmware"] == "kvm", "the first cause of all"
    assert not causes["network nat"], "what is not offered explains no failure but one that is not known"
    worse = [one._replace(verdict=BAD) if one.check == "libvirt" else one for one in found]
    assert {one.because for one in findings.explained(worse) if one.verdict != OK} == {"", "libvirt"}
    # As for an ordinary user, to whom the check of root itself says that it needs root.
    of_root = Finding("root", UNKNOWN, "it", "Only root can see it.", "", because="root")
    other = Finding("libvirt", UNKNOWN, "it", "Only root can see it.", "", because="root")
    explained = findings.explained([other, of_root])
    assert [(one.check, one.because) for one in explained] == [("root", ""), ("libvirt", "root")]
