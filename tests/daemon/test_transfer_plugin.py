"""The file transfer plugin, called as HTCondor calls it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import classad2
import pytest

from tests import REPOSITORY, jobs
from tests.conftest import JOB_UID
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.daemon import transfer_plugin
from vmgahp.daemon.transfer_plugin import TransferError, fetch, parse_url

LAUNCHER = REPOSITORY / "launchers" / "vmgahp-image-plugin"
pytestmark = [pytest.mark.qemu, pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")]


@pytest.fixture
def images(scratch):
    """A directory of the administrator's, with two images."""
    directory = scratch.parent / "images"
    directory.mkdir()
    directory.chmod(0o755)
    qemu_img("create", "-q", "-f", "qcow2", directory / "base.qcow2", "4M")
    (directory / "plain.img").write_bytes(bytes(1 << 20))
    return directory


@pytest.fixture
def settings(images):
    return Settings({"VM_IMAGE_DIRS": str(images)})


def qemu_img(*words):
    return subprocess.run(["qemu-img", *map(str, words)], check=True, capture_output=True, text=True).stdout


def info(path):
    return json.loads(qemu_img("info", "--output=json", path))


def call(images, scratch, *words, **more):
    """The launcher, as the job's user, in the scratch directory."""
    environ = {"PATH": os.environ["PATH"], "VMGAHP_CONFIG": str(images.parent / "conf"), **more}
    (images.parent / "conf").write_text(f"VM_IMAGE_DIRS = {images}\n")
    command = [sys.executable, str(LAUNCHER), *map(str, words)]
    if os.getuid() == 0:
        # The Python of the tests may be in a home directory: the user may read it, and can write nothing more.
        read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        command = ["setpriv", f"--reuid={JOB_UID}", f"--regid={JOB_UID}", "--clear-groups", *read, *command]
    return subprocess.run(command, cwd=scratch, env=environ, capture_output=True, text=True, check=False)


def call_many(images, scratch, *more):
    """The launcher with the list of files in the scratch directory: how it ended, and the ads of its results."""
    done = call(images, scratch, "-infile", scratch / ".in", "-outfile", scratch / ".out", *more)
    return done.returncode, list(classad2.parseAds((scratch / ".out").read_text()))


def refused(said, url, scratch, settings, fault=TransferError):
    with pytest.raises(fault, match=said):
        fetch(url, f"{scratch}/disk", settings)


# --- URLs


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("nfs:///srv/a.qcow2:disk.qcow2", ("/srv/a.qcow2", "disk.qcow2", "")),
        ("NFS:////srv/a.qcow2", ("/srv/a.qcow2", "a.qcow2", "")),
        ("nfs:/srv/a.img:disk.img:qcow2", ("/srv/a.img", "disk.img", "qcow2")),
        ("vmimage:///srv/a%20b%2Cc%3Ad.raw:disk", ("/srv/a b,c:d.raw", "disk", "")),
        ("nfs:///srv/b%C3%A4r.raw:disk", ("/srv/bär.raw", "disk", "")),
    ],
)
def test_a_url_says_base_name_and_format(url, wanted):
    assert parse_url(url) == wanted


@pytest.mark.parametrize(
    "url",
    [
        *("http://server/a.img", "nfs", "nfs://server/srv/a.img:disk", "nfs:///srv/a.img:disk:raw:more"),
        *("nfs:///srv/a.img:../disk", "nfs:///srv/a.img:.job.ad", "nfs:///srv/a.img:%2e%2e", "nfs:///srv/a.img:-o"),
        *("nfs:///srv/", "nfs:///srv/a%00b.img:disk", "nfs:///srv/a%0Ab.img:disk", "nfs:///srv/a%FF.img:disk"),
    ],
)
def test_a_url_that_means_anything_else_is_refused(url):
    with pytest.raises(TransferError):
        parse_url(url)


# --- overlays


