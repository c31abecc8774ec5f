"""Networking on a real libvirt network, made for the test and gone with it, and what guests reach by each kind."""

import contextlib
import json
import os
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest

from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import BRIDGE, MAC, NAT, USER_NETWORK, Job, network_ad, refused, running
from tests.lab import linux_guest
from tests.peer import daemon, environment
from vmgahp.cli import PROBE
from vmgahp.errors import MISMATCHED

pytestmark = [pytest.mark.libvirt, pytest.mark.skipif(os.getuid() != 0, reason="needs root")]


def test_nat_with_the_address_of_its_lease(job: Job, network: "libvirt.virNetwork") -> None:
    with running(job, *network_ad("nat"), **NAT) as peer:
        assert f"network='{support.NETWORK_NAME}'" in job.domain().XMLDesc()
        words = support.words_of(peer.run("STATUS", 1))
        assert words["MAC"] == MAC
        assert "IP" not in words
        # The guest asks for no address; this is what libvirt's helper writes when dnsmasq gives one out.
        lease = {"ip-address": support.LEASED, "mac-address": MAC, "hostname": "guest", "expiry-time": 2**31}
        leases = Path(f"/var/lib/libvirt/dnsmasq/{BRIDGE}.status")
        leases.write_text(json.dumps([lease]))
        try:
            assert support.words_of(peer.run("STATUS", 1))["IP"] == support.LEASED
        finally:
            leases.unlink()


def test_a_bridge(job: Job, network: "libvirt.virNetwork") -> None:
    with running(job, *network_ad("bridge"), **support.BRIDGED):
        assert os.listdir(f"/sys/class/net/{BRIDGE}/brif"), "the guest's NIC is plugged in"


def test_a_network_that_is_not_there_is_the_machines_fault_and_a_type_that_is_not_offered_the_jobs(job: Job) -> None:
    settings = USER_NETWORK | {"VM_NETWORKING_TYPE": "nat,user", "VM_NAT_NETWORK": "nowhere"}
    assert "VM_NAT_NETWORK" in refused(job, "VMGAHP_ERR_CRITICAL", *network_ad("nat"), **settings)
    ended = daemon(environment("kvm", job.scratch, VM_ALLOW_EMULATION=True, **settings), PROBE, "vmtype", "kvm")
    assert 'VM_Networking_Types = "user"' in ended.stdout
    assert "not offered: network nat: nowhere is not active, or not defined" in ended.stderr
    refused(job, MISMATCHED, *network_ad("bridge"), **USER_NETWORK)


# What a guest reaches


class Secret(socketserver.BaseRequestHandler):
    """Tells whoever connects what the address is that it was told by."""

    def handle(self) -> None:
        self.request.sendall(f"told by {self.request.getsockname()[0]}\n".encode())


@contextlib.contextmanager
def telling(address: str, port: int = 0) -> Iterator[int]:
    """The port of a service on an address of this machine's."""
    with socketserver.ThreadingTCPServer((address, port), Secret) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def loopback() -> Iterator[int]:
    with telling("127.0.0.1") as port:
        yield port


ASKS = """
for name in all eth0; do echo 1 >/proc/sys/net/ipv4/conf/$name/route_localnet; done
ip addr del 127.0.0.1/8 dev lo
ip route add 127.0.0.0/8 dev eth0 via $(sed 's/ .*//' /hosts)
for host in $(cat /hosts) 10.0.2.2 127.0.0.1; do
    echo "asked $host: $(timeout 5 nc $host {port} </dev/null 2>&1)"
done
echo asked all
"""
"""Behind `support.DHCP`: the guest asks its router, its name server, slirp's host and what it takes for loopback."""


def asks(linux: Job, nic: str, port: int, **settings: object) -> str:
    """What the guest says on its console of what answered it."""
    linux.own(*linux_guest.make(linux.scratch, f"<interface type='{nic}'/>"))
    linux.put("user-data", support.DHCP + ASKS.replace("{port}", str(port)))
    asked = (*support.LINUX, support.ON_VIRTIO, support.USER_DATA, "JobVMNetworking = true")
    with running(linux, *asked, **settings) as peer:
        support.run_to_its_end(peer, linux)
    console = linux.console()
    assert "asked all" in console, console
    return console


def test_user_networking_is_offered_only_where_this_machines_loopback_is_for_jobs(linux: Job, loopback: int) -> None:
    """A guest reads what listens there, and nothing that libvirt can say keeps it from that."""
    refused(linux, MISMATCHED, *network_ad("user"), VM_NETWORKING=True, VM_NETWORKING_TYPE="user")
    assert "told by 127.0.0.1" in asks(linux, "user", loopback, **USER_NETWORK)


def test_by_nat_a_guest_reaches_the_machine_but_not_its_loopback(linux, loopback, network):
    with telling(str(support.ADDRESSES + 1), loopback):
        console = asks(linux, "network", loopback, **NAT)
    assert f"told by {support.ADDRESSES + 1}" in console, console
    assert "told by 127" not in console, console
