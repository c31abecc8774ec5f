"""Huge pages for guests: given where enough are free, and never waited for."""

import re
from pathlib import Path
from xml.etree import ElementTree as etree

import pytest

from tests.drivers.libvirt.support import Job, done, evict, running, started
from vmgahp.drivers.libvirt.life import usage
from vmgahp.host import proc

DOMAIN = "<domain><name>x</name><memory unit='MiB'>{memory}</memory>{more}<vcpu>1</vcpu></domain>"
MEMINFO = (
    "MemTotal: 9 kB\nHugePages_Total: 90\nHugePages_Free: {free}\nHugePages_Rsvd: {promised}\nHugepagesize: 2048 kB\n"
)


@pytest.fixture
def pages(tmp_path, monkeypatch):
    monkeypatch.setattr(proc, "MEMINFO", str(tmp_path / "meminfo"))
    return lambda free, promised=0: (tmp_path / "meminfo").write_text(MEMINFO.format(free=free, promised=promised))


def domain(memory=64, more=""):
    return DOMAIN.format(memory=memory, more=more)


def is_huge(xml):
    return etree.fromstring(xml).find("memoryBacking/hugepages") is not None


@pytest.mark.parametrize(
    ("memory", "free", "promised", "huge"),
    [
        (64, 32, 0, True), (64, 31, 0, False), (64, 40, 9, False), (63, 40, 0, False), (64, 0, 0, False),
        (0, 9, 0, False),
    ],
)  # fmt: skip
def test_a_guest_has_them_where_as_many_are_free_as_its_memory_takes(pages, memory, free, promised, huge):
    pages(free, promised)
    assert is_huge(usage.with_huge_pages(domain(memory))) == huge


def test_how_memory_is_backed_stays_as_it_is_said(pages):
    pages(90)
    shared = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"
    backing = etree.fromstring(usage.with_huge_pages(domain(more=shared))).find("memoryBacking")
    assert [element.tag for element in backing] == ["hugepages", "source", "access"]
    own = domain(more="<memoryBacking><hugepages><page size='1' unit='GiB'/></hugepages></memoryBacking>")
    assert usage.with_huge_pages(own) == own


def test_a_saved_vm_goes_on_without_those_that_others_have_taken(pages):
    pages(90)
    saved = usage.with_huge_pages(domain())
    assert is_huge(usage.without_taken_pages(saved))
    pages(3)
    assert not is_huge(usage.without_taken_pages(saved))
    assert usage.without_taken_pages(domain()) == domain()


@pytest.mark.libvirt
def test_a_vm_runs_with_huge_pages_or_without_and_goes_on_after_each_save(job: Job) -> None:
    """Which it is depends on the machine: with some set aside, and hugetlbfs mounted before libvirtd's start."""
    with running(job, "JobVMCheckpoint = true", VM_HUGEPAGES=True) as peer:
        before = _is_huge_now(job)
        done(peer, "SUSPEND", "RESUME")
        assert _is_huge_now(job) == before
        evict(peer)
    with running(job, "JobVMCheckpoint = true") as peer:
        assert not _is_huge_now(job)
        assert "continues from its saved memory" in peer.end_by(15)


@pytest.mark.libvirt
def test_a_vm_whose_pages_are_taken_when_it_starts_has_usual_ones(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at what is free and QEMU's start others take theirs."""
    pages = "<hugepages><page size='512' unit='GiB'/></hugepages>"
    huge = f"<memory unit='MiB'>64</memory><memoryBacking>{pages}</memoryBacking>"
    monkeypatch.setattr(usage, "with_huge_pages", lambda xml: re.sub("<memory .*</memory>", huge, xml))
    log: list[str] = []
    with started(job, log, VM_HUGEPAGES=True):
        assert not _is_huge_now(job)
        assert any("does without what others have taken meanwhile" in line for line in log)


def _is_huge_now(job: Job) -> bool:
    """By libvirt's word, and the kernel's where it is so."""
    live = job.domain()
    assert live is not None
    said = is_huge(live.XMLDesc())
    pid = Path(f"/run/libvirt/qemu/{live.name()}.pid")
    if said and pid.exists():
        status = Path(f"/proc/{pid.read_text().strip()}/status").read_text()
        assert int(re.findall(r"HugetlbPages:\s+(\d+)", status)[0]) > 0
    return said
