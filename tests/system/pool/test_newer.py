"""What matters to every job, once more under the newest HTCondor, libvirt and QEMU that there are."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.lab.guest import counts, make_guest
from tests.lab.namespace import LAB, OUR_SERVER, VMGAHP, newer_root, require_namespace, wheel_of
from tests.lab.pool import EXECUTE, Job, Pool
from tests.system.pool import outcomes
from tests.system.pool.outcomes import CHECKPOINT, END, START, assert_counted, assert_ended_with_its_guest, settle

pytestmark = pytest.mark.pool

SECONDS = 75
"""How long the guests count that are interrupted after the starter's sleep."""
CODE = 7
IMAGES = f"{LAB}/images"
SETTINGS = f"""
FILETRANSFER_PLUGINS = {OUR_SERVER.replace("condor_vm-gahp", "vmgahp-image-plugin")}
ENABLE_URL_TRANSFERS = True
VM_IMAGE_DIRS = {IMAGES}
"""
OVERLAY = f"transfer_input_files = nfs://{IMAGES}/base.raw:disk.qcow2\nvm_disk = disk.qcow2:hda:w:qcow2\n"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    require_namespace(newer=True)
    made = Pool(tmp_path_factory.mktemp("newer"), settings=SETTINGS, root=newer_root())
    (made.directory / "images").mkdir()
    make_guest(made.directory / "images/base.raw", 4)
    with made.running(wheel_of(tmp_path_factory)):
        made.advertised = made.offering()
        yield made


@pytest.fixture(scope="module")
def jobs(pool: Pool) -> Mapping[str, Job]:
    """Jobs side by side, each of which meets with something as soon as its starter listens."""
    said = f"vmgahp-exit-code: {CODE}"

    def submit(name: str, seconds: int | None, commands: str = "", words: str = "") -> Job:
        return pool.submit(name, lambda home: make_guest(home / "guest.img", seconds, last_words=words), commands)

    submitted = {
        "finishing": submit("finishing", 4, "+WantIOProxy = true\n", words=said),
        "suspended": submit("suspended", SECONDS),
        "checkpointed": submit("checkpointed", SECONDS, CHECKPOINT),
        "held": submit("held", None),
        "removed": submit("removed", None),
        "killed": submit("killed", None, "on_exit_remove = true\n"),
        "transferred": pool.submit("transferred", lambda _: None, OVERLAY),
    }
    commands = {"suspended": "suspend", "checkpointed": "vacate_job", "held": "hold", "removed": "rm"}
    for name, command in commands.items():
        settle(pool, submitted[name])
        submitted[name].command(f"condor_{command}")
    return submitted


def test_it_is_another_htcondor_and_libvirt(pool: Pool) -> None:
    """Or this module would say nothing that the others do not."""
    assert {"nfs", "vmimage"} <= set(pool.advertised["HasFileTransferPluginMethods"].split(","))
    major, minor = map(int, pool.advertised["CondorVersion"].split()[1].split(".")[:2])
    assert (major, minor) >= (25, 14)
    assert int(pool.namespace.virsh("version", "--daemon").rpartition(" ")[2].split(".")[0]) >= 12


def test_the_exit_code_is_in_the_history_and_comes_home_and_the_job_ends_with_its_guest(pool, jobs):
    job = jobs["finishing"]
    job.wait_for_event("terminated", END)
    ad = job.ad()
    assert ad["JobStatus"] == 4
    assert (ad["ExitCode"], ad["ChirpVMExitCode"], ad["VMExitCode"]) == (CODE, CODE, CODE)
    found = json.loads((job.directory / "vm_exit.json").read_text())
    assert (found["exit_code"], found["ended_by"]) == (CODE, "powered off")
    ours = {"guest.img", "job.sub", "job.log", "vm_console.log", "vm_exit.json", "vm_metrics.jsonl"}
    assert {path.name for path in Path(job.directory).iterdir()} == ours
    assert_ended_with_its_guest(pool, jobs["finishing"])


def test_a_suspended_job_goes_on_where_it_was(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["suspended"]
    pool.wait_until("two STATUS=Suspended", lambda: pool.told(job).count("STATUS=Suspended") >= 2, END)
    job.command("condor_continue")
    assert_counted(job, SECONDS)


def test_a_vacated_job_goes_on_from_its_checkpoint(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["checkpointed"]
    outcomes.end_after_eviction(pool, job)
    assert_counted(job, SECONDS)


@pytest.mark.parametrize("name", ["held", "removed"])
def test_a_job_that_is_to_go_leaves_no_machine(pool: Pool, jobs: Mapping[str, Job], name: str) -> None:
    job = jobs[name]
    job.wait_for_event(name, END)
    pool.wait_until("QEMU to go", lambda: pool.qemu_of(job) is None, END)
    assert not job.is_running()


def test_the_kill_mode_takes_the_directory_that_the_startd_names(pool: Pool, jobs: Mapping[str, Job]) -> None:
    """Which is not the scratch directory any more: that is in it."""
    job = jobs["killed"]
    pool.wait_until("its QEMU", lambda: pool.qemu_of(job), START)
    scratch = pool.scratch(job)
    made = scratch.removesuffix("/scratch")
    assert made != scratch
    assert made.rpartition("/")[0] == EXECUTE
    who = "VMGAHP_USER_UID=$(id -u condor) VMGAHP_USER_GID=$(id -g condor)"
    pool.run("sh", "-c", f'{who} exec {OUR_SERVER} -f -t -M 4 vmtype libvirt match "$0"', made)
    assert pool.qemu_of(job) is None
    job.wait_for_event("terminated", END)


def test_a_job_runs_on_an_overlay_that_the_plugin_makes(pool: Pool, jobs: Mapping[str, Job]) -> None:
    job = jobs["transferred"]
    job.wait_for_event("terminated", END)
    look = ["qemu-img", "info", "--output=json", f"{LAB}/jobs/transferred/disk.qcow2"]
    assert json.loads(pool.run(*look).stdout)["backing-filename"] == f"{IMAGES}/base.raw"
    assert counts((job.directory / "vm_console.log").read_text()) == [1, 2, 3, 4]


def test_the_doctor_finds_the_machine_well(pool: Pool, jobs: Mapping[str, Job]) -> None:
    jobs["finishing"].wait_for_event("terminated", END)
    done = pool.run(VMGAHP, "doctor", "--json", check=False)
    found = json.loads(done.stdout)["findings"]
    assert [finding for finding in found if finding["verdict"] == "bad"] == []
    assert done.returncode == 0
    assert {finding["check"]: finding["verdict"] for finding in found}["startd"] == "ok"
