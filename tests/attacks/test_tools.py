"""Attacks on people's tools by files that a job has brought home, or a stranger has sent."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.attacks.ground import CANARIES
from tests.attacks.site import Site
from tests.attacks.support import Mode, Must, Who, attack, each
from tests.peer import VMGAHP

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e<script>alert(1)</script>'\"&"

METRICS: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 0),
    "noise": (bytes(range(256)), 1000),
    "64 MiB of lines": (b'{"time": 1, "cpu": 1}\n', (64 << 20) // 22),
    "64 MiB in one line": (b"x", 64 << 20),
    "escape sequences": (("{" + f'"name": "{ESCAPES}", "time": 1, "event": "{ESCAPES}"' + "}\n").encode(), 1),
    "numbers beyond reason": (b'{"time": 1e999, "cpu_seconds": -1e308, "memory": 99999999999999999999999}\n', 100),
    "deep lists": (b"[" * 100_000 + b"\n", 1),
    "other kinds": (b'[]\n1\n"x"\nnull\n{"time": null}\n{"time": []}\n{"time": {}}\n', 1),
    "times that go back": (b'{"time": 9e15}\n{"time": -9e15}\n{"time": 0}\n', 100),
}
"""Files of figures: what is in them, and how often. Each process that collects tests has them in its memory."""

DOMAIN = (
    "<domain type='kvm'><name>{name}</name><memory>65536</memory><vcpu>1</vcpu><os><type>hvm</type></os><devices>"
    "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{source}'/>"
    "<target dev='vda' bus='virtio'/></disk></devices></domain>"
)
NAMES = (
    *("x", "x\nqueue 99", 'x\n+Owner="root"', "$(HOME)", "$ENV(HOME)", "$F(x)", "a,b", "../../x", "-rf", ESCAPES),
    *("x" * 10_000, '"', "\\", "a=b", "#", "x\rtransfer_input_files=/etc/shadow"),
)
SOURCES = ("guest.img", "a,b.img", "$(x).img", "a b.img", "x\nqueue", "../x.img")

TRANSCRIPTS = (b"", bytes(range(256)) * 100, b"> " + b"x" * 1_000_000, b"< \x1b[2J\n" * 100, b"> QUIT\n", b"\xff\xfe")


SECONDS = 20.0


def run(site: Site, what: str, *words: str | Path) -> str:
    """Run the program: it ends soon, in words, and what it prints is for a terminal."""
    site.told.append(f"vmgahp {' '.join(map(str, words))[:200]} ({what[:60]!r})")
    try:
        done = subprocess.run(
            [*VMGAHP, *words], cwd=site.directory, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        site.breach(f"{what[:60]!r} takes longer than {SECONDS:g} s")
        return ""
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    site.told.append(said[:500])
    if "Traceback" in said:
        site.breach(f"{what[:60]!r}: {said[-1500:]}")
    if "\x1b]0" in said or "\x9b31m" in said or "\x1b[2J" in said:
        site.breach(f"{what[:60]!r} reaches the terminal as it is")
    return said


@attack(Who.USER, Must.REFUSE, Mode.NONE, times=len(METRICS))
def metrics(site: Site) -> None:
    """Have `vmgahp report` read files of figures: floods, noise, escape sequences, numbers beyond reason."""
    for what, (content, times) in METRICS.items():
        site.plant("vm_metrics.jsonl", content * times)
        run(site, what, "report", "vm_metrics.jsonl", "-o", site.outer / "report.html")
        page = site.outer / "report.html"
        if page.exists():
            if "<script>alert" in page.read_text(errors="replace"):
                site.breach(f"{what}: the page has a script of the job's")
            page.unlink()


@attack(Who.USER, Must.REFUSE, Mode.NONE, times=4, daily=True)
def metrics_elsewhere(site: Site) -> None:
    """Have `vmgahp report` read a FIFO, a link to a device, a directory, a device."""
    site.node("fifo", os.mkfifo)
    site.link("link", "/dev/zero")
    site.node("directory", os.mkdir)
    for name in ("fifo", "link", "directory", "/dev/zero"):
        run(site, name, "report", name, "-o", site.outer / "report.html")


def submitted(site: Site, what: str, xml: str) -> tuple[str, str]:
    """Return what `vmgahp submit` says of this XML, and the submit file that it makes."""
    with tempfile.TemporaryDirectory(dir=site.outer) as directory:
        place = Path(directory)
        (place / "guest.img").write_bytes(bytes(1 << 20))
        (place / "vm.xml").write_text(xml)
        said = run(site, what, "submit", "libvirt-xml", place / "vm.xml", "--lax", "-o", place / "vm.sub")
        return said, (place / "vm.sub").read_text() if (place / "vm.sub").exists() else ""


@attack(Who.STRANGER, Must.REFUSE, Mode.NONE, times=len(NAMES) + len(SOURCES))
def submit(site: Site) -> None:
    """Have `vmgahp submit libvirt-xml` read a stranger's XML with hostile names and images."""
    for name, source in [(name, "guest.img") for name in NAMES] + [("x", source) for source in SOURCES]:
        quoted = [text.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&apos;") for text in (name, source)]
        text = DOMAIN.format(name=quoted[0], source=quoted[1]).replace("\n", "&#10;").replace("\r", "&#13;")
        _, made = submitted(site, name + source, text.replace("\x1b", "").replace("\x07", ""))
        if [line for line in made.splitlines() if line.strip().lower().startswith(("queue 99", "+owner"))]:
            site.breach(f"{name!r} adds a line to the submit file")


@attack(Who.STRANGER, Must.REFUSE, Mode.NONE, times=4)
def submit_others(site: Site) -> None:
    """Name /etc/shadow and other files outside of its directory as images in the stranger's XML."""
    for source in ("/etc/shadow", str(CANARIES / "root"), "/root/.ssh/id_rsa", "../../../../etc/shadow"):
        said, made = submitted(site, source, DOMAIN.format(name="x", source=source))
        taken = [line for line in made.splitlines() if not line.startswith("#") and source in line]
        if taken and "outside" not in (said + made).lower() and "warning" not in said.lower():
            site.breach(f"{source} goes with the job without a warning: {taken}")


@attack(Who.STRANGER, Must.REFUSE, Mode.NONE, times=len(TRANSCRIPTS))
def replay(site: Site) -> None:
    """Have `vmgahp replay` read files that are no conversation."""
    for content in TRANSCRIPTS:
        site.plant("conversation", content)
        run(site, repr(content[:20]), "replay", "conversation", "--", sys.executable, "-c", "pass")


@attack(Who.USER, Must.REFUSE, Mode.NONE, times=2)
def top(site: Site) -> None:
    """Have `vmgahp top` show a machine whose jobs have hostile names and files."""
    site.plant("vm_metrics.jsonl", METRICS["escape sequences"][0])
    run(site, "once", "top", "--once")
    run(site, "as JSON", "top", "--json")


test_nothing_comes_of_it = each(__name__)
