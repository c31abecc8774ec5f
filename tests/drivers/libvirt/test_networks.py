"""Networking of type nat and bridge on a real libvirt network, made for the test and gone with it."""

import json
import os
from pathlib import Path

import libvirt
import pytest

from tests.drivers.libvirt.support import BRIDGE, LEASED, MAC, NETWORK_NAME, Job, network_ad, refused, running, words_of
from tests.peer import daemon, environment
from vmgahp.cli import PROBE
from vmgahp.errors import MISMATCHED

pytestmark = [pytest.mark.libvirt, pytest.mark.skipif(os.getuid() != 0, reason="only root has libvirt networks")]


def test_nat_with_the_address_of_its_lease(job: Job, network: "libvirt.virNetwork") -> None:
    settings = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "nat", "VM_NAT_NETWORK": NETWORK_NAME}
    with running(job, *network_ad("nat"), **settings) as peer:
        assert f"network='{NETWORK_NAME}'" in job.domain().XMLDesc()
        words = words_of(peer.run("STATUS", 1))
        assert words["MAC"] == MAC
        assert "IP" not in words
        # The guest asks for no address; this is what libvirt's helper writes when dnsmasq gives one out.
        lease = {"ip-address": LEASED, "mac-address": MAC, "hostname": "guest", "expiry-time": 2**31}
        leases = Path(f"/var/lib/libvirt/dnsmasq/{BRIDGE}.status")
        leases.write_text(json.dumps([lease]))
        try:
            assert words_of(peer.run("STATUS", 1))["IP"] == LEASED
        finally:
            leases.unlink()


def test_a_bridge(job: Job, network: "libvirt.virNetwork") -> None:
    settings = {"VM_NETWORKING_TYPE": "bridge", "VM_NETWORKING_BRIDGE_INTERFACE": BRIDGE}
    with running(job, *network_ad("bridge"), VM_NETWORKING=True, **settings):
        assert os.listdir(f"/sys/class/net/{BRIDGE}/brif"), "the guest's NIC is plugged in"


def test_a_network_that_is_not_there_is_not_offered_and_not_the_jobs_fault(job: Job) -> None:
    settings = {"VM_NETWORKING": True, "VM_NETWORKING_TYPE": "nat,user", "VM_NAT_NETWORK": "nowhere"}
    assert "VM_NAT_NETWORK" in refused(job, "VMGAHP_ERR_CRITICAL", *network_ad("nat"), **settings)
    ended = daemon(environment("kvm", job.scratch, VM_ALLOW_EMULATION=True, **settings), PROBE, "vmtype", "kvm")
    assert 'VM_Networking_Types = "user"' in ended.stdout
    assert "not offered: network nat: nowhere is not active, or not defined" in ended.stderr


def test_a_type_that_the_machine_does_not_offer_holds_the_job(job: Job) -> None:
    refused(job, MISMATCHED, *network_ad("bridge"), VM_NETWORKING=True, VM_NETWORKING_TYPE="user")
