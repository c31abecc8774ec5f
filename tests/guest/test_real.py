"""The guest's scripts in a real guest that has busybox alone, and the agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guest import real
from tests.guest.support import SCRIPTS, RunJob
from tests.lab import linux_guest

pytestmark = pytest.mark.qemu


_INIT = f"""{linux_guest.BEGIN}
export PATH=/bin
mkdir -p /run /tmp /etc /var/lib
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
cat >/agent <<'THE AGENT'
{(SCRIPTS / "agent").read_text()}
THE AGENT
sh /agent start
echo 'the agent has left'
poweroff -f
"""


@pytest.mark.skipif(linux_guest.why_not() != "", reason=linux_guest.why_not())
def test_busybox_with_the_agent(tmp_path: Path) -> None:
    linux_guest.make(tmp_path, init=_INIT)
    command = "cat in; id -u; echo fine > 'a b'; dd if=/dev/zero of=big bs=1k count=3000 2>/dev/null; kill -9 $$"
    job = RunJob(command, {"in": b"given\n"}, settings={"RUN_BOOT": "ready"})
    boots = ["-m", str(linux_guest.MEMORY_MIB), "-kernel", str(tmp_path / linux_guest.KERNEL)]
    boots += ["-initrd", str(tmp_path / linux_guest.INITRD), "-append", "console=ttyS0 quiet loglevel=0 panic=-1"]
    ran = real.run(job, tmp_path, boots, 250)
    assert ran.said == ["hello 1", "inputs 1", "started", "ended signal 9", f"outputs {ran.sizes[0]}", "off"], (
        ran.console
    )
    assert ran.out == "given\n31415\n"
    assert ran.files == {"a b": b"fine\n", "big": bytes(3_072_000)}
    assert ran.status == 0
