"""Backing chains, looked at with real qemu-img as the job's user."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import jobs
from vmgahp import errors
from vmgahp.host.job_user import Identity
from vmgahp.images.backing import BackingFile, backing_chain

pytestmark = pytest.mark.libvirt


def create(path: Path, *options: str, image_format: str = "qcow2") -> Path:
    command = ["qemu-img", "create", "-q", "-f", image_format, *options, str(path)]
    subprocess.run([*command, "1M"] if "-u" in options or "-b" not in options else command, check=True)
    jobs.own(path.parent, path)
    return path


def refused(path: Path, user: Identity) -> errors.JobFault:
    with pytest.raises(errors.JobFault) as raised:
        backing_chain(str(path), "qcow2", user)
    return raised.value


def test_an_image_without_backing_has_no_chain_and_a_raw_one_is_not_looked_into(scratch: Path, user: Identity) -> None:
    assert backing_chain("/nowhere", "raw", user) == ()
    assert backing_chain(str(create(scratch / "a")), "qcow2", user) == ()


def test_the_nearest_layer_comes_first(scratch: Path, user: Identity) -> None:
    base = create(scratch / "base", image_format="raw")
    middle = create(scratch / "middle", "-b", str(base), "-F", "raw")
    top = create(scratch / "top", "-b", "middle", "-F", "qcow2")
    assert backing_chain(str(top), "qcow2", user) == (BackingFile(str(middle), "qcow2"), BackingFile(str(base), "raw"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can have a file that the job's user cannot read")
def test_a_file_of_the_hosts_is_not_a_backing_file(scratch: Path, user: Identity) -> None:
    fault = refused(create(scratch / "top", "-u", "-b", "/etc/shadow", "-F", "raw"), user)
    assert fault.code == errors.INVALID_DISK_PARAM
    assert "Permission denied" in fault.problem


@pytest.mark.parametrize("backing", ["nbd://127.0.0.1:1/x", 'json:{"driver":"null-co"}'])
def test_a_backing_file_that_is_no_file_is_refused(scratch: Path, user: Identity, backing: str) -> None:
    refused(create(scratch / "top", "-u", "-b", backing, "-F", "raw"), user)


def test_data_in_another_file_is_refused(scratch: Path, user: Identity) -> None:
    top = create(scratch / "top", "-o", f"data_file={scratch}/data,data_file_raw=on")
    jobs.own(scratch, scratch / "data")
    assert "another file" in refused(top, user).problem


def test_a_damaged_image_and_one_of_another_format_are_bad_images(scratch: Path, user: Identity) -> None:
    damaged = create(scratch / "damaged")
    damaged.write_bytes(b"QFI\xfb" + bytes(100))
    for bad in (damaged, create(scratch / "raw", image_format="raw")):
        assert refused(bad, user).code == errors.BAD_IMAGE
