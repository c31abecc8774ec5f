"""Images come into the catalog whole and as they should be, or not at all; and go when nobody uses them."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest

from tests import jobs
from tests.commands.doctor.support import Condor, as_root, pool
from tests.commands.image.support import RAW, Place, Server, place, server, sha256
from tests.images.support import write
from vmgahp import cli
from vmgahp.commands.arguments import NotDone
from vmgahp.commands.image import fetch, store
from vmgahp.images import catalog

__all__ = ["place", "pool", "server"]

WRITTEN = """\
# Ours since 2024.
[old]  # by hand
path = "old.raw"
format = "raw"

# The new ones follow.
"""


def entry(place: Place, name: str) -> dict[str, object]:
    found: dict[str, object] = tomllib.loads(place.catalog.read_text())[name]
    return found


def qcow2(path: Path, *words: str) -> Path:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *words, str(path), "4M"], check=True, timeout=60)
    path.chmod(0o644)
    return path


@pytest.fixture
def raw(tmp_path: Path) -> str:
    """A raw image that is not in the catalog yet."""
    return str(write(tmp_path / "a.raw", RAW))


# --- a file


def test_a_memory_that_no_vm_has_is_refused_before_anything_is_fetched(place: Place, raw: str) -> None:
    for least in ("-1", "0", "lots", "100T"):
        assert "--min-memory" in place.image("add", "mine", raw, f"--min-memory={least}").err
    for text in ("caf\udce9", 6000 * "x"):
        assert "--description" in place.refused("add", "mine", raw, "--description", text, status=2)
    assert place.names() == []


def test_a_file_whose_name_is_no_text_is_added(place: Place, tmp_path: Path) -> None:
    assert place.image("add", "mine", str(write(tmp_path / os.fsdecode(b"caf\xe9.raw"), RAW))).status == 0
    assert str(entry(place, "mine")["source"]).endswith("caf\\udce9.raw")


def test_a_catalog_without_room_is_told_and_not_the_source(raw: str) -> None:
    with open("/dev/full", "wb") as full, pytest.raises(NotDone, match="there is no room for a copy of"):
        fetch.bring(raw, full, fetch.Voucher(), lambda _: None)


def test_a_file_is_copied_with_its_digests_and_where_it_was(place: Place, tmp_path: Path) -> None:
    write(place.catalog, WRITTEN.encode())
    source = write(tmp_path / "mine.raw", RAW)
    ended = place.image("add", "mine", str(source), "--description", 'a "good" one', "--min-memory", "64")
    assert ended.status == 0, ended.err
    found = entry(place, "mine")
    added = str(found.pop("added"))
    assert len(found.pop("sha512")) == 128  # type: ignore[arg-type]
    assert found == {
        "path": "mine.raw", "format": "raw", "description": 'a "good" one', "min_memory": 64, "sha256": sha256(RAW),
        "source": str(source),
    }  # fmt: skip
    assert added.endswith("Z")
    copy = place.directory / "mine.raw"
    assert copy.read_bytes() == RAW
    assert copy.stat().st_mode & 0o777 == 0o644
    assert place.catalog.read_text().startswith(WRITTEN)
    assert place.names() == ["catalog.toml", "mine.raw"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_link_of_a_users_leads_root_to_nothing_that_the_user_may_not_read(
    place: Place, scratch: Path, tmp_path: Path
) -> None:
    secret = write(tmp_path / "secret", RAW)
    secret.chmod(0o600)
    (scratch / "link.raw").symlink_to(secret)
    ended = place.image("add", "mine", str(scratch / "link.raw"), "--format", "raw")
    assert ended.status != 0
    assert "which other users can change" in ended.err
    assert place.names() == []
    jobs.own(scratch, write(scratch / "own.raw", RAW))
    assert place.image("add", "mine", str(scratch / "own.raw")).status == 0


def test_a_catalog_that_is_not_there_yet_is_made_and_zeros_take_no_room(place: Place, raw: str, tmp_path: Path) -> None:
    assert place.image("add", "v1.2+x", raw).status == 0
    assert entry(place, "v1.2+x")["path"] == "v1.2+x.raw"
    assert place.catalog.stat().st_mode & 0o777 == 0o644
    assert place.image("check").status == 0
    source = tmp_path / "sparse.raw"
    with source.open("xb") as file:
        file.truncate(64 << 20)
    assert place.image("add", "sparse", str(source)).status == 0
    copy = (place.directory / "sparse.raw").stat()
    assert (copy.st_size, copy.st_blocks) == (64 << 20, 0)


def test_a_name_that_is_there_is_refused(place: Place, raw: str) -> None:
    assert place.image("add", "a", raw).status == 0
    before = place.catalog.read_text()
    assert "none is ever changed in place" in place.refused("add", "a", raw)
    assert place.catalog.read_text() == before


def test_a_file_that_is_there_stays(place: Place, raw: str) -> None:
    write(place.directory / "a.raw", b"somebody's")
    assert (place.image("add", "a", raw).status, place.names()) == (1, ["a.raw"])
    assert (place.directory / "a.raw").read_bytes() == b"somebody's"


@pytest.mark.parametrize("option", ["--sha256", "--sha512"])
def test_a_digest_that_is_given_counts(place: Place, raw: str, option: str) -> None:
    digits = 64 if option == "--sha256" else 128
    assert "not what it should be" in place.refused("add", "a", raw, option, "0" * digits)
    assert place.names() == []
    assert "hexadecimal digits" in place.image("add", "a", raw, option, "beef").err


def test_no_digest_is_left_out_unseen(place: Place, raw: str) -> None:
    words = ("--sha512", hashlib.sha512(RAW).hexdigest(), "--sha256", "0" * 64)
    assert "--sha256" in place.refused("add", "a", raw, *words, status=2)
    assert place.names() == []


@pytest.mark.parametrize("name", ["../a", "", ".a", "a b", "a" * 65])
def test_a_name_that_no_job_could_say_is_refused(place: Place, raw: str, name: str) -> None:
    place.refused("add", name, raw)
    assert place.names() == []


def test_an_image_that_needs_other_files_or_is_none_of_its_format_is_refused(place: Place, tmp_path: Path) -> None:
    qcow2(tmp_path / "base.qcow2")
    above = qcow2(tmp_path / "above.qcow2", "-F", "qcow2", "-b", str(tmp_path / "base.qcow2"))
    assert "needs another image" in place.refused("add", "a", str(above))
    outside = f"data_file={tmp_path / 'data'},data_file_raw=on"
    assert "data in another file" in place.refused("add", "a", str(qcow2(tmp_path / "a.qcow2", "-o", outside)))
    assert place.names() == []
    assert place.image("add", "a", str(write(tmp_path / "a.qcow2", RAW))).status == 1
    assert "--format" in place.image("add", "a", str(write(tmp_path / "a.img", RAW))).err
    assert place.image("add", "a", str(tmp_path / "a.img"), "--format", "raw").status == 0


@pytest.mark.parametrize("data", [b"\x1f\x8b" + bytes(4096), b"<html>No</html>\n" * 200, b"LUKS\xba\xbe" + bytes(4096)])
def test_what_begins_like_no_disk_is_none(place: Place, tmp_path: Path, data: bytes) -> None:
    path = str(write(tmp_path / "a.raw", data))
    assert "and so is no disk" in place.image("add", "a", path).err
    assert place.image("add", "a", path, "--format", "raw").status == 0


@pytest.mark.parametrize(("at", "data", "said"), [(32, bytes((0, 0, 0, 1)), "is encrypted"), (48, bytes(8), "")])
def test_an_encrypted_or_broken_image_is_refused(place: Place, tmp_path: Path, at: int, data: bytes, said: str) -> None:
    """At 32 is the method of encryption (to have QEMU derive a key takes seconds), at 48 the table of references."""
    source = qcow2(tmp_path / "a.qcow2")
    with source.open("r+b") as file:
        file.seek(at)
        file.write(data)
    assert said in place.refused("add", "a", str(source))
    assert place.names() == []


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_directory_that_others_may_write_to_gets_no_image(place: Place, raw: str, mode: int) -> None:
    place.directory.chmod(mode)
    assert "others may write" in place.image("add", "a", raw).err
    assert place.names() == []


def test_a_fifo_is_not_waited_for(place: Place, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.raw")
    assert place.image("add", "a", str(tmp_path / "a.raw")).status == 1


def test_without_a_catalog_it_says_what_to_set(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("_CONDOR_VM_CATALOG")
    assert "VM_CATALOG is not set" in place.image("list").err


# --- a URL


def test_a_url_needs_a_checksum(place: Place, server: Server) -> None:
    server.files["a.raw"] = RAW
    assert "could be anybody's" in place.image("add", "a", server.url("a.raw")).err
    assert server.asked == []
    ended = place.image("add", "a", server.url("a.raw"), "--sha256", sha256(RAW).upper())
    assert ended.status == 0, ended.err
    assert entry(place, "a")["source"] == server.url("a.raw")
    assert (place.directory / "a.raw").read_bytes() == RAW


@pytest.mark.parametrize(
    ("data", "length", "said"),
    [(RAW[:-1] + b"?", len(RAW), sha256(RAW)), (RAW, len(RAW) + 5, "cut off"), (RAW, 1 << 60, "free here")],
    ids=["wrong", "cut off", "no room"],
)
def test_a_wrong_download_is_not_kept(place: Place, server: Server, data: bytes, length: int, said: str) -> None:
    server.files["a.raw"], server.lengths["a.raw"] = data, length
    assert said in place.refused("add", "a", server.url("a.raw"), "--sha256", sha256(RAW))
    assert place.names() == []


@pytest.mark.parametrize("where", ["file:///etc/passwd", "ftp://127.0.0.1/a.raw"])
def test_nothing_but_http_is_led_to(place: Place, server: Server, where: str) -> None:
    server.leads["a.raw"] = where
    ended = place.image("add", "a", server.url("a.raw"), "--sha256", sha256(Path("/etc/passwd").read_bytes()))
    assert (ended.status, place.names()) == (1, [])
    assert "leads to" in ended.err or "is not allowed" in ended.err


@pytest.mark.parametrize("seconds", ["0", "-1", "ten", "100000"])
def test_a_time_that_is_none_is_refused(place: Place, seconds: str) -> None:
    words = ("warm", "a", "--memory", "512M", f"--timeout={seconds}")
    assert "is not a valid number of seconds. Give one from 1 to 86400" in place.refused(*words, status=2)


def test_what_the_server_has_not_is_told_and_a_redirect_is_followed(place: Place, server: Server) -> None:
    assert "404" in place.image("add", "a", server.url("a.raw"), "--sha256", sha256(RAW)).err
    assert "is neither a file" in place.image("add", "a", "ftp://127.0.0.1/a.raw", "--sha256", sha256(RAW)).err
    server.leads["a.raw"], server.files["b"] = "/b", RAW
    assert place.image("add", "a", server.url("a.raw"), "--sha256", sha256(RAW)).status == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_one_that_is_interrupted(place: Place, server: Server, number: signal.Signals) -> None:
    server.files["endless"] = RAW
    running = place.begin("add", "a", server.url("endless"), "--sha256", sha256(RAW), "--format", "raw")
    assert server.waiting.wait(60)
    assert [name for name in place.names() if name.startswith(".unfinished-")]
    running.send_signal(number)
    running.communicate(timeout=60)
    assert (running.returncode, place.names()) == (130, [])


def test_two_at_once_are_one_image(place: Place, server: Server) -> None:
    """Both have fetched it; the second finds the name taken."""
    server.files["endless"] = server.files["a.raw"] = RAW
    slow = place.begin("add", "a", server.url("endless"), "--sha256", sha256(RAW), "--format", "raw")
    assert server.waiting.wait(60)
    assert place.image("add", "a", server.url("a.raw"), "--sha256", sha256(RAW)).status == 0
    before = place.catalog.read_text()
    server.lengths["endless"] = len(RAW) // 2
    server.go_on.set()
    slow.communicate(timeout=60)
    assert slow.returncode == 1
    assert (place.names(), place.catalog.read_text()) == (["a.raw", "catalog.toml"], before)


# --- signatures


@pytest.fixture
def signer(tmp_path: Path) -> Path:
    """A directory with a file, its signature, and the key; by GnuPG."""
    if not shutil.which("gpg") or not shutil.which("gpgv"):
        pytest.skip("needs gpg and gpgv")
    home = tmp_path / "gnupg"
    home.mkdir(mode=0o700)

    def gpg(*words: str) -> None:
        command = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", "", "--no-tty", *words]
        subprocess.run(command, check=True, timeout=60, cwd=tmp_path, capture_output=True)

    write(tmp_path / "a.raw", RAW)
    gpg("--quick-generate-key", "maker@example.org", "ed25519", "sign", "never")
    gpg("--armor", "--output", "key.asc", "--export")
    gpg("--output", "key.gpg", "--export")
    gpg("--output", "a.sig", "--detach-sign", "a.raw")
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], timeout=60, check=False)
    return tmp_path


@pytest.mark.parametrize("key", ["key.asc", "key.gpg"])
def test_a_signature_will_do(place: Place, signer: Path, server: Server, key: str) -> None:
    server.files["a.raw"] = RAW
    words = ["--signature", str(signer / "a.sig"), "--key", str(signer / key)]
    ended = place.image("add", "a", server.url("a.raw"), *words)
    assert ended.status == 0, ended.err
    server.files["b.raw"] = RAW + b"!"
    assert "signature is not good" in place.refused("add", "b", server.url("b.raw"), *words)
    assert place.refused("add", "c", str(signer / "a.raw"), *words[:2]), "it needs its key"
    assert place.names() == ["a.raw", "catalog.toml"]


def test_a_key_that_comes_with_the_image_vouches_for_nothing(place: Place, signer: Path, server: Server) -> None:
    for name in ("a.raw", "a.sig", "key.gpg"):
        server.files[name] = (signer / name).read_bytes()
    words = ["--signature", server.url("a.sig"), "--key", server.url("key.gpg")]
    assert "name a file" in place.refused("add", "a", server.url("a.raw"), *words)
    assert ("key.gpg" in server.asked, place.names()) == (False, [])


# --- releases


def releases(place: Place, server: Server, signer: Path, **more: str) -> None:
    about = {
        "image": server.url("dist/a.qcow2"), "sums": server.url("dist/SUMS"), "algorithm": "sha256", "format": "qcow2",
        "signature": server.url("dist/SUMS.sig"), "key": str(signer / "key.gpg"),
    }  # fmt: skip
    text = "".join(f'{key} = "{value}"\n' for key, value in (about | more).items() if value)
    write(place.directory / "cloud-images.toml", f"[ours-1]\nmin_memory = 64\n{text}".encode())


def publish(server: Server, signer: Path, image: Path) -> None:
    data = image.read_bytes()
    sums = f"{'0' * 64}  other\n{sha256(data)} *a.qcow2\n".encode()
    write(signer / "SUMS", sums)
    (signer / "SUMS.sig").unlink(missing_ok=True)
    command = ["gpg", "--homedir", str(signer / "gnupg"), "--batch", "--quiet", "--output", "SUMS.sig"]
    subprocess.run([*command, "--detach-sign", "SUMS"], check=True, timeout=60, cwd=signer)
    server.files |= {"dist/a.qcow2": data, "dist/SUMS": sums, "dist/SUMS.sig": (signer / "SUMS.sig").read_bytes()}


def test_a_release_comes_by_its_name_and_again_under_a_new_one(place: Place, server: Server, signer: Path) -> None:
    releases(place, server, signer)
    publish(server, signer, qcow2(signer / "one.qcow2"))
    ended = place.image("add", "ours-1", "ours-1")
    assert ended.status == 0, ended.err
    assert entry(place, "ours-1")["min_memory"] == 64

    ended = place.image("update", "ours-1")
    assert ended.status == 0
    assert "newest" in ended.err
    assert server.asked.count("dist/a.qcow2") == 1

    publish(server, signer, qcow2(signer / "two.qcow2", "-o", "cluster_size=4k"))
    before = (place.directory / "ours-1.qcow2").read_bytes()
    ended = place.image("update", "ours-1")
    assert ended.status == 0, ended.err
    (name,) = set(tomllib.loads(place.catalog.read_text())) - {"ours-1"}
    assert name.startswith("ours-1-20")
    assert f"catalog:{name}" in ended.err
    assert (place.directory / "ours-1.qcow2").read_bytes() == before
    assert "newest" in place.image("update", name).err

    subprocess.run(["gpgconf", "--homedir", str(signer / "gnupg"), "--kill", "all"], timeout=60, check=False)


def test_a_release_takes_no_proof_and_no_table_of_others(place: Place, server: Server, signer: Path) -> None:
    releases(place, server, signer)
    for words in (["--sha256", "0" * 64], ["--signature", "/s", "--key", "/k"], ["--format", "raw"]):
        assert "is a release" in place.refused("add", "ours-1", "ours-1", *words)
    assert server.asked == []
    (place.directory / "cloud-images.toml").chmod(0o666)
    assert place.image("add", "ours-1", "ours-1").status == 1


def test_an_unsigned_list_of_checksums_has_to_come_by_https(place: Place, server: Server, signer: Path) -> None:
    releases(place, server, signer, signature="", key="")
    publish(server, signer, qcow2(signer / "one.qcow2"))
    assert "https" in place.image("add", "ours-1", "ours-1").err
    releases(place, server, signer, key=str(signer / "a.raw"))
    assert "signature is not good" in place.image("add", "ours-1", "ours-1").err
    assert place.names() == ["cloud-images.toml"]


def test_the_table_of_ours_is_whole(place: Place) -> None:
    assert "debian-12, debian-13, ubuntu-22.04" in place.image("add", "a", "nothing-of-it").err


# --- looking


def test_what_was_changed_is_seen(place: Place, raw: str) -> None:
    for name in ("a", "b"):
        assert place.image("add", name, raw).status == 0
    assert place.image("check").status == 0
    with (place.directory / "a.raw").open("r+b") as file:
        file.write(b"!")
    ended = place.image("check")
    assert ended.status == 1
    assert "not what came in" in " ".join(ended.out.split())
    assert (place.image("check", "a").status, place.image("check", "b").status) == (1, 0)
    (place.directory / "b.raw").chmod(0o666)
    assert place.image("check", "b").status == 1
    assert place.image("check", "c").status == 1


def test_the_list_has_what_is_wrong(place: Place, raw: str) -> None:
    assert place.image("add", "a", raw, "--description", "one").status == 0
    with place.catalog.open("a") as file:
        file.write('[gone]\npath = "gone"\nformat = "raw"\n[wrong]\npath = "x"\n')
    found = {each["name"]: each for each in json.loads(place.image("list", "--json").out)["images"]}
    assert (found["a"]["sha256"], "wrong" in found["a"]) == (sha256(RAW), False)
    assert "wrong" in found["gone"]
    assert "wrong" in found["wrong"]
    assert "one" in place.image("list").out


# --- going


def test_what_nobody_uses_goes_and_what_is_open_stays(place: Place, raw: str) -> None:
    write(place.catalog, WRITTEN.encode())
    assert place.image("add", "a", raw).status == 0
    warm = place.directory.parent / "warm"
    for name in ("a", "b"):
        (warm / f"{name}-512-1-0123456789abcdef").mkdir(parents=True)
    assert place.image("remove", "a").status == 0
    assert [left.name[0] for left in warm.iterdir()] == ["b"]
    assert place.names() == ["catalog.toml"]
    assert place.catalog.read_text().rstrip() == WRITTEN.rstrip()
    assert place.image("remove", "a").status == 1
    assert place.image("add", "a", raw).status == 0
    with (place.directory / "a.raw").open("rb") as file:
        guest = subprocess.Popen(["sleep", "600"], stdin=file)
    try:
        assert f"process {guest.pid} (sleep)" in place.refused("remove", "a")
        assert place.names() == ["a.raw", "catalog.toml"]
        assert "a" in tomllib.loads(place.catalog.read_text())
    finally:
        guest.kill()
        guest.wait()
    assert place.image("remove", "a").status == 0


def test_an_image_below_another_or_of_a_jobs_overlay_stays(place: Place, raw: str, tmp_path: Path) -> None:
    assert place.image("add", "a", str(qcow2(tmp_path / "a.qcow2"))).status == 0
    qcow2(place.directory / "b.qcow2", "-F", "qcow2", "-b", str(place.directory / "a.qcow2"))
    with place.catalog.open("a") as file:
        file.write('[b]\npath = "b.qcow2"\nformat = "qcow2"\n')
    assert "the image b is laid on it" in place.image("remove", "a").err
    assert place.image("check").status == 0
    assert place.image("remove", "b").status == 0
    assert place.image("remove", "a").status == 0
    # The VM does not run yet, or no longer; what names the image is the job's own, and may be anything.
    assert place.image("add", "a", raw).status == 0
    scratch = Path(place.environ["_CONDOR_EXECUTE"]) / "dir_1"
    scratch.mkdir(parents=True)
    record = scratch / "vm_catalog.json"
    record.symlink_to("/etc/passwd")
    record.unlink()
    record.write_text(json.dumps({"layers": [{"file": "vda-a.qcow2", "image": "a", "base": []}]}))
    assert str(record) in place.image("remove", "a").err
    record.write_text("[" * 100000)
    assert place.image("remove", "a").status == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_image_of_a_jobs_overlay_one_directory_further_down_stays(place: Place, raw: str) -> None:
    """HTCondor has scratch directories in directories of its own (STARTER_NESTED_SCRATCH)."""
    assert place.image("add", "a", raw).status == 0
    scratch = Path(place.environ["_CONDOR_EXECUTE"]) / "dir_1/scratch"
    scratch.mkdir(parents=True)
    os.chown(scratch, 65534, 65534)
    record = write(scratch / "vm_catalog.json", b'{"layers": [{"image": "a"}]}')
    assert str(record) in place.image("remove", "a").err


def test_a_file_that_is_elsewhere_or_of_two_images_stays(place: Place, tmp_path: Path) -> None:
    write(place.directory / "x.raw", RAW)
    outside = write(tmp_path / "y.raw", RAW)
    tables = "".join(
        f'[{name}]\npath = "{path}"\nformat = "raw"\n'
        for name, path in (("one", "x.raw"), ("two", "x.raw"), ("far", outside))
    )
    write(place.catalog, tables.encode())
    assert place.image("remove", "far").status == 0
    assert place.image("remove", "one").status == 0
    assert outside.exists()
    assert (place.directory / "x.raw").exists()
    assert place.image("remove", "two").status == 0
    assert place.names() == ["catalog.toml"]


# --- the catalog's file: the administrator's own words stay

TEXT = """\
# The images of this cluster.

