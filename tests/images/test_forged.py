"""Answers of a qemu-img that a process of the job's user traces: whatever they are, the job is at fault."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vmgahp.errors import JobFault
from vmgahp.host.job_user import Identity
from vmgahp.images import formats, qemu_img
from vmgahp.images.qemu_img import Trouble


@pytest.fixture
def forged(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Replace the output of qemu-img."""

    def say(said: bytes) -> None:
        monkeypatch.setattr(qemu_img, "_run", lambda *_, **__: said)

    return say


INFOS = (
    b"[]",
    b"1",
    b"null",
    b"{}",
    b"[" * 100_000,
    b'{"virtual-size": "1"}',
    b'{"virtual-size": -1}',
    b'{"virtual-size": 1e999}',
    b'{"virtual-size": [1]}',
    b'{"virtual-size": 1, "full-backing-filename": ["/etc/passwd"]}',
    b'{"virtual-size": 1, "backing-filename": {}}',
    b'{"virtual-size": 1, "backing-filename": "/a", "backing-filename-format": []}',
    b'{"virtual-size": 1, "backing-filename": "/a", "backing-filename-format": "\\ud800"}',
    b"\xff",
)


@pytest.mark.parametrize("said", INFOS, ids=lambda said: repr(said[:70]))
def test_a_forged_description_is_the_fault_of_the_job(
    forged: Callable[[bytes], None], scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    image = scratch / "disk.qcow2"
    image.write_bytes(bytes(1024))
    monkeypatch.setattr(formats, "unfit", lambda *_: "")
    forged(said)
    with pytest.raises(JobFault):
        formats.backing_chain(str(image), "qcow2", user)


@pytest.mark.parametrize("said", [b"[]", b"{}", b'{"required": null}', b'{"required": -1}', b'{"required": true}'])
def test_a_forged_measure_is_trouble(forged: Callable[[bytes], None], said: bytes) -> None:
    forged(said)
    with pytest.raises(Trouble):
        qemu_img.measure("/dev/null", "raw", "qcow2")


@pytest.mark.parametrize("said", [b"(inf/100%)", b"(-inf/100%)", b"(nan/100%)", b"(1e999/100%)", b"(x/100%)"])
def test_a_forged_progress_is_not_reported(said: bytes) -> None:
    told: list[float] = []
    qemu_img._tell(told.append, bytearray(b"    (1.00/100%)\r" + said), bytearray())
    assert told == []
