"""Backing chains, looked at with real qemu-img as the job's user."""

import os
import subprocess
from pathlib import Path

import pytest

from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.images.backing import BackingFile, backing_chain

pytestmark = pytest.mark.libvirt


def create(path: Path, *options: str, image_format: str = "qcow2") -> Path:
    command = ["qemu-img", "create", "-q", "-f", image_format, *options, str(path)]
    subprocess.run([*command, "1M"] if "-u" in options or "-b" not in options else command, check=True)
    if os.getuid() == 0:
        status = path.parent.stat()
        os.chown(path, status.st_uid, status.st_gid)
    return path


def refused(path: Path, user: Identity, image_format: str = "qcow2") -> errors.JobFault:
    with pytest.raises(errors.JobFault) as raised:
        backing_chain(str(path), image_format, user)
    return raised.value


def test_a_raw_image_is_not_looked_into(user: Identity) -> None:
    assert backing_chain("/nowhere", "raw", user) == ()


def test_an_image_without_backing(scratch: Path, user: Identity) -> None:
    assert backing_chain(str(create(scratch / "a")), "qcow2", user) == ()


def test_the_nearest_layer_comes_first(scratch: Path, user: Identity) -> None:
    base = create(scratch / "base", image_format="raw")
    middle = create(scratch / "middle", "-b", str(base), "-F", "raw")
    top = create(scratch / "top", "-b", "middle", "-F", "qcow2")
    assert backing_chain(str(top), "qcow2", user) == (BackingFile(str(middle), "qcow2"), BackingFile(str(base), "raw"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can have a file that the job's user cannot read")
def test_a_file_of_the_hosts_is_not_a_backing_file(scratch: Path, user: Identity) -> None:
    top = create(scratch / "top", "-u", "-b", "/etc/shadow", "-F", "raw")
    fault = refused(top, user)
    assert fault.code == errors.INVALID_DISK_PARAM
    assert "Permission denied" in fault.problem


@pytest.mark.parametrize("backing", ["nbd://127.0.0.1:1/x", 'json:{"driver":"null-co"}'])
def test_a_backing_file_that_is_no_file_is_refused(scratch: Path, user: Identity, backing: str) -> None:
    refused(create(scratch / "top", "-u", "-b", backing, "-F", "raw"), user)


def test_data_in_another_file_is_refused(scratch: Path, user: Identity) -> None:
    top = create(scratch / "top", "-o", f"data_file={scratch}/data,data_file_raw=on")
    if os.getuid() == 0:
        os.chown(scratch / "data", user.uid, user.gid)
    assert "another file" in refused(top, user).problem


def test_a_damaged_image_is_a_bad_image(scratch: Path, user: Identity) -> None:
    top = create(scratch / "top")
    top.write_bytes(b"QFI\xfb" + bytes(100))
    assert refused(top, user).code == errors.BAD_IMAGE


def test_the_wrong_format_is_a_bad_image(scratch: Path, user: Identity) -> None:
    assert refused(create(scratch / "top", image_format="raw"), user).code == errors.BAD_IMAGE
