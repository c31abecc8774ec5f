"""Answers of a qemu-img that a process of the job's user traces: whatever they are, the job is at fault."""

import pytest

from vmgahp.images import qemu_img
from vmgahp.images.qemu_img import Trouble


@pytest.mark.parametrize("said", [b"[]", b"{}", b'{"required": null}', b'{"required": -1}', b'{"required": true}'])
def test_a_forged_measure_is_trouble(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(qemu_img, "_run", lambda *_, **__: said)
    with pytest.raises(Trouble):
        qemu_img.measure("/dev/null", "raw")


@pytest.mark.parametrize("said", [b"(inf/100%)", b"(-inf/100%)", b"(nan/100%)", b"(1e999/100%)", b"(x/100%)"])
def test_a_forged_progress_is_not_reported(said: bytes) -> None:
    told: list[float] = []
    qemu_img._tell(told.append, bytearray(b"    (1.00/100%)\r" + said), bytearray())
    assert told == []
