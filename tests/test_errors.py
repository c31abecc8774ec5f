"""Whose fault an errno is."""

import errno
import os

import pytest

from vmgahp import errors


@pytest.mark.parametrize(
    "number",
    [
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
        *(errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ETIMEDOUT, errno.ENXIO, errno.EREMOTEIO),
    ],
    ids=errno.errorcode.get,
)
def test_what_this_machine_or_its_file_system_lacks_is_perhaps_the_machines(number: int) -> None:
    assert errors.is_perhaps_the_machines(OSError(number, os.strerror(number)))


@pytest.mark.parametrize(
    "number",
    [
        *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.EINVAL, errno.EEXIST, errno.ENOTEMPTY, errno.ETXTBSY, errno.EFBIG, errno.EDQUOT),
    ],
    ids=errno.errorcode.get,
)
def test_what_the_job_has_named_or_left_there_is_the_jobs(number: int) -> None:
    assert not errors.is_perhaps_the_machines(OSError(number, os.strerror(number)))
    assert not errors.is_perhaps_the_machines(OSError("without a number, as some libraries raise it"))
