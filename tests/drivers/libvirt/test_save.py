"""How libvirt is told to write the memory of a VM, and what is kept of it."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import libvirt
import pytest

from tests.checkpoint.support import image
from tests.drivers.libvirt.support import libvirt_error
from vmgahp import lifecycle
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.drivers.libvirt.life import save
from vmgahp.drivers.libvirt.life.guest import LibvirtGuest
from vmgahp.drivers.libvirt.life.machine import LibvirtMachine
from vmgahp.drivers.libvirt.link import domains
from vmgahp.drivers.libvirt.link.connection import LibvirtConnection, Watch
from vmgahp.drivers.libvirt.start.describe import panic_model
from vmgahp.drivers.managed import Deadlines
from vmgahp.drivers.resources import Resources
from vmgahp.errors import MachineFault
from vmgahp.host import child
from vmgahp.host.job_user import Identity
from vmgahp.job.devices import Devices


class Domain:
    """Notes how it is saved."""

    def __init__(self) -> None:
        self.saved: list[object] = []
        self.connect: Callable[[], object] = pytest.fail

    def saveFlags(self, _path: str, _xml: object, flags: int) -> None:
        self.saved += [None, flags]

    def saveParams(self, parameters: dict[str, str], flags: int) -> None:
        self.saved += [parameters["image_format"], flags]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_system_of_the_job_that_never_answers_refuses_the_save(scratch, user, monkeypatch):
    monkeypatch.setattr(child, "DEADLINE", 0.3)
    monkeypatch.setattr(os, "statvfs", lambda _: time.sleep(20))
    saver = save.Saver(str(scratch), user, Settings({}), pytest.fail)
    with pytest.raises(MachineFault, match=r"cannot be saved: .* cannot be examined"):
        saver._require_free_space(1)


def libvirtd(version: int, qemu: int, model: str = "selinux") -> SimpleNamespace:
    """One by its versions, and by what confines its guests."""
    confined = f"<capabilities><host><secmodel><model>{model}</model></secmodel></host></capabilities>"
    answers = {"getLibVersion": version, "getVersion": qemu, "getCapabilities": confined}
    return SimpleNamespace(**{name: Mock(return_value=answer) for name, answer in answers.items()})


NEW, OLD_LIBVIRT, OLD_QEMU = (11_002_000, 9_000_000), (11_001_000, 9_000_000), (11_002_000, 8_002_000)
CONFINING = *NEW, "apparmor"


@pytest.mark.parametrize(
    ("setting", "daemon", "what", "wanted"),
    [
        ("zstd", None, "a suspend", "zstd"), ("zstd", None, "a checkpoint", "zstd"),
        ("sparse", NEW, "a suspend", "sparse"), ("sparse", NEW, "a checkpoint", "sparse"),
        ("sparse", OLD_QEMU, "a suspend", None), ("sparse", CONFINING, "a checkpoint", None),
        ("", NEW, "a suspend", "sparse"), ("", NEW, "a checkpoint", None), ("", NEW, "it may travel", None),
        ("", NEW, "it cannot be held", None), ("", OLD_LIBVIRT, "a suspend", None), ("", OLD_QEMU, "a suspend", None),
        ("", CONFINING, "a suspend", None),
    ],
)  # fmt: skip
def test_the_format_is_that_of_the_setting_or_sparse_where_that_can_be_restored_and_stays(
    setting, daemon, what, wanted, scratch, user, monkeypatch
):
    """One that could not be restored is not written even where a setting asks for it, and the log says so."""
    monkeypatch.setattr(libvirt, "VIR_DOMAIN_SAVE_PARAM_IMAGE_FORMAT", "image_format", raising=False)
    monkeypatch.setattr(save.substitute, "can_be_held", lambda _descriptor: what != "it cannot be held")
    log: list[str] = []
    saver = save.Saver(str(scratch), user, Settings({"VM_MEMORY_IMAGE_FORMAT": setting}), log.append)
    saver.may_travel = what == "it may travel"
    domain = Domain()
    domain.connect = lambda: libvirtd(*daemon)
    file = saver.begin("vm_suspend.mem", 1024)
    try:
        saver.write(domain, file.path, checkpoint=what == "a checkpoint")
    finally:
        file.close()
    assert domain.saved == [wanted, 0]
    assert bool(log) == (setting == "sparse" and wanted is None)
    assert "sparse" in saver.formats()


MEMORY = b"QEVM" + b"what a guest remembers " * 100_000


def test_a_format_that_libvirt_cannot_have_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(libvirt, "VIR_DOMAIN_SAVE_PARAM_IMAGE_FORMAT", raising=False)
    monkeypatch.setattr(save, "QEMU_CONF", str(tmp_path / "qemu.conf"))
    Path(save.QEMU_CONF).write_text('save_image_format = "lzop"\n')
    for form, complaint in (("", False), ("lzop", False), ("zstd", True)):
        log: list[str] = []
        domain = Domain()
        settings = Settings({"VM_MEMORY_IMAGE_FORMAT": form})
        saver = save.Saver(str(tmp_path), Identity(54321, 54321), settings, log.append)
        saver.write(domain, "/path", checkpoint=True)
        assert domain.saved == [None, 0]
        assert bool(log) == complaint
        assert "lzop" in saver.formats()


def test_an_image_that_cannot_have_its_name_can_be_restored_at_once(scratch: Path, user: Identity) -> None:
    """A sparse one too, which nobody may have open who could write to it."""
    settings = Settings({"VM_MEMORY_IMAGE_FORMAT": "sparse"})
    saver = save.Saver(str(scratch), user, settings, pytest.fail)
    saver.seconds = 60.0
    (scratch / "vm_suspend.mem").mkdir()
    file = saver.begin("vm_suspend.mem", 1024)
    xml = b"<domain>" + b" " * 64 + b"</domain>\0"
    with open(file.path, "wb") as out:
        out.write(image(xml, number=6) + MEMORY)
    with pytest.raises(OSError, match="directory"):
        file.keep()
    with saver.substitute(file.to_restore(), "<domain/>") as whole:
        assert b"<domain/>" in Path(whole.path).read_bytes()
    file.close()
    assert [path.name for path in scratch.iterdir()] == ["vm_suspend.mem"]


def failing(code: int, said: str) -> Callable[..., None]:
    """A call to libvirt that fails so."""

    def call(*_: object, **_more: object) -> None:
        raise libvirt_error(code, libvirt.VIR_FROM_QEMU, said)

    return call


def test_a_save_says_why_libvirtd_cannot_open_its_file() -> None:
    call = failing(libvirt.VIR_ERR_SYSTEM_ERROR, "Failed to create file '/proc/7/fd/9': Permission denied")
    guest = SimpleNamespace(connection=SimpleNamespace(once=call))
    machine = SimpleNamespace(name="vm", guest=guest, saver=save.Saver)
    with pytest.raises(MachineFault, match=r"root_squash.*Permission denied"):
        LibvirtMachine._write(machine, SimpleNamespace(path="/proc/7/fd/9"), checkpoint=False)  # type: ignore[arg-type]


def test_a_qemu_that_is_absent_at_a_restart_is_named(
    scratch: Path, user: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "invalid argument: Cannot find suitable emulator for x86_64"
    connection = SimpleNamespace(call=failing(libvirt.VIR_ERR_INVALID_ARG, said))
    checkpoints = save.LibvirtCheckpoints(save.LIBVIRT, user, connection, print)  # type: ignore[arg-type]
    store = SimpleNamespace(forget_interrupted=lambda: None, load=lambda: "a checkpoint", check=None, now=None)
    monkeypatch.setattr(checkpoints, "store", lambda _: store)
    vm = SimpleNamespace(working_dir=str(scratch), name="vm")
    spec = SimpleNamespace(vm=vm, disks=(), devices=SimpleNamespace(run=None))
    plan = SimpleNamespace(spec=spec, may_restart=True, checkpoint_spec=spec, domain_type="qemu")
    monkeypatch.setattr("vmgahp.drivers.libvirt.start.disks.Provision.make", lambda *_: None)
    monkeypatch.setattr("vmgahp.drivers.libvirt.program.warm.find", lambda *_: None)
    driver = SimpleNamespace(settings=None, identity=user, checkpoints_of=checkpoints, _describer=None, log=print)
    with pytest.raises(MachineFault, match=said) as caught:
        LibvirtDriver.prepare(driver, plan, SimpleNamespace(not_started=[]))  # type: ignore[arg-type]
    assert "install QEMU" in caught.value.hint


def test_an_error_of_libvirts_at_a_question_is_the_machines_fault() -> None:
    class Failing:
        call = staticmethod(failing(libvirt.VIR_ERR_RPC, "no answer"))
        ask = LibvirtConnection.ask

    spec = SimpleNamespace(devices=Devices(arch="aarch64"))
    with pytest.raises(MachineFault, match="asking what libvirt can do"):
        panic_model(spec, "qemu", Failing())  # type: ignore[arg-type]


def test_a_guest_whose_libvirtd_ends_at_the_word_to_run_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait, paused, until its job is removed."""
    told: list[str] = []
    watch = Watch("job")

    def resume() -> None:
        told.append("run")
        if len(told) == 1:
            raise libvirt_error(libvirt.VIR_ERR_RPC, libvirt.VIR_FROM_RPC, "received hangup event on socket")
        watch.resumed.set()

    domain = SimpleNamespace(info=lambda: [libvirt.VIR_DOMAIN_PAUSED], resume=resume, XMLDesc=lambda: "")
    monkeypatch.setattr(domains, "find", lambda *_: domain)
    connection: Any = SimpleNamespace(watch=lambda *_: watch, once=lambda call: call(None))
    connection.call = lambda call, seconds=0: call(None)
    guest = LibvirtGuest("job", "uuid", "qemu", connection, lambda _: None)
    guest.begin(lambda _: domain, lambda *_: None)
    assert told == ["run", "run"]