[a]
path = "a.qcow2"   # here
format = "qcow2"

# Do not remove before May.
[ "b.c" ]
description = "[d]"
path = "b"
format = "raw"
# the last word
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "catalog.toml"
    made.write_text(TEXT)
    made.chmod(0o640)
    return made


def test_one_more_is_written_behind_the_others(path: Path) -> None:
    store.add_table(str(path), "new", {"path": "n", "format": "raw", "description": 'ü "x"\\\n\x7f', "min_memory": 3})
    assert path.read_text().startswith(TEXT + "\n[new]\n")
    found = catalog.parse(str(path), path.read_bytes())
    assert found.entries["new"].description == 'ü "x"\\\n\x7f'
    assert set(found.entries) == {"a", "b.c", "new"}
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_one_is_taken_out_and_all_comments_stay(path: Path) -> None:
    store.remove_table(str(path), "a")
    assert path.read_text() == TEXT.replace('[a]\npath = "a.qcow2"   # here\nformat = "qcow2"\n', "")
    store.remove_table(str(path), "b.c")
    comments = [line for line in TEXT.splitlines() if line.startswith("#")]
    assert [line for line in path.read_text().splitlines() if line] == comments


@pytest.mark.parametrize(
    "text",
    [
        'a = { path = "x", format = "raw" }\n',
        '[a]\npath = "x"\nformat = "raw"\ndescription = """\n[b]\n"""\n',
        '[a]\npath = "x"\nformat = "raw"\n[a.b]\npath = "y"\nformat = "raw"\n[[c]]\n',
    ],
)
def test_what_cannot_be_taken_out_stays_as_it_is(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(NotDone):
        store.remove_table(str(path), "a")
    assert path.read_text() == text


def test_what_is_no_catalog_is_not_written_to(path: Path) -> None:
    for text in ("[a\n", "x = 1\n", "#" * (catalog.LARGEST + 9)):
        path.write_text(text)
        with pytest.raises(NotDone):
            store.add_table(str(path), "new", {"path": "n", "format": "raw"})
        assert path.read_text() == text


def test_no_reader_of_the_directory_keeps_the_catalog_locked(path: Path) -> None:
    reader = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(reader, fcntl.LOCK_EX)
        adding = threading.Thread(target=lambda: store.locked_catalog(str(path)).__enter__(), daemon=True)
        adding.start()
        adding.join(5)
        assert not adding.is_alive()
    finally:
        os.close(reader)
    assert Path(f"{path}.lock").stat().st_mode & 0o777 == 0o600


def test_one_writes_at_a_time(path: Path) -> None:
    def write(name: str) -> None:
        with store.locked_catalog(str(path)):
            store.add_table(str(path), name, {"path": name, "format": "raw"})

    threads = [threading.Thread(target=write, args=(f"n{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(catalog.parse(str(path), path.read_bytes()).entries) == 10


@as_root
def test_the_startd_advertises_each_change_at_once(
    pool: Condor, raw: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = pool.directory / "images"
    images.mkdir()
    environ = pool.environ(VM_TYPE="kvm", VM_CATALOG=images / "catalog.toml")
    monkeypatch.delenv("VMGAHP_CONFIG", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    pool.script("condor_update_machine_ad", f"import sys; open({str(pool.ad)!r}, 'a').write(sys.stdin.read())")
    for words in (["add", "a", raw], ["add", "b", raw], ["remove", "a"], ["remove", "b"]):
        assert cli.main(["vmgahp", "image", *words]) == 0
    told = [line for line in pool.ad.read_text().splitlines() if "VM_Images" in line]
    assert told[::2] == ['VM_Images = "a"', 'VM_Images = "a,b"', 'VM_Images = "b"', 'VM_Images = ""']
    assert told[1::2] == ['VM_Images_Warm = ""'] * 4
    pool.script("condor_update_machine_ad", "import sys; sys.exit('no startd')")
    capsys.readouterr()
    assert cli.main(["vmgahp", "image", "add", "a", raw]) == 0, "the image is there all the same"
    said = capsys.readouterr().err
    assert "no startd" in said
    assert "condor_restart -peaceful -startd" in said


def test_a_guest_that_waits_for_jobs_is_made_of_what_is_there(place: Place, raw: str) -> None:
    assert "has no image a" in place.refused("warm", "a")
    assert place.image("add", "a", raw).status == 0
    assert "--type vmware: jobs go on so with kvm, libvirt, qemu only" in place.refused("warm", "a", "--type", "vmware")
