"""VMs of one name: two schedds may give one user the same cluster and process."""

import contextlib
import errno
import os
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree as etree

import libvirt
import pytest

from tests.drivers.support import TEST_URI, AnyHypervisor
from vmgahp import lifecycle
from vmgahp.drivers.base import Machine
from vmgahp.drivers.libvirt.link import domains
from vmgahp.host.runtime_dir import claim, is_claimed, remove, runtime_dir
from vmgahp.job.ad import JobAd, quote


def names(prefix: str) -> list[str]:
    with contextlib.closing(libvirt.open(TEST_URI)) as connection:
        return sorted(each.name() for each in connection.listAllDomains() if each.name().startswith(prefix))


def another(subject: AnyHypervisor, job: JobAd) -> Machine:
    """A VM of the same name, in another scratch directory."""
    elsewhere = subject.job(2)
    return subject.driver().start(subject.changed(job, VM_WORKING_DIR=quote(elsewhere.working_dir())))


def test_the_second_start_leaves_the_first_ones_guest_alone(subject: AnyHypervisor) -> None:
    job = subject.job(1)
    name = job.vm_name()
    first = subject.driver().start(job)
    second = another(subject, job)
    assert second.name.startswith(f"{name}_")
    assert names(name) == [name, second.name]
    second.destroy()
    assert first.status().state is lifecycle.RUNNING


def test_what_is_left_of_a_server_that_died_elsewhere_is_cleared(subject: AnyHypervisor) -> None:
    job = subject.job(1)
    first = subject.driver().start(job)
    for action in first.resources.at_end:  # type: ignore[attr-defined]
        action()  # as if its server had died: nobody looks after it
    second = another(subject, job)
    assert names(job.vm_name()) == [second.name] == [job.vm_name()]


def test_the_kill_mode_spares_those_that_a_server_looks_after(subject: AnyHypervisor) -> None:
    """The startd knows their common name only, and one starter has vanished."""
    job = subject.job(1)
    name = job.vm_name()
    subject.driver().start(job)
    second = another(subject, job)
    assert not subject.driver().kill(name)
    assert names(name) == [name, second.name]
    for action in second.resources.at_end:  # type: ignore[attr-defined]
        action()
    assert subject.driver().kill(name)
    assert names(name) == [name]
    assert subject.driver().kill(name), "alone it is the one that is meant"
    assert names(name) == []


@pytest.mark.parametrize("how", ["start", "kill"])
def test_a_plain_guest_of_a_second_look_goes_with_its_server(
    subject: AnyHypervisor, scratch: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(domains, "undefine", lambda domain: domain.undefine())  # the test hypervisor knows no flag
    lives, left = ("00000000-1111-2222-3333-000000000001", "00000000-1111-2222-3333-000000000002")
    place = claim(lives)
    with contextlib.closing(libvirt.open(TEST_URI)) as connection:
        for uuid in (lives, left):
            domain = etree.fromstring(
                f"<domain type='test'><name>{domains.LOOK}{uuid}</name><uuid>{uuid}</uuid><memory>1</memory>"
                f"<description>{scratch}</description><os><type>hvm</type></os></domain>"
            )
            domains.mark(domain)
            connection.defineXML(etree.tostring(domain, encoding="unicode"))
        if how == "kill":
            subject.driver().kill("nobody")
        else:
            subject.driver().start(subject.job(1)).destroy()
        assert names(domains.LOOK) == [f"{domains.LOOK}{lives}"]
        remove(place)
        subject.driver().kill("nobody")
        assert names(domains.LOOK) == []


def test_a_claim_is_seen_until_it_is_given_up_or_its_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = "00000000-1111-2222-3333-444444444444"
    assert not is_claimed(uuid)
    place = claim(uuid)
    try:
        assert is_claimed(uuid)
        with monkeypatch.context() as gone:
            gone.setattr("vmgahp.host.proc.birth", lambda _pid: "1")
            assert not is_claimed(uuid)
        assert is_claimed(uuid)
    finally:
        remove(place)
    assert not is_claimed(uuid)
    assert not Path(place).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_nobody_claims_a_vm_for_another_user(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
    uuid = "00000000-1111-2222-3333-666666666666"
    monkeypatch.setattr("vmgahp.host.runtime_dir._bases", lambda: [str(scratch)])
    place = Path(runtime_dir(str(scratch)))
    (place / uuid).touch()
    assert is_claimed(uuid)
    os.chown(place / uuid, 54321, 54321)
    assert not is_claimed(uuid)
    odd = scratch / "vmgahp-²-1-0"  # a digit to str.isdigit(), and to nobody else
    odd.mkdir()
    (odd / uuid).touch()
    assert not is_claimed(uuid)


def test_a_vm_starts_where_nothing_can_be_claimed(subject: AnyHypervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("vmgahp.host.runtime_dir.claim", full)
    assert subject.driver().start(subject.job(1)).status().state is lifecycle.RUNNING


def test_the_kill_mode_takes_the_directory_that_the_scratch_directory_lies_in(subject: AnyHypervisor) -> None:
    """It is what a startd names, since starters make the one in the other."""
    job = subject.job(1)
    outer = Path(job.working_dir())
    files = list(outer.iterdir())
    inner = outer / "scratch"
    inner.mkdir()
    for file in files:
        file.rename(inner / file.name)
    subject.driver().start(subject.changed(job, VM_WORKING_DIR=quote(str(inner))))
    assert not subject.driver().kill(f"{outer}2")
    assert subject.driver().kill(str(outer))
    assert names(job.vm_name()) == []