def test_a_checkpoint_with_the_uuid_of_a_suspended_vm_of_another_job_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save, "is_claimed", lambda uuid: uuid == "theirs")
    monkeypatch.setattr(save, "CLAIM_WAIT", 0.1)
    no_domain = libvirt_error(libvirt.VIR_ERR_NO_DOMAIN, 10, "no domain")
    connection = Mock(call=Mock(side_effect=no_domain))  # for it is suspended
    checkpoints = save.LibvirtCheckpoints(save.LIBVIRT, Identity(1, 1), connection, pytest.fail)
    store = Mock(load=lambda: SimpleNamespace(facts={"uuid": "theirs"}))
    monkeypatch.setattr(checkpoints, "store", lambda _spec: store)
    monkeypatch.setattr(checkpoints, "here", lambda _type: {})
    with pytest.raises(save.Unusable, match="another VM on this machine has its UUID"):
        checkpoints.find(SimpleNamespace(vm=None, disks=()), "qemu")  # type: ignore[arg-type]


@pytest.fixture(params=[lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> LibvirtMachine:
    """A VM whose memory was just written, by a save with an unknown outcome."""
    guest = Mock(uuid="u", type="kvm", watch=Watch("vm"))
    saver = save.Saver(str(tmp_path), Identity(os.geteuid(), os.getegid()), Settings({}), lambda _: None)
    made = LibvirtMachine(guest, Resources(print), saver, Deadlines(1, 1, 1), print)
    made.name, made.state, made.saved_xml = "vm", request.param, "<domain/>"
    made.end_guest = made.restart_from = lambda *_: None
    made.unsure = saver.begin(save.SUSPEND_FILE, 1024)
    return made


def test_a_guest_whose_memory_cannot_have_its_name_is_as_before(saved: LibvirtMachine, tmp_path: Path) -> None:
    (tmp_path / save.SUSPEND_FILE).mkdir()
    with pytest.raises(MachineFault, match="cannot be kept"):
        saved._keep(saved.unsure)
    assert saved.guest.operate.called == (saved.state is lifecycle.SOFT_SUSPENDED)
    assert saved.unsure is None, "its outcome is known"


def test_memory_that_cannot_be_restored_by_an_error_of_a_file_stays(saved: LibvirtMachine, tmp_path: Path) -> None:
    (tmp_path / save.SUSPEND_FILE).mkdir()
    saved.restart_from = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    saved._keep(saved.unsure)
    assert (tmp_path / saved.image).exists()


def test_the_image_of_a_save_with_unknown_outcome_is_closed_before_the_next(saved: LibvirtMachine) -> None:
    saved.guest.call.return_value = [0]
    saved.guest.operate.return_value = ([3, 1024, 1024, 1, 10**9], "<domain/>", "<domain/>")
    saved.pid, saved._write = lambda: 1, lambda *_, **__: None
    before = len(os.listdir("/proc/self/fd"))
    saved.save(lifecycle.SUSPEND)
    assert len(os.listdir("/proc/self/fd")) == before - 1