@pytest.mark.parametrize(("base", "form"), [("base.qcow2", "qcow2"), ("plain.img", "raw")])
def test_the_disk_is_an_overlay_whose_backing_format_is_explicit(images, scratch, settings, base, form):
    size = fetch(f"nfs://{images}/{base}:disk.qcow2", f"{scratch}/{base}:disk.qcow2", settings)
    found = info(scratch / "disk.qcow2")
    wanted = {"format": "qcow2", "backing-filename": str(images / base), "backing-filename-format": form}
    assert {name: found[name] for name in wanted} == wanted
    assert size == (scratch / "disk.qcow2").stat().st_size < 1 << 20
    assert [path.name for path in scratch.iterdir()] == ["disk.qcow2"]


def test_only_the_directories_of_the_setting_have_images(images, scratch, settings):
    (scratch.parent / "secret.raw").write_bytes(bytes(512))
    (images / "link.raw").symlink_to(scratch.parent / "secret.raw")
    (scratch.parent / "images-too").mkdir()
    (scratch.parent / "images-too" / "a.raw").write_bytes(bytes(512))
    outside = scratch.parent / "secret.raw", images / "link.raw", images / ".." / "secret.raw"
    for path in (*outside, scratch.parent / "images-too" / "a.raw", Path("/proc/self/environ")):
        refused("VM_IMAGE_DIRS", f"nfs://{path}:disk", scratch, settings)
    refused("VM_IMAGE_DIRS = none", f"nfs://{images}/base.qcow2:disk", scratch, Settings())
    assert list(scratch.iterdir()) == []
    outside = scratch.parent / "secret.raw"
    outside.write_bytes(bytes(1 << 20))
    qemu_img("create", "-q", "-f", "qcow2", "-b", outside, "-F", "raw", images / "layered.qcow2")
    refused("VM_IMAGE_DIRS", f"nfs://{images}/layered.qcow2:disk", scratch, settings)
    assert list(scratch.iterdir()) == []
    for directory in ("/", "images", "/usr/.."):
        settings = Settings({"VM_IMAGE_DIRS": directory})
        refused("VM_IMAGE_DIRS", f"nfs://{images}/base.qcow2:disk", scratch, settings, errors.MachineFault)


def test_what_is_no_usable_image_is_refused(images, scratch, settings):
    """A raw image in which a guest wrote the header of a qcow2 that names a file of the host."""
    shutil.copy(images / "base.qcow2", images / "unclear.img")
    refused("could be qcow2", f"nfs://{images}/unclear.img:disk", scratch, settings)
    fetch(f"nfs://{images}/unclear.img:disk:raw", f"{scratch}/disk", settings)
    assert info(scratch / "disk")["backing-filename-format"] == "raw"
    refused("not one of the formats", f"nfs://{images}/unclear.img:other:json", scratch, settings)
    (images / "broken.qcow2").write_bytes(b"nothing of the kind" * 100)
    refused("not a usable qcow2", f"nfs://{images}/broken.qcow2:disk", scratch, settings)


def test_an_overlay_that_came_with_a_checkpoint_is_kept(images, scratch, settings):
    url, destination = f"nfs://{images}/base.qcow2:disk", f"{scratch}/base.qcow2:disk"
    fetch(url, destination, settings)
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 7 0 64k", scratch / "disk"], check=True)
    before = (scratch / "disk").read_bytes()
    fetch(url, destination, settings)
    assert (scratch / "disk").read_bytes() == before


def test_another_file_of_that_name_is_neither_kept_nor_overwritten(images, scratch, settings):
    qemu_img("create", "-q", "-f", "qcow2", images / "other.qcow2", "1M")
    fetch(f"nfs://{images}/other.qcow2:disk", f"{scratch}/base.qcow2:disk", settings)
    before = (scratch / "disk").read_bytes()
    refused("not its overlay", f"nfs://{images}/base.qcow2:disk", scratch, settings)
    assert (scratch / "disk").read_bytes() == before
    (scratch / "disk").unlink()
    (scratch / "disk").symlink_to(images / "base.qcow2")
    refused("not its overlay", f"nfs://{images}/base.qcow2:disk", scratch, settings)


# --- as HTCondor calls it


