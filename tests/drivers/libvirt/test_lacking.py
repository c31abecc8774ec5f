"""What a guest can have where something of what it takes is not installed, or does not run: never offered.

Each is moved out of sight in a machine of the test's own, with a libvirtd of its own.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import jobs
from tests.lab.guest import make_guest
from tests.lab.namespace import LAB, Namespace, require_namespace
from tests.lab.programs import a_program
from tests.peer import DAEMON, Peer, environment
from vmgahp.cli import PROBE
from vmgahp.errors import MISMATCHED
from vmgahp.host import packages

pytestmark = pytest.mark.libvirt

JOB_UID = 54321
PROGRAMS = ("swtpm", "swtpm_setup", "swtpm_ioctl")
FIRMWARES = "/usr/share/qemu/firmware"
OF_ARM, OF_X86 = ([path.name for path in Path(FIRMWARES).glob(f"*-{arch}*.json")] for arch in ("aarch64", "x86_64"))
WANTED = "VMPARAM_vm_TPM = true"
BROKEN = "swtpm does not answer: libtpms.so.0: no version information"


class Machine:
    """A namespace over this very system, from which something can be taken away."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.scratch = namespace.exchange / "dir_1"
        self.scratch.mkdir()
        self.scratch.chmod(0o755)
        disk = self.scratch / "guest.img"
        make_guest(disk)
        jobs.own(self.scratch, disk)

    def environment(self) -> dict[str, str]:
        outside = environment("qemu", self.scratch, VM_STOP_TIMEOUT=0)
        there = {"VMGAHP_CONFIG": f"{LAB}/dir_1.conf", "VMGAHP_WORKING_DIR": f"{LAB}/dir_1"}
        there |= dict.fromkeys(("VMGAHP_USER_UID", "VMGAHP_USER_GID"), str(JOB_UID))
        return outside | there | self.namespace.environment()

    def probe(self) -> subprocess.CompletedProcess[str]:
        """What the startd asks."""
        command = self.namespace.command([*DAEMON, "-f", "-t", "-M", str(PROBE), "vmtype", "qemu"])
        return subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=60)

    def start(self, wanted: str = WANTED) -> tuple[list[str], str]:
        """What a START of a job that asks for this ends with, and why."""
        why = self.scratch / "vm_error.txt"
        why.unlink(missing_ok=True)
        disk = '"guest.img:vda:w:raw"'
        with Peer(self.environment(), cwd=self.scratch, through=self.namespace.command([])) as peer:
            assert peer.line().startswith("$VMGahpVersion")
            peer.send_ad(*jobs.lines(f"{LAB}/dir_1", wanted, JobVMType='"qemu"', VMPARAM_vm_Disk=disk))
            result = peer.run("START", "qemu")
            peer.quit()
        return result, why.read_text() if why.exists() else ""

    @contextlib.contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """A machine on which these programs, or these firmwares, are not installed."""
        # libvirt reads a firmware's file whatever it ends with, but no hidden one.
        moved = {}
        for name in names:
            directory = FIRMWARES if name.endswith(".json") else "/usr/bin"
            moved[f"{directory}/{name}"] = f"{directory}/.{name}"
        for path, away in moved.items():
            self.namespace.run("mv", path, away)
        try:
            yield
        finally:
            for path, away in moved.items():
                self.namespace.run("mv", away, path)

    @contextlib.contextmanager
    def weak(self) -> Iterator[Path]:
        """A machine on which swtpm ends at once while there is a file of this name."""
        with self.without("swtpm"):
            program, broken = (self.namespace.path(path) for path in ("/usr/bin/swtpm", "/run/broken"))
            ends = "{ echo 'libtpms.so.0: no version information' >&2; exit 1; }"
            a_program(program, f'[ ! -e /run/broken ] || {ends}\nexec /usr/bin/.swtpm "$@"')
            try:
                yield broken
            finally:
                broken.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    require_namespace(pool=False)
    if any(not Path("/usr/bin", program).exists() for program in PROGRAMS):
        pytest.skip("this machine has no swtpm, or not its tools")
    with Namespace(tmp_path_factory.mktemp("tpm"), root="/") as namespace:
        namespace.start_libvirt()
        made = Machine(namespace)
        namespace.run("chown", f"{JOB_UID}:{JOB_UID}", f"{LAB}/dir_1", f"{LAB}/dir_1/guest.img")
        yield made


def test_what_is_offered_starts(machine: Machine) -> None:
    probed = machine.probe()
    assert "VM_qemu_ATTR_tpm = TRUE" in probed.stdout, probed.stderr
    result, why = machine.start()
    assert result == ["0", "1"], why


@pytest.mark.parametrize("missing", [*((program,) for program in PROGRAMS), PROGRAMS[1:], PROGRAMS], ids="-".join)
def test_what_is_not_there_is_not_offered(machine: Machine, missing: tuple[str, ...]) -> None:
    with machine.without(*missing):
        probed = machine.probe()
        result, why = machine.start()
    assert "VM_qemu_ATTR_tpm = FALSE" in probed.stdout
    for text in (probed.stderr, why):
        assert all(program in text for program in missing)
    assert "not offered: tpm: " in probed.stderr
    # A job that required no machine with a TPM: what keeps it from running here is said, with the cure.
    assert result == ["1", MISMATCHED]
    assert "VM_kvm_ATTR_tpm" in why
    assert packages.of_system("swtpm swtpm-tools") in why


def test_a_job_is_told_what_has_stopped_running_and_the_next_probe_offers_it_no_more(machine: Machine) -> None:
    """Nothing is kept of a probe: a START cannot tell a job that was offered it from one that never was."""
    with machine.weak() as broken:
        assert "VM_qemu_ATTR_tpm = TRUE" in machine.probe().stdout
        broken.touch()
        result, why = machine.start()
        probed = machine.probe()
    assert "VM_qemu_ATTR_tpm = FALSE" in probed.stdout
    assert f"not offered: tpm: {BROKEN}" in probed.stderr
    assert result == ["1", MISMATCHED]  # no job that asks for a TPM where none works takes the machine
    assert BROKEN in why


@pytest.mark.skipif(not OF_ARM, reason="no firmware for aarch64 is installed")
def test_an_architecture_whose_guests_boot_is_offered_and_no_other(machine: Machine) -> None:
    assert 'VM_qemu_ATTR_arches = "x86_64,aarch64"' in machine.probe().stdout
    with machine.without(*OF_ARM):
        assert 'VM_qemu_ATTR_arches = "x86_64"' in machine.probe().stdout
        result, why = machine.start('VMPARAM_vm_Arch = "aarch64"')
    assert result == ["1", MISMATCHED]
    assert "boots by the firmware uefi, and this machine has none for aarch64" in why


@pytest.mark.skipif(not OF_X86, reason="no firmware of UEFI is installed")
def test_each_kind_of_uefi_is_offered_where_it_is_installed(machine: Machine) -> None:
    """By the machine type that guests of UEFI get: some firmwares are for that one alone."""
    secure = [name for name in OF_X86 if "secure" in name]
    for missing, offered in ((), "bios,uefi,uefi-secure"), (secure, "bios,uefi"), (OF_X86, "bios"):
        with machine.without(*missing):
            assert f'VM_qemu_ATTR_firmware = "{offered}"' in machine.probe().stdout
