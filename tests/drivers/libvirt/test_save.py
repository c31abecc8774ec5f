"""How libvirt is told to write the memory of a VM."""

from pathlib import Path

import pytest

from vmgahp.config import Settings
from vmgahp.host.job_user import Identity

libvirt = pytest.importorskip("vmgahp.drivers.libvirt.binding", reason="libvirt-python is not installed")
save = pytest.importorskip("vmgahp.drivers.libvirt.save")


class Domain:
    """Notes how it is saved."""

    def __init__(self) -> None:
        self.saved: list[object] = []

    def saveFlags(self, _path: str, _xml: object, flags: int) -> None:
        self.saved += [None, flags]

    def saveParams(self, parameters: dict[str, str], flags: int) -> None:
        self.saved += [parameters["image_format"], flags]


@pytest.mark.parametrize(
    ("values", "suspend", "checkpoint"),
    [
        ({}, [None, 0], [None, 0]),
        ({"VM_MEMORY_IMAGE_FORMAT": "zstd"}, ["zstd", 0], ["zstd", 0]),
        ({"VM_SUSPEND_IMAGE_FORMAT": "sparse"}, ["sparse", 0], [None, 0]),
        ({"VM_CHECKPOINT_IMAGE_FORMAT": "xz", "VM_MEMORY_IMAGE_FORMAT": "zstd"}, ["zstd", 0], ["xz", 0]),
        ({"VM_SUSPEND_BYPASS_CACHE": "true"}, [None, libvirt.VIR_DOMAIN_SAVE_BYPASS_CACHE], [None, 0]),
    ],
)
def test_the_format_and_the_settings_that_it_replaces(
    values: dict[str, str],
    suspend: list[object],
    checkpoint: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libvirt, "VIR_DOMAIN_SAVE_PARAM_IMAGE_FORMAT", "image_format", raising=False)
    for is_checkpoint, wanted in ((False, suspend), (True, checkpoint)):
        domain = Domain()
        saver = save.Saver(str(tmp_path), Identity(54321, 54321), Settings(values), pytest.fail)
        saver.write(domain, "/path", checkpoint=is_checkpoint)
        assert domain.saved == wanted
