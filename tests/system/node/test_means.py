"""The means that jobs may ask for on a node that confines their guests: each is used, and nothing is denied."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.lab import linux_guest
from tests.lab.guest import make_guest
from tests.lab.node import USER, Node, NodeJob
from tests.system.node import steps
from tests.system.node.steps import TIME, assert_confined, assert_counted, guest_of, settle, suspend_and_continue
from tests.system.pool.outcomes import CHECKPOINT

pytestmark = pytest.mark.node

SECONDS = 60
IMAGES = "/srv/vmgahp"
CATALOG = """\
[counter]
path = "counter.raw"
format = "raw"

[small]
path = "small.raw"
format = "raw"
"""
SETTINGS = {
    "VM_CATALOG": f"{IMAGES}/catalog.toml", "VM_SHARE_SCRATCH": "virtiofs", "VM_SSH_PORTS": "22000-22009",
    "VM_ALLOW_HOST_LOOPBACK": "True", "VM_WARM_IMAGES": "small",
}  # fmt: skip

SWTPM_PROFILE = """\
include <tunables/global>
profile swtpm /usr/bin/swtpm {
  include <abstractions/base>
  include <abstractions/openssl>
  /usr/bin/swtpm rm,
  unix (send, receive) type=stream addr=none peer=(label=libvirt-*),
}
"""
"""AppArmor's confinement of swtpm, of which Debian has none: what Ubuntu's lets it do that is of use to a job's."""

OFFER = {
    "HasVM": True, "VM_Images": "counter,small", "VM_kvm_ATTR_share": "virtiofs",
    "VM_kvm_ATTR_tpm": True, "VM_kvm_ATTR_ssh": True,
}  # fmt: skip
OF_SMALL = ("--memory", "192", "--boot", "ready")
JOBS: Mapping[str, tuple[str, bool]] = {
    "nat": ("vm_networking = true\nvm_networking_type = nat\n", True),
    "user": ("vm_networking = true\nvm_networking_type = user\n+VMPARAM_vm_SSH = true\n", True),
    "display": ("vm_vnc = true\n+VMPARAM_vm_TPM = true\n", True),
    "overlay": ("vm_disk = catalog:counter:hda:w\ntransfer_input_files =\n", False),
    "shared": ("+VMPARAM_vm_Share = true\n", True),
}
"""By its name: lines of a submit file, and whether the job brings its disk."""


NO_PASST = "Debian's SELinux policy lets libvirt start no passt"


def networks(node: Node) -> str:
    """Name the kinds of networks that the probe finds there."""
    return "nat" if node.has_selinux else "nat,user"


def offer(node: Node) -> Mapping[str, object]:
    return {**OFFER, "VM_Networking_Types": networks(node)}


