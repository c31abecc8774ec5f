"""IP addresses of VM_MAC_HOOK: how they reach the guest, and that they are given back whatever dies."""

import os
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree as etree

import libvirt
import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import ADDRESSES, BRIDGED, CRITICAL, MAC, NAT, Job, done, greeted, running, until
from tests.lab.programs import a_program
from vmgahp.drivers.libvirt.start import hooks
from vmgahp.host.runtime_dir import GIVEN

pytestmark = [pytest.mark.libvirt, pytest.mark.skipif(os.getuid() != 0, reason="needs root")]

FREE = str(ADDRESSES + 6)


class Hook:
    """A hook that gives one address, and keeps what it was asked."""

    def __init__(self, tools: Path, answer: str, more: str = "") -> None:
        self._calls = tools / "calls"
        text = f'echo "$VMGAHP_VM_NAME:$@{more}" >>{self._calls}\n[ "$3" ] || echo "{answer}"'
        self.path = a_program(tools / "hook", text)

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


def reserved(network: "libvirt.virNetwork") -> list[tuple[str | None, str | None]]:
    hosts = etree.fromstring(network.XMLDesc()).iterfind("ip/dhcp/host")
    return [(host.get("mac"), host.get("ip")) for host in hosts]


def notes(hook: Hook) -> list[str]:
    """The notes of this hook's addresses: others start VMs at the same time, and a note of theirs may go while read."""
    found = []
    for name in os.listdir(GIVEN) if os.path.isdir(GIVEN) else []:
        with suppress(FileNotFoundError):
            found += [name] if str(hook.path) in (Path(GIVEN) / name).read_text() else []
    return found


def test_an_address_is_reserved_as_long_as_the_vm_lives(job: Job, network: "libvirt.virNetwork", tools: Path) -> None:
    hook = Hook(tools, f"{MAC} {FREE}")
    with running(job, "JobVMNetworking = true", VM_MAC_HOOK=hook.path, **NAT) as peer:
        assert reserved(network) == [(MAC, FREE)]
        done(peer, "STOP")
        assert reserved(network) == []
        assert hook.calls() == [f"{job.name}:0 ", f"{job.name}:0 {MAC} release"]
        assert f"{FREE} is given back" in peer.quit()


def test_an_address_is_given_back_if_the_server_is_killed(job: Job, network: "libvirt.virNetwork", tools: Path) -> None:
    hook = Hook(tools, f"{MAC} {FREE}")
    with running(job, "JobVMNetworking = true", VM_MAC_HOOK=hook.path, **NAT) as peer:
        assert reserved(network) == [(MAC, FREE)]
        assert notes(hook)
        peer.process.kill()
        until(lambda: reserved(network) == [], "the address to be free")
        until(lambda: f"{job.name}:0 {MAC} release" in hook.calls(), "the hook to know")
        peer.process.wait()
        until(lambda: not notes(hook), "its note to be gone")


def test_a_note_stays_until_the_hook_knows(tools: Path) -> None:
    log: list[str] = []
    note = tools / "note"
    hook = a_program(tools / "hook", f'[ -e {note} ] && echo "$@" >>{tools}/told')
    for line in (f"vm\n1\n{MAC}\n10.0.0.7\n\ntest:///default\n{hook}\n10", "vm\n1"):
        note.write_text(line)
        hooks.give_back(log.append, str(note))
        assert not note.exists()
    assert (tools / "told").read_text() == f"1 {MAC} release\n"


def test_all_addresses_of_a_vm_are_given_back_at_one_go(job: Job, network: "libvirt.virNetwork", tools: Path) -> None:
    hook = Hook(tools, "52:54:00:77:00:0$1 10.9.8.$1/24", " $PPID")
    with running(job, 'VMPARAM_vm_NICs = "bridge, bridge"', VM_MAC_HOOK=hook.path, **BRIDGED) as peer:
        done(peer, "STOP")
    released = [call.split() for call in hook.calls() if "release" in call]
    assert [call[0] for call in released] == [f"{job.name}:0", f"{job.name}:1"]
    assert len({call[-1] for call in released}) == 1, "by one process, which has one deadline"


OUTSIDE = {
    "the host's": ADDRESSES + 1, "the last": ADDRESSES + 7, "another network's": ADDRESSES + 9, "far": "10.1.2.3",
}  # fmt: skip


@pytest.mark.parametrize("whose", OUTSIDE)
def test_an_address_that_the_network_does_not_have_is_the_hooks_fault(job, network, tools, whose):
    address = OUTSIDE[whose]
    hook = Hook(tools, f"{MAC} {address}")
    with greeted(job, VM_MAC_HOOK=hook.path, **NAT) as peer:
        said = support.refused_cleanly(peer, job, CRITICAL, "JobVMNetworking = true")
        assert f"gives {MAC} the address {address}" in said
    assert hook.calls()[-1].endswith("release")
    assert reserved(network) == []


def test_an_address_that_is_another_vms_stays_that_ones(job: Job, network: "libvirt.virNetwork", tools: Path) -> None:
    network.update(3, 4, -1, f"<host mac='52:54:00:00:00:01' ip='{FREE}'/>", 1)
    with greeted(job, VM_MAC_HOOK=Hook(tools, f"{MAC} {FREE}").path, **NAT) as peer:
        assert "VM_MAC_HOOK" in support.refused_cleanly(peer, job, CRITICAL, "JobVMNetworking = true")
    assert reserved(network) == [("52:54:00:00:00:01", FREE)]


def test_a_dry_run_reserves_nothing(job: Job, network: "libvirt.virNetwork", tools: Path) -> None:
    hook = Hook(tools, f"{MAC} {FREE}")
    with support.driving(job, [], "JobVMNetworking = true", VM_MAC_HOOK=hook.path, **NAT) as (driver, ad):
        assert MAC in driver.describe(ad)
    assert reserved(network) == []
    assert hook.calls() == [f"{job.name}:0 "]


def test_on_a_bridge_cloud_init_is_told(job: Job, network: "libvirt.virNetwork", tools: Path) -> None:
    hook = Hook(tools, f"{MAC} 10.9.8.7/24 10.9.8.1 10.9.8.2")
    job.put("user-data", "#cloud-config\n")
    with running(
        job, support.ON_VIRTIO, support.USER_DATA, "JobVMNetworking = true", VM_MAC_HOOK=hook.path, **BRIDGED
    ) as peer:
        seed = (job.scratch / "vm_cidata.iso").read_bytes()
        assert (
            f'{{"version": 2, "ethernets": {{"nic0": {{"match": {{"macaddress": "{MAC}"}}, "dhcp4": false, '
            '"addresses": ["10.9.8.7/24"], "routes": [{"to": "0.0.0.0/0", "via": "10.9.8.1"}], '
            '"nameservers": {"addresses": ["10.9.8.2"]}}}}'
        ).encode() in seed
        done(peer, "STOP")
    assert hook.calls()[-1].endswith("release")


def test_where_nothing_can_tell_the_guest_the_log_says_so(job: Job, network: "libvirt.virNetwork", tools: Path) -> None:
    hook = Hook(tools, f"{MAC} 10.9.8.7/24")
    with running(job, "JobVMNetworking = true", VM_MAC_HOOK=hook.path, **BRIDGED) as peer:
        assert "nothing tells the guest the address 10.9.8.7/24" in peer.quit()
