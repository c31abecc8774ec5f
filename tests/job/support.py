"""Readings of job ads for the tests of what a job may ask for."""

import pytest

from tests.jobs import MACHINE, Files, ad
from vmgahp.errors import JobFault
from vmgahp.job.spec import JobSpec


def spec(settings=MACHINE, files=None, **changes):
    return JobSpec.from_ad(ad(**changes), settings, files or Files())


def refusal(word, *parts, settings=MACHINE, files=None, **changes):
    with pytest.raises(JobFault) as caught:
        spec(settings, files, **changes)
    assert caught.value.code == word
    assert caught.value.hint
    for part in parts:
        assert part in caught.value.problem
    return caught.value
