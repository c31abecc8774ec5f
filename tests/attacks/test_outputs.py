"""Attacks by the outputs of a guest: archives that lead elsewhere or lie, and what all takes of a disk."""

import os
import shutil
import socket
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from tarfile import BLKTYPE, CHRTYPE, DIRTYPE, FIFOTYPE, LNKTYPE, SYMTYPE

from tests.attacks.here import Here, Part
from tests.attacks.support import Mode, Must, Who, attack, each_here
from tests.job.support import Entry, entry, link, tar
from vmgahp.host.serial_capture import CUT, ConsoleCapture
from vmgahp.job.archive import BLOCK, Allowed, Unpacked, unpack

LARGE = 1 << 30
ALL = ("*",)
SECRET = b"a secret of the submit side\n"
KEPT = "vm_outputs.tar", "disk.img", "secret"
"""What is in the directory, and stays as it is."""
ELSEWHERE = "/tmp/vmgahp-attacked"
PAX, GNU = tarfile.PAX_FORMAT, tarfile.GNU_FORMAT
TARGETS = (
    "/etc/passwd", "../secret", "../../secret", "d", "d/", ".", "..", "gone", "l", "d/../../secret", "", "/",
    "../disk.img", "d/../../vm_outputs/f", "/proc/self/fd/0", "/dev/zero", "f/../../secret", "\n", "x" * 5000,
)  # fmt: skip


def sized(header: bytes, size: bytes) -> bytes:
    """The header with another text in its field for the size, and its checksum."""
    made = bytearray(header)
    made[124:136] = size
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


def special(kind: bytes, size: int, content: bytes = b"", name: str = "././@LongLink") -> bytes:
    """An entry of a kind that tar itself reads, of this size or said to be."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(GNU) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def extended(**fields: str) -> tuple[Entry, ...]:
    """A file with records of pax, whose names have underscores for dots."""
    return (entry("odd", b"odd", pax_headers={name.replace("__", "."): text for name, text in fields.items()}),)


LEFT_OUT: dict[str, tuple[Entry, ...]] = {
    **{
        f"{word} link to {target[:30]!a}": (link("l", target, kind),)
        for word, kind in (("a symbolic", SYMTYPE), ("a hard", LNKTYPE))
        for target in TARGETS
    },
    "links in a circle": (link("l", "m"), link("m", "n"), link("n", "l")),
    "a chain of links": tuple(link(f"l{n}", f"l{n + 1}") for n in range(60)),
    "a file behind a link": (link("l", ELSEWHERE), entry("l", b"x")),
    "a link in a file's place": (link("f", "../secret", LNKTYPE),),
    "a directory in a file's place": (entry("f", type=DIRTYPE), entry("f/x", b"x")),
    "a file in a directory's place": (entry("d", b"x"),),
    **{f"kind {kind!r}": (entry("o", type=kind),) for kind in (FIFOTYPE, CHRTYPE, BLKTYPE, b"Z", b"V", b"M", b"A")},
    **{
        f"the name {name}": (entry(name, b"x"),)
        for name in (
            ".job.ad", ".machine.ad", ".update.ad", "_condor_stdout", "_condor_stderr", "vm_exit.json", ".chirp.config",
            "vm_checkpoint.json", "vm_checkpoint.json.refused-1", "vm_checkpoint.mem", "vm_catalog.json",
            "lost+found/x", "vm_outputs/x", "vm_error.txt", "condor_exec.exe", ".vm_outputs/x",
            ".docker_sock", "vm_suspend.mem",
        )
    },
}  # fmt: skip
"""Entries between two others, of which nothing is made."""

ENDS: dict[str, tuple[Entry, ...]] = {
    **{
        f"the path {name[:30]!a}": (entry(name, b"x"),)
        for name in (
            "/etc/x", "../x", "a/../../x", "a/..", "./../x", "//x", "..", "d/../f", "a/" * 101 + "x", "x" * 256,
            "/" * 3000 + "x", "../vm_outputs/x",
        )
    },
    "a path that pax gives": extended(path="../x"),
    "a full path that pax gives": extended(path=f"{ELSEWHERE}/x"),
    "a sparse file's name": extended(GNU__sparse__major="1", GNU__sparse__minor="0", GNU__sparse__name="../x"),
    "a sparse file's map": extended(GNU__sparse__map="0,1,9999999999999,1", GNU__sparse__size="99999999999999"),
    "a size that pax gives": extended(size=str(1 << 62)),
}  # fmt: skip
"""Entries with which the unpacking ends."""

RAW: dict[str, Callable[[], bytes]] = {
    "noise": lambda: bytes(range(256)) * 16,
    "ones": lambda: b"\1" * 512,
    "cut in a file": lambda: tar(entry("x", b"1" * 10_000))[:6000],
    "cut in a header": lambda: tar(entry("x", b"1"))[:300],
    "a wrong sum": lambda: tarfile.TarInfo("n").tobuf()[:156] + b"L" + tarfile.TarInfo("n").tobuf()[157:],
    "a name of a terabyte": lambda: special(b"L", 1 << 40) + bytes(1024),
    "a link's name of a terabyte": lambda: special(b"K", 1 << 40) + bytes(1024),
    "a pax header of a terabyte": lambda: special(b"x", 1 << 40) + bytes(1024),
    "5,000 names in a row": lambda: special(b"L", 2, b"a\0") * 5000 + bytes(1024),
    "5,000 pax headers in a row": lambda: special(b"x", 9, b"9 a=bcd\n\0") * 5000 + bytes(1024),
    "a pax record of no length": lambda: special(b"x", 8, b"0 a=bcd\n") + tar(entry("x", b"x")),
    "a global path": lambda: special(b"g", 14, b"14 path=/etc/x") + tar(entry("x", b"x")),
    "less than no bytes": lambda: sized(entry("x")[0].tobuf(GNU), b"\xff" * 12) + bytes(1024),
    "a size of 2**80": lambda: sized(entry("x")[0].tobuf(GNU), b"\x80\0" + b"\xff" * 10) + bytes(1024),
    "a size that is no number": lambda: sized(entry("x")[0].tobuf(GNU), b"eight bytes\0") + bytes(1024),
    "a sparse header that never ends": lambda: special(b"S", 0)[:482] + b"\1" * 30 + b"\1" * 5120,
    "gzip": lambda: b"\x1f\x8b\x08" + bytes(1000),
}  # fmt: skip
"""What is no archive, or one of which tar's reader would take all memory."""

