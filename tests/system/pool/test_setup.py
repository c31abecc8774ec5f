"""``vmgahp setup`` on a machine with a real HTCondor: what it writes is read, and jobs run after the restart."""

import pytest
from tests.lab.guest import make_guest
from tests.lab.namespace import OUR_SERVER, VMGAHP
from tests.lab.pool import Pool
from tests.system.pool.outcomes import END, own_pool

pytestmark = pytest.mark.pool

FILE = "/etc/condor/config.d/60-vmgahp.config"
HOOK = "/etc/condor/vmgahp-prepare-job"
VANILLA = """\
universe = vanilla
executable = /bin/true
transfer_executable = false
log = job.log
"""
SETTINGS = ("VM_TYPE", "VM_MEMORY", "VM_GAHP_SERVER", "VM_GAHP_LOG", "VM_ALLOW_EMULATION")


def say_nothing_of_vms(pool: Pool) -> None:
    lines = pool.config.splitlines(keepends=True)
    pool.config = "".join(line for line in lines if not line.startswith(SETTINGS))


pool = own_pool("setup", "", say_nothing_of_vms)


def test_jobs_run_after_setup_and_a_restart(pool: Pool) -> None:
    assert not pool.machine().get("HasVM")
    given = ("--type", "kvm", "--memory", "512", "--network", "none", "--emulation", "--set", "VM_STOP_TIMEOUT=5")
    assert f"+VM_GAHP_SERVER = {OUR_SERVER}\n" in pool.run(VMGAHP, "setup", *given, "--dry-run").stdout
    assert not pool.namespace.path(FILE).exists()

    assert pool.run(VMGAHP, "setup", *given, "--yes", "--restart", timeout=120).stderr == ""
    assert pool.run("condor_config_val", "VM_GAHP_LOG").stdout.endswith("/log/VMGahpLog\n"), "its macro is worked out"
    assert f"VM_MEMORY = 512\n # from: {FILE}, line " in pool.run(VMGAHP, "config", "--changed").stdout
    assert pool.offering()["VM_Memory"] == 512
    pool.submit("after-setup", lambda home: make_guest(home / "guest.img", 3)).wait_for_event("terminated", END)

    qcow2 = "vm_disk = guest.img:hda:w:qcow2"
    wrong = pool.submit("wrong", lambda home: make_guest(home / "guest.img", 3), qcow2)
    other = pool.submit("other", lambda _home: None, template=VANILLA)
    wrong.wait_for_event("held", END)
    ad = wrong.ad()
    assert "guest.img" in ad["HoldReason"], "a sentence, and not HTCondor's word alone"
    assert "Hint: " in ad["HoldReason"]
    assert (ad["HoldReasonCode"], ad["HoldReasonSubCode"]) == (19, 1)
    other.wait_for_event("terminated", END)
    wrong.command("condor_rm")

    assert "is as it would be written" in pool.run(VMGAHP, "setup", "--yes").stdout
    pool.run(VMGAHP, "setup", "--remove", "--yes", "--restart")
    pool.wait_until("the machine to offer none", lambda: pool.machine().get("HasVM") is False, END)
    assert not pool.namespace.path(FILE).exists()
    assert not pool.namespace.path(HOOK).exists()
    pool.submit("after-removal", lambda _home: None, template=VANILLA).wait_for_event("terminated", END)


def test_who_may_not_write_is_told_what_root_types(pool: Pool) -> None:
    done = pool.run(VMGAHP, "setup", "--memory", "512", "--network", "none", "--yes", user="alice", check=False)
    assert done.returncode == 1
    assert f"You may not write {FILE}. As root, run: {VMGAHP} setup --type kvm --memory 512" in done.stderr
