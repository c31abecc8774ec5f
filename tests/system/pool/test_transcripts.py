"""A recorder as VM_GAHP_SERVER: a real starter's conversation with the daemon, and neither notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.guest import BANNER, counts, make_guest
from tests.lab.namespace import LAB, OUR_SERVER, wheel_of, why_not
from tests.lab.pool import Pool
from tests.protocol.recordings import STARTER, for_everybody, outline

from vmgahp.protocol import transcript

pytestmark = pytest.mark.pool

START = 120
END = 150
SECONDS = 60
"""How long the guest counts: it must still run when the starter has slept its 30 s."""

PLACE = "/var/log/vmgahp"
WRAPPER = f"""\
#!/bin/sh
exec /opt/vmgahp/bin/vmgahp record -o {PLACE} -- {OUR_SERVER} "$@"
"""


def install(pool: Pool) -> None:
    pool.run("install", "-d", "-m", "700", PLACE)
    wrapper = pool.directory / "recorded-vm-gahp"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o755)


@pytest.fixture
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    pool = Pool(tmp_path_factory.mktemp("recorded-pool"), server=f"{LAB}/recorded-vm-gahp")
    try:
        pool.start(wheel_of(tmp_path_factory), install)
        yield pool
    finally:
        pool.stop()


def recorded(pool: Pool, mode: int) -> list[Path]:
    """The finished transcripts of the daemon's runs in one mode."""
    return [
        path
        for path in sorted(pool.namespace.path(PLACE).iterdir())
        if (rows := path.read_text().split("\n")) and f" -M {mode}" in rows[0] and rows[-2].startswith("exit ")
    ]


def test_a_real_starter_is_recorded(pool: Pool, request: pytest.FixtureRequest) -> None:
    pool.offering()
    probe = transcript.load(str(recorded(pool, 0)[0]))
    assert 'VM_Type = "kvm"' in probe.received()
    assert probe.exit_status == 0

    job = pool.submit("recorded", lambda home: make_guest(home / "guest.img", SECONDS), 'environment = "TOKEN=hush"')
    pool.wait_until("its guest", job.is_running, START)
    job.command("condor_suspend")
    pool.wait_until("a STATUS=Suspended", lambda: "STATUS=Suspended" in pool.told(job), END)
    job.command("condor_continue")
    job.wait_for_event("terminated", END)
    console = (job.directory / "vm_console.log").read_text()
    assert console.count(BANNER) == 1
    assert counts(console) == list(range(1, SECONDS + 1))

    [file] = pool.wait_until("the transcript's end", lambda: recorded(pool, 3), END)
    text = file.read_text()
    assert "hush" not in text
    for name in ("ClaimId", "TransferKey", "Environment"):
        assert f'> {name} = "<hidden>"\n' in text
    if request.config.getoption("--update-golden"):
        STARTER.write_text(for_everybody(text))
    assert outline(transcript.parse(text)) == outline(transcript.load(str(STARTER)))
