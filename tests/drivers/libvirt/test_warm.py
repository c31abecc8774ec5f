"""Jobs that go on from a guest that has booted: they need no boot, and nothing of one is in another."""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import WANTS, Job, done, moved, running, until
from tests.lab import linux_guest
from tests.lab.programs import a_program
from tests.peer import VMGAHP, environment
from vmgahp.errors import MISMATCHED_CHECKPOINT

pytestmark = [pytest.mark.libvirt, pytest.mark.skipif(os.getuid() != 0, reason="needs root")]

ON_IMAGE = (
    'VMPARAM_vm_Disk = "catalog:small:vda:w"', "JobVMMemory = 192", 'VMPARAM_vm_Run_Boot = "ready"',
    'VMPARAM_vm_Run_Inputs = ""', "VMPARAM_vm_Run_As_Root = true", 'TransferOutput = "vm_outputs/"',
)  # fmt: skip
TELL = "head -c 16 /dev/urandom | od -An -tx1; cat /etc/machine-id; hostname; date +%s; ls /sys/class/net; cat /etc/of"
HOME = "/var/lib/vmgahp-run/home"
COUNT = "for i in $(seq 6); do echo $i; sleep 1; done"
PREPARE = """\
date >/etc/machine-id
echo template >/etc/of
mkdir -p /etc/udhcpc
printf '#!/bin/sh\\n[ $1 != bound ] || { ifconfig $interface $ip; route add default gw $router; }\\n' >/bin/dhcp
chmod +x /bin/dhcp
ln -s /bin/dhcp /etc/udhcpc/default.script
"""


class Images:
    """A catalog with an image of a small Linux that has the agent, and the guests that have booted from it."""

    def __init__(self, place: Path) -> None:
        place.mkdir(mode=0o755)
        linux_guest.make_ready_disk(place / "small.raw", PREPARE)
        (place / "catalog.toml").write_text('[small]\npath = "small.raw"\nformat = "raw"\n')
        for file in place.iterdir():
            file.chmod(0o644)
        self.place, self.warm = place, place / "warm"
        self.settings = {"VM_CATALOG": place / "catalog.toml", "VM_WARM_DIR": self.warm, "VM_ALLOW_EMULATION": True}

    def image(self, *words: str) -> str:
        """Run ``vmgahp image``, and return what it says."""
        environ = environment("kvm", self.place, **self.settings)
        ended = subprocess.run([*VMGAHP, "image", *words], env=environ, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    def template(self) -> Path:
        [made] = self.warm.iterdir()
        return made


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    if reason := linux_guest.why_no_disk():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="vmgahp-test-") as place:
        Path(place).chmod(0o755)  # the users of jobs read the image
        made = Images(Path(place, "images"))
        made.image("warm", "small", "--memory", "192", "--boot", "ready")
        yield made


def printed(job: Job, settings: Mapping[str, object], command: str, *more: str) -> list[str]:
    """Run a program in a job's VM, and return the lines that it prints."""
    with running(job, *ON_IMAGE, f'VMPARAM_vm_Run = "{command}"', *more, **settings) as peer:
        until(lambda: job.domain() is None, "the guest powers itself off")
        peer.quit(status=0)
    return (job.scratch / "vm_stdout").read_text().split("\n")[:-1]


SYSTEMD_RUN = """\
#!/bin/sh
while [ "$1" != -- ]; do
    case $1 in --setenv=*) export "${1#--setenv=}" ;; esac
    echo "$1" >>"$0.words"
    shift
done
shift
{
    cd / && "$@"
    echo $? >"$0.status"
} >"$0.said" 2>&1 &
"""
"""A stand-in for systemd-run, since no systemd runs here: a program of the background, in the same environment."""


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def has_booted(job: Job) -> bool:
    return linux_guest.UP in (job.scratch / support.CONSOLE).read_text()


