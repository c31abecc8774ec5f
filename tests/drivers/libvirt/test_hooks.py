"""The administrator's policy on real domains: what it makes of them is what runs, and nothing else."""

import os
import subprocess
from pathlib import Path

import libvirt
import pytest

from tests import REPOSITORY
from tests.commands.doctor.support import Ad, Condor, ad, as_root, named, offers, pool, tried
from tests.domain.support import host, spec
from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import CRITICAL, MAC, USER_NETWORK, Job, greeted, refused_cleanly, running, runs
from tests.lab.guest import make_guest
from tests.lab.programs import a_program
from tests.lab.starter import FakeStarter
from vmgahp import config, errors
from vmgahp.domain import build as domain_xml
from vmgahp.drivers.libvirt.start import hooks
from vmgahp.errors import MISMATCHED
from vmgahp.findings import BAD, OFF, OK, Finding
from vmgahp.job.ad import JobAd
from vmgahp.job.policy_view import PolicyView

pytestmark = pytest.mark.libvirt

__all__ = ["ad", "pool"]

EXAMPLES = REPOSITORY / "config" / "policy"
NETWORK = ("JobVMNetworking = true", 'JobVMNetworkingType = "user"')


def stage(directory: Path, body: str, name: str = "stage") -> Path:
    return a_program(directory / name, body)


def example(directory: Path, name: str, old: str, new: str) -> Path:
    text = (EXAMPLES / name).read_text()
    assert old in text
    path = directory / name
    path.write_text(text.replace(old, new))
    path.chmod(0o755)
    return path


def capped(directory: Path) -> tuple[Path, Path]:
    """Two of the examples, with a cap that the job exceeds."""
    return (
        example(directory, "cap-memory.xsl", '"512"', '"48"'),
        example(directory, "add-watchdog.xsl", "i6300esb", "i6300esb"),
    )


def test_what_the_policy_makes_of_it_is_what_runs(job: Job, tools: Path) -> None:
    stages = (
        *capped(tools),
        stage(tools, f'exec sed \'s/<model type="virtio"/<mac address="{support.OTHER_MAC}"\\/><model type="e1000"/\''),
    )
    policy = ", ".join(map(str, stages))
    with FakeStarter(job.scratch) as starter, running(job, *NETWORK, VM_POLICY=policy, **USER_NETWORK) as peer:
        domain = job.live()
        assert domain.findtext("memory") == str(48 << 10)
        assert domain.find("devices/watchdog").get("model") == "i6300esb"
        assert [nic.get("address") for nic in domain.iterfind("devices/interface/mac")] == [support.OTHER_MAC]
        assert support.words_of(peer.run("STATUS", 1))["MAXMEMORY"] == str(48 << 10)
        said = '"The machine\'s administrator has changed the VM (6 lines, vm_policy.txt)"'
        starter.wait_for("set_job_attr_delayed", "ChirpVMPolicy", said)
        log = peer.quit()
    told = (job.scratch / "vm_policy.txt").read_text()
    assert '\n-  <memory unit="MiB">64</memory>\n+  <memory unit="MiB">48</memory>\n' in told
    assert str(tools) not in told
    assert f"VM_POLICY, stage 1 ({stages[0]}) changes the domain" in log
    assert '-  <memory unit="MiB">64</memory>' in log
    assert "its memory (KiB) is 49152, and the job asks for 65536" in log


def test_a_stage_that_changes_nothing_is_told_to_those_who_want_all(job: Job, tools: Path) -> None:
    keep = stage(tools, "exec cat")
    for flags, told in (("D_FULLDEBUG", True), ("", False)):
        with running(job, VM_POLICY=keep, VM_GAHP_DEBUG=flags) as peer:
            assert peer.run("STOP", 1)[0] == "0"
            assert ("changes nothing" in peer.quit()) == told
            assert not (job.scratch / "vm_policy.txt").exists()


def test_a_rejection_holds_the_job_and_the_next_one_runs(job: Job, tools: Path) -> None:
    no = stage(tools, 'grep -q "<vcpu>2<" && { echo "one CPU is enough"; exit 1; }; exit 7')
    good = stage(
        tools, 'xml=$(cat); case $xml in *"<vcpu>2<"*) echo "one CPU is enough"; exit 1;; esac; echo "$xml"', "good"
    )
    with greeted(job, VM_POLICY=good) as peer:
        assert "one CPU is enough" in refused_cleanly(peer, job, MISMATCHED, "JobVM_VCPUS = 2")
        runs(peer, job)
    with greeted(job, VM_POLICY=no) as peer:
        assert f"VM_POLICY, stage 1 ({no}) failed with exit status 7" in refused_cleanly(peer, job, CRITICAL)