@pytest.fixture(scope="module")
def machine(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Node:
    """The node with networks, a catalog, shares and ports for ssh."""
    if reason := linux_guest.why_no_disk():
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("images")
    make_guest(place / "counter.raw", SECONDS)
    linux_guest.make_ready_disk(place / "small.raw")
    (place / "catalog.toml").write_text(CATALOG)
    node.run("mkdir", "-p", IMAGES)
    for file in place.iterdir():
        node.put(file, f"{IMAGES}/{file.name}")
    if node.has_selinux:  # as install.md says of each directory of images
        node.run("chcon", "--recursive", "--type", "virt_content_t", IMAGES)
    else:
        (place / "usr.bin.swtpm").write_text(SWTPM_PROFILE)
        node.put(place / "usr.bin.swtpm", "/etc/apparmor.d/usr.bin.swtpm")
        node.run("apparmor_parser", "-r", "/etc/apparmor.d/usr.bin.swtpm")
    node.run("virsh", "-c", "qemu:///system", "net-start", "default", check=False)  # it may be up
    node.set_up("--network", "nat,user", settings=SETTINGS)
    for _ in range(3):
        if offer(node).items() <= node.wait_for_offer().items():
            break
        node.run("systemctl", "restart", "condor", timeout=TIME)  # a probe leaves out what it has no time to find
    return node


@pytest.fixture(scope="module")
def jobs(machine: Node) -> Mapping[str, NodeJob]:
    """One job for each, which run at the same time, their guests confined."""
    made = {}
    for name, (lines, has_disk) in JOBS.items():
        if name == "user" and machine.has_selinux:
            continue
        files: Callable[[Path], object] = guest_of(SECONDS) if has_disk else lambda _home: None
        made[name] = machine.submit(name, files, lines)
    for job in made.values():
        assert_confined(machine, job)
    return made


def test_all_of_it_is_offered(machine: Node) -> None:
    ad = machine.wait_for_offer()
    assert {name: ad.get(name) for name in offer(machine)} == offer(machine)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_what_it_asks_for(jobs: Mapping[str, NodeJob], machine: Node, name: str) -> None:
    if name not in jobs:
        pytest.skip(NO_PASST)
    assert_counted(jobs[name], SECONDS)


def test_a_job_with_a_tpm_and_a_network_goes_on_after_a_suspension_and_from_its_checkpoint(machine: Node) -> None:
    lines = f"vm_vnc = true\n+VMPARAM_vm_TPM = true\nvm_networking = true\nvm_networking_type = nat\n{CHECKPOINT}"
    job = machine.submit("much", guest_of(90), lines)
    settle(machine, job)
    suspend_and_continue(machine, job)
    steps.vacate(machine, job)
    assert_counted(job, 90)


def test_a_slots_limits_reach_the_guest(machine: Node) -> None:
    job = machine.submit("limited", guest_of(None))
    assert_confined(machine, job)
    group = machine.wait_until("its control group", lambda: job.ask_of_qemu("cut -d: -f3 /proc/$pid/cgroup"), TIME)
    place = f"/sys/fs/cgroup{group.removesuffix('/emulator')}"  # systemd's own scope, above it, has no limit
    limits = machine.wait_until(
        "its limit of memory",
        lambda: [text for text in machine.run("cat", f"{place}/memory.max").stdout.split() if text != "max"],
        TIME,
    )
    assert 64 << 20 < int(limits[0]) < 1 << 30
    job.command("condor_rm")
    job.wait_for_event("removed", TIME)
    machine.wait_until("its QEMU to go", lambda: not job.confinement(), TIME)


def program(machine: Node, name: str, script: str) -> NodeJob:
    """Submit a program, and wait for the job's end."""
    home = machine.new_home(name)
    words = ["--image", "catalog:small", *OF_SMALL, "--boot-timeout", "1200", "--name", name, "--submit"]
    said = machine.run("vmgahp", "run", *words, "--", "sh", "-c", script, user=USER, cwd=home, timeout=300).stdout
    machine.run("ln", "-s", f"{name}.log", f"{home}/job.log", user=USER)
    job = NodeJob(machine, int(said.split(".")[0]), home)
    assert_confined(machine, job)
    job.wait_for_event("terminated", 4 * TIME)
    return job


def assert_in_a_guest(job: NodeJob, name: str, *, booted: bool) -> None:
    """Check that a program has run, and if its guest was booted for it."""
    assert job.file(f"{name}.out") == "in a guest\n"
    assert json.loads(job.file("vm_exit.json"))["exit_code"] == 3
    assert (linux_guest.UP in job.file("vm_console.log")) is booted


def test_programs_run_in_guests_that_boot_until_the_machine_has_one_that_has_booted(machine: Node) -> None:
    if "VM_Images_Warm" not in machine.machine():  # as it is after a first attempt
        for name in ("first", "second"):
            assert_in_a_guest(program(machine, name, "echo in a guest; exit 3"), name, booted=True)
    machine.wait_until("a guest that has booted", lambda: machine.machine().get("VM_Images_Warm") == "small", 4 * TIME)
    job = program(machine, "third", "echo in a guest; sleep 60; exit 3")  # it is seen while it runs
    assert_in_a_guest(job, "third", booted=False)


def test_nothing_was_denied(machine: Node, jobs: Mapping[str, NodeJob]) -> None:
    assert "\n".join(dict.fromkeys(machine.denied())) == ""