NOT_ASKED = (
    ".bashrc", ".ssh/authorized_keys", "job.sub", "Results/x", "results\n", "results.", "a/results", "x.csv/../job.sub",
    ".hidden.csv", "d/x.csv", "job.sub\0.csv", "\u202eresults", "vm_outputs/results", "resultsx", "fit.py", "*.csvx",
)  # fmt: skip
"""What a stranger's image sends home beside ``results`` and ``*.csv``."""

MIB = 1 << 20
BOMBS: dict[str, Callable[[], bytes]] = {
    "one large file": lambda: tar(entry("x", bytes(4 * MIB))),
    "files of one byte": lambda: tar(*(entry(f"{n}", b"x") for n in range(3000))),
    "empty files": lambda: tar(*(entry(f"{n}") for n in range(9000))),
    "one name again and again": lambda: tar(*(entry("x", bytes(MIB // 4)) for n in range(40))),
    "directories": lambda: tar(*(entry(f"{n}", type=DIRTYPE) for n in range(3000))),
    "directories above each file": lambda: tar(*(entry(f"{n}/" * 90 + "x") for n in range(40))),
    "one directory again and again": lambda: tar(*(entry("d/" * (n % 90), type=DIRTYPE) for n in range(1, 9000))),
    "symbolic links": lambda: tar(entry("x", b"x"), *(link(f"{n}", "x") for n in range(9000))),
    "hard links": lambda: tar(entry("x", b"x"), *(link(f"{n}", "x", LNKTYPE) for n in range(9000))),
    "long names": lambda: tar(*(entry(f"{n:0255}") for n in range(9000))),
    "a file of holes": lambda: tar(entry("x", b"x", type=b"S")),
    "a hole of 1 GiB": lambda: tar(*extended(GNU__sparse__map="0,1", GNU__sparse__size=str(1 << 30)), form=PAX),
    "a size of 1 GiB, and nothing": lambda: sized(entry("x")[0].tobuf(GNU), b"%011o\0" % (1 << 30)) + bytes(MIB),
}  # fmt: skip
"""Archives that become more than a mebibyte, or 200 entries."""


def unpacked(here: Here, what: str, archive: bytes, allowed: Allowed) -> tuple[Unpacked, dict[str, bytes]]:
    """Unpack an archive beside files of the job's; return what is said of it, and the files."""
    path, below = here.plant("vm_outputs.tar", archive), here.directory / ".vm_outputs"
    shutil.rmtree(below, ignore_errors=True)
    for name in KEPT[1:]:
        here.plant(name, SECRET)
    found = [Unpacked(0, 0, (), "")]
    with path.open("rb") as file:
        where = file.fileno(), str(here.directory), below.name
        here.start(what, Part(lambda _: found.append(unpack(*where, allowed, here.user))))
    files: dict[str, bytes] = {}
    taken: dict[int, int] = {}
    entries = list(below.rglob("*"))
    for path in entries:
        status = path.lstat()
        taken[status.st_ino] = status.st_blocks << 9
        plain = (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)) and not status.st_mode & 0o7000
        if not plain or status.st_uid != here.user.uid:
            here.breach(f"{what}: {path.name!a} is of {status.st_uid}, with the mode {status.st_mode:o}")
        if path.is_file():
            files[str(path.relative_to(below))] = path.read_bytes()
    kept = {path.name: path for path in here.directory.iterdir() if path != below}
    if sorted(kept) != sorted(KEPT) or os.path.exists(ELSEWHERE) or SECRET in files.values():
        here.breach(f"{what}: {sorted(kept)}, {sorted(files)}")
    if any(kept[name].read_bytes() != SECRET or kept[name].lstat().st_nlink != 1 for name in KEPT[1:]):
        here.breach(f"{what}: a file of the job's is changed, or has another name")
    if sum(taken.values()) > allowed.size + BLOCK or len(entries) > allowed.entries:
        here.breach(f"{what}: {sum(taken.values())} bytes and {len(entries)} entries, with {allowed}")
    return found[-1], files


F, G, D = entry("f", b"1"), entry("g", b"2"), (entry("d", type=DIRTYPE), entry("d/e"))
ARCHIVES: dict[str, tuple[dict[str, Callable[[], bytes]], tuple[str, ...], dict[str, bytes], str]] = {
    "entries": ({what: lambda sent=sent: tar(F, *D, *sent, G) for what, sent in LEFT_OUT.items()}, ALL,
                {"f": b"1", "d/e": b"", "g": b"2"}, "left_out"),
    "paths": ({what: lambda sent=sent: tar(F, *sent, G, form=PAX if sent[0][0].pax_headers else GNU)
               for what, sent in ENDS.items()}, ALL, {"f": b"1"}, "problem"),
    "no-archives": (RAW, ALL, {}, "problem"),
    "not-asked": ({name: lambda name=name: tar(entry("results/ok", b"1"), entry("x.csv", b"1"), entry(name, b"2"),
                                               link("results/l", f"../{name}")) for name in NOT_ASKED},
                  ("results", "*.csv"), {"results/ok": b"1", "x.csv": b"1"}, ""),
}  # fmt: skip
"""Kinds of archives, what the job has asked for, the files that they may become, and where that is told."""


def archives(here: Here, name: str) -> None:
    """Send links, devices, reserved names, paths that lead elsewhere, lies, noise, and what was not asked for."""
    made, names, expected, told = ARCHIVES[name]
    for what, make in made.items():
        done, files = unpacked(here, what, make(), Allowed(names, LARGE, 1 << 20))
        is_told = not told or getattr(done, told)
        if not is_told or {path: files[path] for path in files if (path, files[path]) != ("l", b"x")} != expected:
            here.breach(f"{what}: {sorted(files)[:10]}, {done}"[:600])


for _name, (_made, *_) in ARCHIVES.items():
    _who = Who.STRANGER if _name == "not-asked" else Who.GUEST
    attack(_who, Must.RUN, Mode.NONE, daily=True, times=len(_made), cases={_name: (_name,)})(archives)


@attack(Who.GUEST, Must.RUN, Mode.NONE, daily=True, times=2 * len(BOMBS))
def bombs(here: Here) -> None:
    """Send archives that become more bytes or inodes than there may be."""
    for what, make in BOMBS.items():
        archive = make()
        for allowed in (Allowed(ALL, MIB, LARGE), Allowed(ALL, LARGE, 200)):
            unpacked(here, what, archive, allowed)


PRINTED = 50_000
STREAMS: dict[str, Callable[[Path, Callable[[bytes], None]], object]] = {
    "at once": lambda _path, send: send(b"x" * 300_000),
    "in 200 connections": lambda _path, send: [send(b"x" * 1000) for _ in range(200)],
    "into a file that is emptied": lambda path, send: [(send(b"x" * 30_000), path.write_bytes(b"")) for _ in "nine"],
    "behind a hole of the job's": lambda path, send: [os.truncate(path, 1 << 30), send(b"x" * 99_999)],
    "into a file of another name": lambda path, send: [path.rename(f"{path}2"), send(b"x" * 99_999)],
}  # fmt: skip
"""What a guest prints on a stream that may have `PRINTED` bytes, and the job does to its file meanwhile."""


@attack(Who.GUEST, Must.RUN, Mode.NONE, daily=True, cases={name: (name,) for name in STREAMS})
def streams(here: Here, what: str) -> None:
    """Print more than a stream may have, while the job does things to its file."""
    path = here.plant("vm_stdout")
    opened = os.open(path, os.O_WRONLY | os.O_APPEND)
    with os.fdopen(os.dup(opened)) as keeper:
        capture = ConsoleCapture(f"{here.execute}/port", lambda: opened, PRINTED, here.told.append)

        def send(data: bytes) -> None:
            with socket.socket(socket.AF_UNIX) as guest:
                guest.connect(capture.path)
                guest.sendall(data)
                guest.shutdown(socket.SHUT_WR)
                guest.recv(1)

        here.start(what, Part(lambda _: STREAMS[what](path, send)))
        capture.close()
        if (taken := os.fstat(keeper.fileno()).st_blocks << 9) > PRINTED + len(CUT) + 4 * BLOCK:
            here.breach(f"{taken} bytes")


test_nothing_comes_of_it = each_here(__name__)
