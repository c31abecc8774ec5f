"""Pictures for the documents, of what is really said: the doctor of two machines, and a recording of the demo.

    python -m docs.pictures            as root, with the pool's root (scripts/pool-root); a minute

writes docs/images/doctor-healthy.svg, doctor-sick.svg and demo.svg. They are looked at, not compared: what a machine's
QEMU and kernel are called changes.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

from tests.lab.namespace import OUR_SERVER, REPOSITORY, Namespace, build_wheel
from tests.lab.pool import Pool

IMAGES = REPOSITORY / "docs/images"
WIDTH = 92
DOCTOR = str(Path(OUR_SERVER).with_name("vmgahp")) + " doctor --verbose"

MISTAKES = """
# What goes wrong on machines: a misspelling, KVM that does not work, a directory that is closed.
VM_MEMROY = 2048
VM_ALLOW_EMULATION = False
VM_NETWORKING = True
VM_NETWORKING_TYPE = nat
"""

FORMAT = """\
<svg class="terminal" viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px / {line_height}px "DejaVu Sans Mono", monospace; }}
{styles}
</style>
<defs>{lines}</defs>
<rect width="{terminal_width}" height="{terminal_height}" rx="8" fill="#1b1b1b"/>
<g transform="translate(9, 9)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""rich's own format would fetch its font from somewhere when it is looked at."""


def as_svg(text: str) -> str:
    """What a terminal of `WIDTH` columns shows of `text`, with its colors."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, file=io.StringIO(), width=WIDTH + 3, force_terminal=True, legacy_windows=False)
    console.print(Text.from_ansi(text))
    return console.export_svg(title="", code_format=FORMAT, unique_id="doctor")


def doctor(namespace: Namespace) -> str:
    """The doctor's words on a terminal of `WIDTH` columns."""
    on_a_terminal = f"stty cols {WIDTH}; {DOCTOR}"
    said = namespace.run("env", "TERM=xterm", "script", "-qc", on_a_terminal, "/dev/null", check=False).stdout
    return said.replace(str(Path(OUR_SERVER).parent), "/usr/libexec/condor")  # where the packages have it


LINE = re.compile(r"\x1b\[(\d+)m *([\d.]+)  (.*?)\x1b\[0m")
COLORS = {"36": "#5fd7d7", "32": "#87d787", "33": "#ffd787", "2": "#9e9e9e", "31": "#ff8787"}
HEIGHT, CHARACTER, LONGEST = 17, 7.9, 48
COMMENT = "2"
POLL = "> CONDOR_VM_STATUS"


def recording(text: str) -> str:
    """The demonstration as an SVG in which each line appears when it was said; all at once for who wants no motion.

    It is narrow, for telephones: lines are wrapped, and of the many times that HTCondor asks for the state only the
    first and the last are shown.
    """
    lines = LINE.findall(text)
    polls = [number for number, (_, _, line) in enumerate(lines) if line.startswith(POLL)]
    shown: list[tuple[str, str, str]] = []
    for number, (color, when, line) in enumerate(lines):
        between = polls[1] <= number < polls[-1]
        if not between or line.startswith("|"):
            parts = textwrap.wrap(line, LONGEST - 6, subsequent_indent="  ")
            shown += [(color, when, part) for part in parts]
        elif number == polls[1]:
            shown.append((COMMENT, when, f"# … {len(polls) - 2} more times that HTCondor asks"))
    parts, said = [], ""
    for number, (color, when, line) in enumerate(shown, 1):
        style = f"fill: {COLORS[color]}; animation-delay: {when}s"
        time, said = ("" if when == said else when), when
        parts.append(f'<text x="10" y="{number * HEIGHT + 6}" style="{style}">{time:>4}  {escape(line)}</text>')
    width, height = round(LONGEST * CHARACTER) + 20, len(shown) * HEIGHT + 20
    return f"""\
<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
text {{ font: 13px "DejaVu Sans Mono", monospace; white-space: pre; }}
@media (prefers-reduced-motion: no-preference) {{ text {{ animation: said 1ms both; }} }}
@keyframes said {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#1b1b1b"/>
{chr(10).join(parts)}
</svg>
"""


def demo() -> str:
    """What scripts/demo shows on a terminal."""
    command = ["script", "-qc", f"{sys.executable} -m tests.lab.demo", "/dev/null"]
    how = {"cwd": REPOSITORY, "stdin": subprocess.DEVNULL, "env": os.environ | {"TERM": "xterm"}}
    return subprocess.run(command, capture_output=True, text=True, **how).stdout


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "demo.svg").write_text(recording(demo()))
    with tempfile.TemporaryDirectory(prefix="vmgahp-pictures-") as directory:
        Path(directory).chmod(0o755)
        with Pool(Path(directory) / "pool").running(build_wheel(directory)) as pool:
            prompt = "\x1b[1m# vmgahp doctor --verbose\x1b[0m\n"
            (IMAGES / "doctor-healthy.svg").write_text(as_svg(prompt + doctor(pool.namespace)))
            with open(pool.namespace.path("/etc/condor/config.d/99-lab.config"), "a") as config:
                config.write(MISTAKES)
            pool.run("chmod", "700", "/var/lib/condor")
            (IMAGES / "doctor-sick.svg").write_text(as_svg(prompt + doctor(pool.namespace)))
    sys.stderr.write(f"Written: {IMAGES}/doctor-healthy.svg, doctor-sick.svg and demo.svg\n")


if __name__ == "__main__":
    main()
