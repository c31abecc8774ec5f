"""Readings of job ads for the tests of what a job may ask for."""

import io
import tarfile

import pytest

from tests.jobs import MACHINE, Files, ad
from vmgahp.errors import JobFault
from vmgahp.job.look import find
from vmgahp.job.spec import JobSpec


def spec(settings=MACHINE, **changes):
    """What a job asks for; nothing is looked at."""
    return JobSpec.parse(ad(**changes), settings)


def found(settings=MACHINE, files=None, **changes):
    """What a job asks for, with its files found."""
    return find(spec(settings, **changes), settings, files or Files())


def refusal(word, *parts, settings=MACHINE, files=None, **changes):
    """The fault of a job that is refused as it is read or, with `files`, as its files are looked for."""
    with pytest.raises(JobFault) as caught:
        found(settings, files, **changes) if files else spec(settings, **changes)
    assert caught.value.code == word
    assert caught.value.hint
    for part in parts:
        assert part in caught.value.problem
    return caught.value


Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, content: bytes = b"", **fields: object) -> Entry:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Entry:
    return entry(name, type=kind, linkname=target)


def tar(*entries: Entry, form: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive of these entries."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()
