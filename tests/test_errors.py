"""Whose fault an errno is."""

import errno
import os

import pytest

from vmgahp import errors

LACKING = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
    *(errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ETIMEDOUT, errno.ENXIO, errno.EREMOTEIO),
)
NAMED = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EINVAL, errno.EEXIST, errno.ENOTEMPTY, errno.ETXTBSY, errno.EFBIG, errno.EDQUOT),
)


@pytest.mark.parametrize("number", [*LACKING, *NAMED], ids=errno.errorcode.get)
def test_what_the_machine_lacks_is_perhaps_its_own_and_what_the_job_has_named_or_left_is_the_jobs(number: int) -> None:
    assert errors.is_perhaps_the_machines(OSError(number, os.strerror(number))) == (number in LACKING)


def test_an_error_without_a_number_is_the_jobs() -> None:
    assert not errors.is_perhaps_the_machines(OSError("as some libraries raise it"))
