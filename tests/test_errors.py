"""Whose fault an errno is."""

import errno
import os

import pytest

from vmgahp import errors


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN], ids=errno.errorcode.get)
def test_what_the_process_lacks_is_the_machines_everywhere(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert errors.is_machines(error)
    assert errors.is_machines(error, in_scratch=False)


@pytest.mark.parametrize(
    "number",
    [errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ETIMEDOUT, errno.ENXIO, errno.EREMOTEIO],
    ids=errno.errorcode.get,
)
def test_a_file_system_that_fails_is_the_machines_unless_the_job_has_chosen_it(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert errors.is_machines(error)
    assert not errors.is_machines(error, in_scratch=False)


@pytest.mark.parametrize(
    "number",
    [
        *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.EINVAL, errno.EEXIST, errno.ENOTEMPTY, errno.ETXTBSY, errno.EFBIG, errno.EDQUOT),
    ],
    ids=errno.errorcode.get,
)
def test_what_the_job_has_named_or_left_there_is_the_jobs(number: int) -> None:
    assert not errors.is_machines(OSError(number, os.strerror(number)))


def test_an_error_without_a_number_is_the_jobs() -> None:
    assert not errors.is_machines(OSError("as some libraries raise it"))
