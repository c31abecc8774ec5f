"""From the submit side to a guest: the port of the node, what tells of it, and the commands.

A namespace's root is a chroot, in which passt can make no namespaces: the guest is on a bridge. It asks for no address,
so that nobody listens at the port yet.
"""

import json

import pytest
from tests.lab.guest import BANNER, make_guest
from tests.lab.namespace import VMGAHP
from tests.lab.pool import USER, Pool
from tests.system.pool.outcomes import END, START, own_pool

pytestmark = pytest.mark.pool

SETTINGS = """
VM_NETWORKING = True
VM_NETWORKING_TYPE = bridge
VM_NETWORKING_BRIDGE_INTERFACE = labbr
VM_SSH_PORTS = 22000-22009
STARTER_UPDATE_INTERVAL = 15
SHADOW_QUEUE_UPDATE_INTERVAL = 15
"""


def make_bridge(pool: Pool) -> None:
    pool.run("ip", "link", "add", "labbr", "type", "bridge")
    pool.run("ip", "link", "set", "labbr", "up")


pool = own_pool("inside", SETTINGS, make_bridge)


def test_a_port_of_the_node_leads_in_and_the_submit_side_knows(pool: Pool) -> None:
    assert pool.offering()["VM_kvm_ATTR_ssh"] is True
    lines = "vm_networking = true\n+VMPARAM_vm_SSH = true\nrequirements = VM_kvm_ATTR_ssh"
    job = pool.submit("inside", lambda home: make_guest(home / "guest.img", None), lines)
    pool.wait_until("the job ad to say where", lambda: "ChirpVMSSH" in job.ad(), START + END)
    way = job.ad()["ChirpVMSSH"]
    assert way.startswith("22=127.0.0.1:2200")
    port = int(way.rpartition(":")[2])
    scratch = pool.scratch(job)
    told = json.loads(pool.namespace.path(f"{scratch}/vm_access.json").read_text())
    assert told == {"ssh": [{"guest_port": 22, "address": "127.0.0.1", "port": port}]}
    if not pool.namespace.path("/usr/sbin/sshd").exists():
        pytest.skip("the pool's root has no sshd: scripts/pool-root builds it anew")
    pool.wait_until("a STATUS", lambda: "STATUS=Running" in pool.told(job), START + END)
    ended = pool.run(VMGAHP, "ssh", f"{job.cluster}.0", "true", user=USER, check=False, timeout=90)
    assert ended.returncode == 255, ended.stderr
    assert "Connection refused" in ended.stderr, "by ssh on the node, to which condor_ssh_to_job has led"

    def shown() -> str:
        words = ("timeout", "20", VMGAHP, "attach", f"{job.cluster}.0")
        return str(pool.run(*words, user=USER, check=False, timeout=90).stdout)

    pool.wait_until("the console", lambda: BANNER in shown(), END)
    job.command("condor_rm")
