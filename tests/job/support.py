"""Readings of job ads for the tests of what a job may ask for."""

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
