"""Targets: what comes back with a job, what guests and programs say, and the machine's own files."""

import io
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.fuzz.target import target
from vmgahp import errors
from vmgahp.checkpoint import manifest, memory_image
from vmgahp.commands import files as logs
from vmgahp.commands.report import page, read_from
from vmgahp.config import SETTINGS, Settings, sources
from vmgahp.domain import restore
from vmgahp.drivers.libvirt.life.save import LIBVIRT, XEN
from vmgahp.drivers.libvirt.link import domains
from vmgahp.drivers.script import protocol as script_protocol
from vmgahp.drivers.script.machine import KIND as SCRIPT
from vmgahp.drivers.vmrun.machine import KIND as VMRUN
from vmgahp.images import catalog, formats
from vmgahp.job.ad import JobAd
from vmgahp.lifecycle import RUNNING
from vmgahp.metrics import LARGEST, Metrics, Totals
from vmgahp.metrics.file import last_sample

OURS = (Path(__file__).parents[1] / "domain/golden/plain.xml").read_text()


@contextmanager
def _opened(data: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("fuzz")
    try:
        os.pwrite(descriptor, data, 0)
        yield descriptor
    finally:
        os.close(descriptor)


@target
def checkpoint_manifest(data: bytes) -> None:
    """A manifest of any driver is `Invalid` or what it was."""
    for kind in (LIBVIRT, XEN, VMRUN, SCRIPT):
        with suppress(manifest.Invalid):
            read = manifest.parse(kind, data)
            assert manifest.parse(kind, manifest.dump(kind, read))._replace(facts={}) == read._replace(facts={})
            assert not any(file.path.startswith("/") for file in read.files if file.transferred)


@target
def memory_image_head(data: bytes) -> None:
    """The head of a memory image is `Damaged` or has XML, of which no more is taken than the hardware."""
    texts = [data.decode("utf-8", "surrogateescape")]
    with _opened(data) as descriptor:
        with suppress(memory_image.Damaged):
            texts.append(memory_image.inspect(descriptor).xml)
        with suppress(memory_image.Damaged):
            memory_image.inspect_xen(descriptor)
    for text in texts:
        restore.macs(text)
        for reconcile in (restore.reconcile, restore.reconcile_xen):
            with suppress(restore.SavedMismatch):
                made = reconcile(text, OURS)
                assert "<name>alice_lab_7.3</name>" in made
                assert not any(word in made for word in ("<hostdev", "qemu:commandline", "<filesystem"))


@target
def image_head(data: bytes) -> None:
    """The head of a disk image, VMware's description of one."""
    text = data[:200].decode("utf-8", "replace")
    formats.looks_like(data)
    for form in formats.FORMATS.values():
        formats.names_files(form, data[: formats.HEADER])
        assert formats.unfit(form, data[: formats.HEADER]).isprintable()
    with suppress(formats.UnclearFormat):
        assert formats.image_format("disk.img", "", io.BytesIO(data)) == "raw"
    for name, said in (("disk.img", ""), (text, ""), ("disk.qcow2", ""), ("disk.img", text)):
        with suppress(formats.UnclearFormat):
            assert formats.proven_format(name, said, data) in (*formats.CONVERTIBLE.values(), "iso")
    with _opened(data) as descriptor, suppress(formats.VmdkError):
        read = formats.read_vmdk(descriptor)
        assert not any("/" in extent.file for extent in read.extents)
        with suppress(formats.VmdkError):
            named = formats.with_parent(read, "parent.vmdk")
            assert formats.parse_vmdk(named, read.offset, read.room).parent == "parent.vmdk" or not read.parent


@target
def metrics_file(data: bytes) -> None:
    """A file of metrics makes a report or none, and what an earlier life has used is a number."""
    line = Totals(last_sample(data)).sample(Metrics(RUNNING, 1.0, 2.0, block={"vda": {"read_bytes": 3}}))
    assert 0 <= line["cpu_seconds"] <= 2 * LARGEST  # type: ignore[operator]
    json.dumps(line, allow_nan=False)
    told = read_from(io.BytesIO(data))
    assert all(math.isfinite(number) for sample in told.samples for number in sample[2:7])
    if told.samples or told.events:
        assert b"<script" not in page.render(told)


@target
def settings(data: bytes) -> None:
    """A configuration is read, or what is wrong with it is told."""
    text = data.decode("utf-8", "surrogateescape")
    sources.Entries(sources.parse(text)).where()
    with suppress(errors.MachineFault):
        table, origin = sources.tables(text, "/etc/vmgahp.conf", {})
        if sum(value.count("$(") for value in table.values()) < 12:
            for name, value in table.items():
                sources.expand(value, table, origin[name])
        known = {row.name for row in SETTINGS}
        made = Settings({name: value for name, value in table.items() if name in known})
        for row in SETTINGS:
            for read in (made.integer, made.boolean, made.size, made.strings):
                with suppress(errors.MachineFault):
                    read(row.name)
    with suppress(errors.MachineFault):
        made = Settings({"VM_NETWORKING_TYPE": text, "VM_MEMORY": text, "VM_NETWORKING": "true"})
        made.networking_types()
        assert made.integer("VM_MEMORY") >= 0


@target
def image_catalog(data: bytes) -> None:
    """A catalog of images is read, or what is wrong with it is told."""
    with suppress(ValueError, RecursionError):
        for entry in catalog.parse("/etc/images.toml", data).entries.values():
            assert entry.path.startswith("/")


@target
def script_answer(data: bytes) -> None:
    """An answer of a hypervisor script is understood, or it is `Malformed`."""
    action, status = (data[0], data[1]) if len(data) > 1 else (0, 0)
    with suppress(script_protocol.Malformed):
        name = script_protocol.ACTIONS[action % len(script_protocol.ACTIONS)]
        answer = script_protocol.decode(name, data[2:], (0, 0, 0, 65, 69, 1, -9)[status % 7])
        assert answer.outcome in script_protocol.OUTCOMES
        ad = JobAd([("A", "1"), ("User", '"a@b"')])
        script_protocol.difference(ad, answer.attributes)
        script_protocol.changed(ad, answer.attributes).values()


@target
def log_lines(data: bytes) -> None:
    """The lines of a daemon's log are printable; QEMU's last words are one line of libvirt's log."""
    with _opened(data) as descriptor, tempfile.NamedTemporaryFile() as log:
        log.write(data)
        log.flush()
        assert all(text.isprintable() for _, text in logs.log_lines(log.name, 1 << 20))
        assert "\n" not in domains._search_log(f"/proc/self/fd/{descriptor}", b"5a4d1f5e")
