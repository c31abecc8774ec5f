"""Targets: files of strangers that people turn into jobs with ``vmgahp submit``, ads, URLs of images."""

import argparse
import io
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from tests.fuzz.target import target
from vmgahp.commands.console import job_ad as console_ad
from vmgahp.commands.submit import add_arguments, libvirt_xml, ovf, submit_file, vmx
from vmgahp.commands.submit.machine import Guest, name_devices
from vmgahp.commands.submit.summary import SubmitError, Summary
from vmgahp.daemon import transfer_plugin
from vmgahp.errors import ClientFault, JobFault

_PARSER = argparse.ArgumentParser()
add_arguments(_PARSER)

_ROOM = tempfile.TemporaryDirectory(prefix="vmgahp-fuzz-")
_OPTIONS = {
    kind: _PARSER.parse_args([kind, "vm", "--dir", _ROOM.name, "--force"]) for kind in ("vmx", "ovf", "libvirt-xml")
}
_BESIDE = {"box-disk001.vmdk", "d1"}
"""Images that the samples name."""
for _name in _BESIDE:
    Path(_ROOM.name, _name).touch()


def _submitted(front_end: ModuleType, kind: str, data: bytes) -> None:
    """A file is told of and makes a submit file of its own lines, or it is refused in a sentence."""
    path = os.path.join(_ROOM.name, "vm")
    with open(path, "wb") as file:
        file.write(data)
    options = _OPTIONS[kind]
    options.file = path
    summary, said = Summary(), io.StringIO()
    with suppress(SubmitError):
        made: Guest = front_end.machine(options, summary)
        assert all(disk.path.startswith(f"{_ROOM.name}/") for disk in made.disks)
        name_devices(made.disks)
        for line in submit_file.write(made, "kvm", summary, transfer=True).splitlines():
            assert line.isprintable()
            assert "$(" not in line.replace("$(DOLLAR)", "")
    summary.show(said)
    assert said.getvalue().replace("\n", "").isprintable()
    os.unlink(path)
    for made_file in summary.made:
        Path(made_file).write_bytes(b"") if os.path.basename(made_file) in _BESIDE else os.unlink(made_file)
    assert set(os.listdir(_ROOM.name)) == _BESIDE


@target
def submit_vmx(data: bytes) -> None:
    """A stranger's .vmx."""
    _submitted(vmx, "vmx", data)


@target
def submit_ovf(data: bytes) -> None:
    """A stranger's OVF descriptor, or an archive with one."""
    _submitted(ovf, "ovf", data)


@target
def submit_libvirt_xml(data: bytes) -> None:
    """A stranger's libvirt XML."""
    _submitted(libvirt_xml, "libvirt-xml", data)


@target
def console_job_ad(data: bytes) -> None:
    """A text that somebody takes for a job ad."""
    with suppress(ClientFault, JobFault):
        pairs, skipped = console_ad.parse(data.decode("utf-8", "replace"))
        assert skipped >= 0
        assert all("\n" not in text for _, text in pairs)


@target
def transfer_url(data: bytes) -> None:
    """What a job asks the file transfer plugin for, and what the plugin answers."""
    text = data.decode("utf-8", "surrogateescape")
    with suppress(transfer_plugin.TransferError):
        wanted = transfer_plugin.parse_url(text)
        assert wanted.base.startswith("/")
        assert "/" not in wanted.name
        assert wanted.name not in (".", "..")
    for said, read in ((transfer_plugin._old, console_ad.JobAd.parse_line), (transfer_plugin._new, None)):
        line = f"TransferError = {said(text)}"
        assert "\n" not in line
        assert read is None or read(line) is not None
