"""Targets: files of strangers that people turn into jobs with ``vmgahp submit``, ads, URLs of images."""

import argparse
import io
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

from tests.fuzz.target import target
from vmgahp.commands.arguments import Parser
from vmgahp.commands.files import JobAd, parse_ad
from vmgahp.commands.submit import add_arguments, conversion, libvirt_xml
from vmgahp.commands.submit.report import SubmitError, Summary
from vmgahp.daemon import transfer_plugin
from vmgahp.errors import ClientFault, JobFault
from vmgahp.host.run import Finished

_PARSER = Parser()
add_arguments(_PARSER)

_ROOM = tempfile.TemporaryDirectory(prefix="vmgahp-fuzz-")
_VM = os.path.join(_ROOM.name, "vm")
"""What is read."""
_BESIDE = {"box-disk001.vmdk", "d1"}
"""Images that the samples name."""
for _name in _BESIDE:
    Path(_ROOM.name, _name).touch()


def _submitted(kind: str, data: bytes, *words: str) -> None:
    """A file with that in it, and whatever front end reads it."""
    with open(_VM, "wb") as file:
        file.write(data)
    options = _PARSER.parse_args([kind, _VM, "--dir", _ROOM.name, "--force", *words])
    _told(options, Summary(_VM), within=f"{_ROOM.name}/")
    os.unlink(_VM)
    assert set(os.listdir(_ROOM.name)) == _BESIDE


def _told(options: argparse.Namespace, summary: Summary, within: str) -> None:
    """What was given makes a submit file that the daemon takes, or it is refused in a sentence."""
    said = io.StringIO()
    with suppress(SubmitError):
        made = conversion.read(options, summary)
        assert all(disk.path.startswith(within) for disk in made.disks)
        text = conversion.written(options, made, summary)
        for line in text.splitlines():
            assert line.isprintable()
            assert "$(" not in line.replace("$(DOLLAR)", "")
        rehearsed = conversion.rehearse(text, summary)
        assert rehearsed is not None
        devices = [disk.device for disk in made.disks]
        assert [disk.device for disk in rehearsed.spec.disks if not disk.is_made] == devices
    summary.show(said)
    assert said.getvalue().replace("\n", "").isprintable()
    for made_file in summary.made:
        Path(made_file).write_bytes(b"") if os.path.basename(made_file) in _BESIDE else os.unlink(made_file)


@target
def submit_vmx(data: bytes) -> None:
    """A stranger's .vmx."""
    _submitted("vmx", data)


@target
def submit_box(data: bytes) -> None:
    """A stranger's Vagrant box."""
    _submitted("box", data, "--memory", "64", "--cpus", "1")


@target
def submit_ovf(data: bytes) -> None:
    """A stranger's OVF descriptor, or an archive with one."""
    _submitted("ovf", data)


@target
def submit_libvirt_xml(data: bytes) -> None:
    """A stranger's libvirt XML."""
    for words in ((), ("--as-is",)):
        _submitted("libvirt-xml", data, *words)


@target
def submit_virt_install(data: bytes) -> None:
    """What a virt-install prints, whose images may be anywhere."""
    with mock.patch.object(libvirt_xml, "run", return_value=Finished(0, data, b"")):
        _told(_PARSER.parse_args(["virt-install", "--dir", _ROOM.name, "--", "--import"]), Summary(), within="/")
    assert set(os.listdir(_ROOM.name)) == _BESIDE


@target
def submit_disk(data: bytes) -> None:
    """An image of whatever format."""
    for words in ((), ("--format", "raw", "--firmware", "uefi")):
        _submitted("disk", data, "--memory", "64", *words)


@target
def console_job_ad(data: bytes) -> None:
    """A text that somebody takes for a job ad."""
    with suppress(ClientFault, JobFault):
        assert all("\n" not in text for _, text in parse_ad(data.decode("utf-8", "replace")))


@target
def transfer_url(data: bytes) -> None:
    """What a job asks the file transfer plugin for, and what the plugin answers."""
    text = data.decode("utf-8", "surrogateescape")
    with suppress(transfer_plugin.TransferError):
        wanted = transfer_plugin.parse_url(text)
        assert wanted.base.startswith("/")
        assert "/" not in wanted.name
        assert wanted.name not in (".", "..")
    for said, read in ((transfer_plugin._old, JobAd.parse_line), (transfer_plugin._new, None)):
        line = f"TransferError = {said(text)}"
        assert "\n" not in line
        assert read is None or read(line) is not None