def test_requirements_hold_the_job_of_any_driver(job: Job) -> None:
    with greeted(job, VM_POLICY_REQUIREMENTS='JobVMMemory < 64 || User == "bob@lab"') as peer:
        assert "VM_POLICY_REQUIREMENTS" in refused_cleanly(peer, job, MISMATCHED)
        runs(peer, job, "JobVMMemory = 48")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("exec sed 's/>64</>65</'", "memory"),
        ("exec sed 's/<vcpu>1</<vcpu>2</'", "CPUs"),
        ("exec sed 's/<vcpu>1</<vcpu>lots</'", "no number"),
        ("exec sed 's/<devices>/<devices><disk type=\"nonsense\"\\/>/'", "nonsense"),
    ],
)
def test_a_policy_that_gives_more_is_the_machines_fault(job: Job, tools: Path, body: str, named: str) -> None:
    path = stage(tools, body)
    with greeted(job, VM_POLICY=path) as peer:
        text = refused_cleanly(peer, job, CRITICAL)
        assert f"VM_POLICY = {path}" in text
        assert named in text


def test_a_mistake_of_the_jobs_own_stays_the_jobs(job: Job, tools: Path) -> None:
    wrong = 'VMPARAM_vm_Disk = "guest.img:hda:w:qcow2"'
    for path in (stage(tools, "exec cat"), tools / "missing"):
        with greeted(job, VM_POLICY=path) as peer:
            refused_cleanly(peer, job, "VMGAHP_ERR_BAD_IMAGE", wrong)


@pytest.mark.parametrize("wrong", ["<sound model='nonsense'/>", ""])
def test_what_no_policy_has_touched_is_not_its_fault(job, tools, wrong, monkeypatch):
    """A job whose option libvirt does not understand, on a machine with a policy that has changed something else."""
    build = domain_xml.build
    monkeypatch.setattr(domain_xml, "build", lambda *given: build(*given).replace("</devices>", f"{wrong}</devices>"))
    bad = stage(tools, "exec sed -e 's/>64</>48</' -e \"s,</devices>,<sound model='rubbish'/></devices>,\"")
    with support.driving(job, [], VM_POLICY=bad) as (driver, ad), pytest.raises(errors.Fault) as caught:
        driver.start(ad)
    assert type(caught.value) is (errors.JobFault if wrong else errors.MachineFault), caught.value.render()


def test_a_policy_that_changes_nothing_answers_for_nothing(tools: Path) -> None:
    xml = domain_xml.build(spec(), host())
    keep, less = stage(tools, "exec cat", "keep"), stage(tools, "exec sed 's/>64</>48</'", "less")
    for path, authors in ((keep, ""), (less, f"VM_POLICY = {less}")):
        settings = config.Settings({"VM_POLICY": str(path)})
        made = hooks.described(PolicyView(JobAd(()), settings), [].append, spec(), xml, dry=False)
        assert (made.authors, made.before_policy) == (authors, xml if authors else "")


def test_requirements_see_what_the_jobs_own_xml_adds(job: Job) -> None:
    brought = "<domain type='kvm'><name>x</name><devices><interface type='user'/></devices></domain>"
    job.put("domain.xml", brought)
    mine = 'VMPARAM_Libvirt_XML = "domain.xml"'
    with greeted(job, VM_POLICY_REQUIREMENTS="JobVMNetworking =!= true", **USER_NETWORK) as peer:
        assert "VM_POLICY_REQUIREMENTS" in refused_cleanly(peer, job, MISMATCHED, mine)
        runs(peer, job)
    with greeted(job, VM_POLICY_REQUIREMENTS="JobVMNetworking =?= true", **USER_NETWORK) as peer:
        runs(peer, job, mine)


def test_a_guest_goes_on_from_a_checkpoint_under_the_same_policy(job: Job, elsewhere: Path, tools: Path) -> None:
    make_guest(job.disk, seconds=5)
    hook = stage(tools, f'[ -n "$2" ] && echo "had $2" >&2 && echo "$2" || echo {MAC}', "hook")
    settings = {"VM_POLICY": ",".join(map(str, capped(tools))), "VM_MAC_HOOK": hook, **USER_NETWORK}
    support.vacate(job, *NETWORK, **settings)
    support.moved(job, elsewhere)
    with running(job, support.WANTS, *NETWORK, **settings) as peer:
        support.until(lambda: job.domain() is None, "the guest powers itself off")
        log = peer.quit()
    assert f"had {MAC}" in log
    assert log.count("changes the domain:") == 2
    assert job.console().count("vmgahp guest up") == 1, "it was not booted again"