def test_the_second_job_of_a_size_has_the_machine_boot_a_guest(
    images: Images, scratch: Path, connection: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, place = a_program(tmp_path / "systemd-run", SYSTEMD_RUN), tmp_path / "warm"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    settings = images.settings | {"VM_WARM_DIR": place, "VM_WARM_IMAGES": "small"}
    ended = tmp_path / "systemd-run.status"
    for number in (1, 2, 3):
        home = scratch.parent / f"dir_{number}0"
        home.mkdir()
        os.chown(home, scratch.stat().st_uid, scratch.stat().st_gid)
        job = Job(home, connection)  # type: ignore[arg-type]
        assert printed(job, settings, "echo here") == ["here"]
        assert has_booted(job) is (number < 3)
        assert tool.with_name("systemd-run.words").exists() is (number > 1)
        if number == 2:
            until(lambda: read(ended), "the guest has booted")
            assert read(ended) == "0\n", read(tool.with_name("systemd-run.said"))
    [made] = place.glob("small-192-1-*")
    words = tool.with_name("systemd-run.words").read_text().splitlines()
    assert f"--unit=vmgahp-warm-{made.name}" in words


def test_two_jobs_go_on_from_one_guest_and_share_nothing(images: Images, scratch: Path, connection: object) -> None:
    before = {path.name: hashlib.sha256(path.read_bytes()).digest() for path in images.template().iterdir()}
    told = []
    for number in (1, 2):
        place = scratch.parent / f"dir_{number}0"
        place.mkdir()
        os.chown(place, scratch.stat().st_uid, scratch.stat().st_gid)
        job = Job(place, connection)  # type: ignore[arg-type]
        told.append(printed(job, images.settings, TELL))
        assert not has_booted(job)
        assert told[-1][2] == job.name.replace("_", "-").replace(".", "-")
        assert abs(int(told[-1][3]) - time.time()) < 30
        assert told[-1][4:] == ["lo", "template"]
    assert all(one != other for one, other in zip(told[0][:3], told[1][:3], strict=True)), told
    assert {path.name: hashlib.sha256(path.read_bytes()).digest() for path in images.template().iterdir()} == before


def test_the_program_has_its_own_user(images: Images, job: Job) -> None:
    more = ("VMPARAM_vm_Run_As_Root = false",)
    assert printed(job, images.settings, "id -un; touch made && ls; echo $HOME", *more) == ["job", "made", HOME]
    assert not has_booted(job)


def test_network_cards_are_plugged_in(images: Images, job: Job) -> None:
    assert printed(
        job,
        images.settings | support.USER_NETWORK,
        "cat /sys/class/net/e*/address; route -n | grep -c ^0",
        *support.network_ad("user"),
    ) == [support.MAC, "1"]
    assert not has_booted(job)


def test_such_a_job_can_be_saved_and_goes_on_where_there_is_no_template(
    images: Images, job: Job, elsewhere: Path
) -> None:
    program = f'VMPARAM_vm_Run = "{COUNT}"'
    stdout = job.scratch / "vm_stdout"
    with running(job, *ON_IMAGE, program, WANTS, **images.settings) as peer:
        until(lambda: "2\n" in stdout.read_text(), "the program counts to two")
        done(peer, "SUSPEND", "RESUME")
        until(lambda: "3\n" in stdout.read_text(), "the program counts to three")
        done(peer, "CHECKPOINT", "STOP")
    shutil.rmtree(job.scratch / "vm_outputs")
    moved(job, elsewhere)
    with running(job, *ON_IMAGE, program, WANTS, **images.settings | {"VM_WARM_DIR": elsewhere}) as peer:
        until(lambda: job.domain() is None, "the guest powers itself off")
        peer.quit(status=0)
    assert (job.scratch / "vm_stdout").read_text() == "".join(f"{number}\n" for number in range(1, 7))
    assert not has_booted(job)


@pytest.mark.parametrize("damage", ["vm_checkpoint.mem", "vm_checkpoint.json"])
def test_a_template_that_is_damaged_costs_a_boot_and_no_more(images: Images, job: Job, damage: str) -> None:
    file = images.template() / damage
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    try:
        assert printed(job, images.settings, "echo here") == ["here"]
    finally:
        file.write_bytes(whole)
    assert has_booted(job)


def test_a_template_that_others_could_have_changed_is_not_used(images: Images, job: Job) -> None:
    os.chown(images.template(), 54321, -1)
    try:
        assert printed(job, images.settings, "echo here") == ["here"]
    finally:
        os.chown(images.template(), 0, -1)
    assert has_booted(job)


def test_a_checkpoint_without_its_overlay_is_not_given_up_for_a_template(images: Images, job: Job) -> None:
    job.put("vm_checkpoint.json", "{}")
    support.refused(job, MISMATCHED_CHECKPOINT, *ON_IMAGE, 'VMPARAM_vm_Run = "true"', **images.settings)
    assert not job.domain()


def test_a_job_of_another_size_boots(images: Images, job: Job) -> None:
    assert printed(job, images.settings, "echo here", "JobVMMemory = 200") == ["here"]
    assert has_booted(job)