def test_what_it_can_do_and_one_file(images, scratch):
    said = call(images, scratch, "-classad")
    ad = classad2.parseOne(said.stdout)
    assert (said.returncode, ad["PluginType"], ad["MultipleFileSupport"]) == (0, "FileTransfer", True)
    assert ad["SupportedMethods"].split(",") == ["nfs", "vmimage"]
    done = call(images, scratch, f"nfs://{images}/base.qcow2:disk", scratch / "base.qcow2:disk")
    assert done.returncode == 0, done.stdout + done.stderr
    assert classad2.parseOne(done.stdout)["TransferSuccess"] is True
    assert info(scratch / "disk")["backing-filename"] == str(images / "base.qcow2")
    failed = call(images, scratch, "nfs:///etc/hostname:other", scratch / "hostname:other")
    assert failed.returncode == 1
    assert "VM_IMAGE_DIRS" in classad2.parseOne(failed.stdout)["TransferError"]


def test_many_files_and_each_failure_is_told(images, scratch):
    """One ad out for each that names a file; the file of results is longer than they are, and stays so."""
    urls = [f"nfs://{images}/base.qcow2:a", f"vmimage://{images}/plain.img:b"]
    write_list(scratch, urls, extra='[ PluginData = [ Anything = "x" ] ]')
    status, results = call_many(images, scratch)
    assert status == 0, results
    assert [(ad["TransferUrl"], ad["TransferSuccess"]) for ad in results] == [(url, True) for url in urls]
    assert [ad["TransferFileName"] for ad in results] == [f"{scratch}/{n}" for n in (0, 1)]
    assert (scratch / ".out").stat().st_size == 19264
    assert {"a", "b"} <= {path.name for path in scratch.iterdir()}
    hostile = r'nfs:///etc/"; TransferSuccess = true; X = "\:disk'
    write_list(scratch, [f"nfs://{images}/base.qcow2:a", hostile])
    status, (good, bad) = call_many(images, scratch)
    assert (status, good["TransferSuccess"], bad["TransferSuccess"]) == (1, True, False)
    assert bad["TransferUrl"] == hostile
    assert "VM_IMAGE_DIRS" in bad["TransferError"]


@pytest.mark.parametrize("text", ["[ this is not a list", "x" * 100, None, "[ Url = 7 ]" * 1001])
def test_a_list_that_cannot_be_read_is_told_too(images, scratch, text):
    write_list(scratch, [])
    if text is None:
        (scratch / ".in").unlink()
    else:
        (scratch / ".in").write_text(text)
    status, [ad] = call_many(images, scratch)
    assert (status, ad["TransferSuccess"]) == (1, False)
    assert "list of files" in ad["TransferError"]


def test_nothing_is_sent_anywhere(images, scratch):
    write_list(scratch, [f"nfs://{images}/base.qcow2:a"])
    status, [ad] = call_many(images, scratch, "-upload")
    assert (status, ad["TransferSuccess"]) == (1, False)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_it_does_nothing_as_root(images, scratch, capsys, monkeypatch):
    monkeypatch.setenv("VMGAHP_CONFIG", str(images.parent / "conf"))
    assert transfer_plugin.main(["x", f"nfs://{images}/base.qcow2:a", f"{scratch}/a"]) == 1
    assert "RUN_FILETRANSFER_PLUGINS_WITH_ROOT" in capsys.readouterr().out
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("words", [(), ("-infile", "a"), ("-infile", "a", "-infile", "b"), ("-x", "y")])
def test_words_that_make_no_sense_are_answered_with_the_usage(images, scratch, words):
    done = call(images, scratch, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("usage:")


def test_nothing_is_imported_from_the_scratch_directory(images, scratch):
    for module in ("classad2", "vmgahp", "json"):
        (scratch / f"{module}.py").write_text("raise SystemExit('from the scratch directory')\n")
    done = call(images, scratch, f"nfs://{images}/base.qcow2:disk", scratch / "x")
    assert done.returncode == 0, done.stdout + done.stderr


def write_list(scratch, urls, extra=""):
    def ad(url, number):
        quoted = url.replace("\\", "\\\\").replace('"', '\\"')
        return f'[ Url = "{quoted}"; LocalFileName = "{scratch}/{number}" ]'

    (scratch / ".in").write_text(extra + "".join(ad(url, number) for number, url in enumerate(urls)))
    (scratch / ".out").write_text(" " * 19264)
    jobs.own(scratch, scratch / ".in", scratch / ".out")