def test_a_checkpoint_does_not_evade_a_policy_that_has_come_since(job: Job, elsewhere: Path, tools: Path) -> None:
    make_guest(job.disk, seconds=5)
    support.vacate(job)
    support.moved(job, elsewhere)
    with running(job, support.WANTS, VM_POLICY=example(tools, "cap-memory.xsl", '"512"', '"48"')) as peer:
        assert job.live().findtext("memory") == str(48 << 10)
        assert "memory (MiB) is 64" in peer.quit()
    assert job.console().count("vmgahp guest up") >= 1


def test_a_hooks_address_is_the_cards(job: Job, tools: Path) -> None:
    hook = stage(tools, f"echo {MAC}")
    with running(job, *NETWORK, VM_MAC_HOOK=hook, **USER_NETWORK) as peer:
        assert job.live().find("devices/interface/mac").get("address") == MAC
        assert f"VM_MAC_HOOK ({hook}) gives {job.name} the MAC address {MAC}" in peer.quit()


def test_a_hooks_address_that_is_taken_is_the_machines_fault(job, tools, connection, scratch):
    hook = stage(tools, f"echo {MAC}")
    other = support.another_vm(connection, f"{job.name}-other", support.nic_xml(MAC), libvirt.VIR_DOMAIN_START_PAUSED)
    with other, greeted(job, VM_MAC_HOOK=hook, **USER_NETWORK) as peer:
        assert f"VM_MAC_HOOK = {hook}" in refused_cleanly(peer, job, CRITICAL, *NETWORK)
        assert MAC in refused_cleanly(peer, job, MISMATCHED, *NETWORK, f'JobVM_MACADDR = "{MAC}"')


def test_one_address_for_two_cards(job: Job, tools: Path) -> None:
    with greeted(job, VM_MAC_HOOK=stage(tools, f"echo {MAC}"), **USER_NETWORK) as peer:
        assert "two NICs" in refused_cleanly(peer, job, CRITICAL, *NETWORK, 'VMPARAM_vm_NICs = "user, user"')


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_example_force_bridge(job: Job, tools: Path) -> None:
    bridge = f"vgp{os.getpid() % 100000}"
    subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "link", "set", bridge, "up"], check=True)
        with running(job, *NETWORK, VM_POLICY=example(tools, "force-bridge.xsl", "br-jobs", bridge), **USER_NETWORK):
            assert job.live().find("devices/interface/source").get("bridge") == bridge
    finally:
        subprocess.run(["ip", "link", "delete", bridge], check=False)


@as_root
class TestDoctor:
    """``vmgahp doctor --job`` shows what the policy makes of a job, and asks programs for a dry run."""

    def test_each_stages_effect_is_shown(self, pool: Condor, ad: Ad, tools: Path) -> None:
        cap = example(tools, "cap-memory.xsl", '"512"', '"40"')
        told = tools / "told"
        keep = stage(tools, f'echo "$VMGAHP_DRY_RUN" >>{told}; exec cat', "keep")
        hook = stage(tools, f'echo "$VMGAHP_DRY_RUN" >>{told}; echo {MAC}', "hook")
        settings = {"VM_POLICY": f"{cap}, {keep}", "VM_MAC_HOOK": hook, **USER_NETWORK}
        path = ad.write(*NETWORK, "JobVMVNCConsole = true")
        trial = tried(pool, path, offers(VM_Networking_Types="user"), **settings)
        assert {finding.verdict for finding in trial.findings} == {OK}
        assert '<memory unit="MiB">40</memory>' in trial.description
        assert MAC in trial.description
        assert [line for line in trial.policy if "VM_POLICY, stage 1: -" in line] == [
            'VM_POLICY, stage 1: -  <memory unit="MiB">48</memory>'
        ]
        assert f"VM_POLICY, stage 2 ({keep}) changes nothing" in trial.policy
        assert told.read_text() == "1\n1\n"

    def test_a_policy_is_a_finding_without_any_job(self, pool: Condor, tools: Path) -> None:
        def found(vm_type: str, policy: Path) -> Finding:
            return named(pool.examine(VM_TYPE=vm_type, VM_POLICY=policy).findings, "policy")

        missing, keep = found("qemu", tools / "none.xsl"), stage(tools, "exec cat")
        assert (missing.verdict, "No such file" in missing.seen) == (BAD, True)
        assert found("qemu", keep).verdict == OK
        unused = found("simulated", keep)  # no VM of this type goes through it
        assert (unused.verdict, "VM_POLICY_REQUIREMENTS" in unused.hint) == (OFF, True)
