"""The guest's scripts under every shell that a guest may have, from the agent to the poweroff."""

from collections.abc import Iterator

import pytest

from tests.guest.support import Machine, RunJob
from tests.lab import linux_guest, namespace

pytestmark = pytest.mark.skipif(namespace.why_not(pool=False) != "", reason=namespace.why_not(pool=False))


@pytest.fixture(scope="module", params=["dash", "bash", "busybox"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if request.param == "busybox" and not linux_guest.BUSYBOX.exists():
        pytest.skip("needs busybox")
    with namespace.Namespace(tmp_path_factory.mktemp("guest"), "/") as made:
        yield Machine(made, request.param)


def test_a_program_and_its_outputs(machine: Machine) -> None:
    ran = machine.run(
        RunJob(
            "cat data/in; echo to err >&2; mkdir results; echo fine > 'results/a b'; rm fit.py; exit 7",
            {"data": None, "data/in": b"given\n", "fit.py": b"pass\n"},
        )
    )
    assert ran.said == ["hello 1", "inputs", "started", "ended exit 7", f"outputs {ran.sizes[0]}", "off"]
    assert (ran.out, ran.err) == ("given\n", "to err\n")
    assert ran.files == {"results": b"", "results/a b": b"fine\n"}


def test_all_that_is_new_or_changed_comes_home_and_nothing_else(machine: Machine) -> None:
    files = ("same", "changed", "renamed", "deep/same", "deep/down/same", "full/same")
    inputs = dict.fromkeys(("deep", "deep/down", "full"), None) | dict.fromkeys(files, b"1")
    command = """
        echo 2 > changed; mv renamed 'new
name'; touch -- -dash "it's"; ln -s same link; mkdir empty; cp -p same copy; echo x > full/new; mkfifo fifo
    """
    found = {"changed": b"2\n", "new\nname": b"1", "-dash": b"", "it's": b"", "link": b"same", "copy": b"1"}
    assert machine.run(RunJob(command, inputs)).files == {**found, "empty": b"", "full": b"", "full/new": b"x\n"}


def test_outputs_by_name_and_pattern_or_none(machine: Machine) -> None:
    ran = machine.run(
        RunJob(
            "mkdir r; echo 1 > r/1; touch 'a b.png' -- -c.png other; mkdir deep; touch deep/x.csv",
            {"in": b"as it was"},
            outputs=["r", "*.png", "deep/*.csv", "*.none", "in"],
        )
    )
    assert sorted(ran.files) == ["-c.png", "a b.png", "deep/x.csv", "in", "r", "r/1"]
    assert ran.said[-1] == "off"
    ran = machine.run(RunJob("touch a", outputs=[]))
    assert ran.said[-2:] == ["outputs 0", "off"]
    assert ran.files == {}


def test_a_missing_output_is_told_when_the_others_are_home(machine: Machine) -> None:
    ran = machine.run(RunJob("touch a", outputs=["results", "a"]))
    assert ran.files == {"a": b""}
    assert ran.said[-2:] == [f"outputs {ran.sizes[0]}", "failed outputs results is not there"]
    assert machine.run(RunJob("exit 3", outputs=["results"])).said[-3:] == ["ended exit 3", "outputs 0", "off"]


def test_the_environment_signals_and_streams(machine: Machine) -> None:
    values = {"A": "1", "B": "it's\n$(id) `id` \\", "work": "w", "become": "b", "UID": "7", "PATH": "/usr/bin:/bin:/m"}
    ran = machine.run(RunJob('printf "%s|" "$A" "$B" "$work" "$become" "$PATH"', environment=values))
    assert ran.out == f"1|{values['B']}|w|b|/usr/bin:/bin:/m|"
    assert "ended signal 11" in machine.run(RunJob("kill -SEGV $$")).said
    assert "ended signal 9" in machine.run(RunJob("/bin/sh -c 'kill -9 $$'; exit $?")).said
    # And a stream that is closed and opened again has lost nothing.
    ran = machine.run(RunJob("echo a > /dev/stdout; echo b > /dev/stderr; exec >&-; echo c >> /dev/stderr"))
    assert (ran.out, ran.err) == ("a\n", "b\nc\n")


def test_what_the_program_leaves_behind_is_ended(machine: Machine) -> None:
    ran = machine.run(RunJob("(trap '' HUP; sleep 1000; echo never) & echo at once"))
    assert ran.out == "at once\n"
    assert ran.said[-1] == "off"
    assert ran.left == []
    ran = machine.run(RunJob("setsid sleep 1000 & sleep 1000", settings={"RUN_TIME_LIMIT": "2"}))
    assert "ended limit" in ran.said
    assert ran.said[-1] == "off"
    assert ran.left == []
    ran = machine.run(RunJob("exit 4", settings={"RUN_TIME_LIMIT": "999"}))
    assert ran.said[-3:] == ["ended exit 4", f"outputs {ran.sizes[0]}", "off"]
    saves = "trap 'exit 0' TERM; while :; do sleep 0.1; done"  # which is no success, after which outputs must be there
    ran = machine.run(RunJob(saves, outputs=["results"], settings={"RUN_TIME_LIMIT": "1"}))
    assert ran.said[-3:] == ["ended limit", f"outputs {ran.sizes[0]}", "off"]


def test_the_program_is_an_ordinary_user_or_root(machine: Machine) -> None:
    ran = machine.run(RunJob("id -u; id -un; pwd; echo $HOME $USER; touch $HOME/x . && test ! -w /etc; cat"))
    uid, name, here, told = ran.out.splitlines()
    assert uid != "0"
    assert name == "job"
    assert here.endswith("/vmgahp-run/inputs")
    assert told.split()[1] == "job"
    assert "ended exit 0" in ran.said, ran.err
    ran = machine.run(RunJob("id -u; echo $HOME; sleep 1000 &", settings={"RUN_AS_ROOT": "1"}))
    assert ran.out == "0\n/root\n"
    assert ran.left == []


def test_a_stream_that_was_cut_and_a_script_that_cannot_go_on(machine: Machine) -> None:
    ran = machine.run(RunJob("echo x > a"), answers=["who knows\nagain", "taken"])
    assert len(ran.sizes) == 2
    assert ran.files == {"a": b"x\n"}
    # A shell ends at such an error; the host must not wait for what never comes.
    ran = machine.run(RunJob("true", settings={"x=1; readonly x; x": "2"}))
    assert ran.said == ["failed script the script in the guest came to its end too early"]


def test_inputs_that_do_not_fit_or_are_not_whole(machine: Machine) -> None:
    """The drive's size is what counts, before anything is unpacked."""
    ran = machine.run(RunJob("true"), sectors=2**50)
    assert ran.said[0] == "hello 1"
    assert ran.said[1].startswith("failed room the inputs need 549755813888 MiB, /")
    ran = machine.run(RunJob("true", without=("environment",)))
    assert ran.said == ["hello 1", "failed drive the run drive has no vmgahp-run/environment"]
    job = RunJob("true", {"big": b"1" * 3_000_000})
    whole = job.drive
    job.drive = lambda: whole()[:1_048_576]  # type: ignore[method-assign]
    ran = machine.run(job)
    assert ran.said[1].startswith("failed inputs ")


def test_no_user_of_that_kind(machine: Machine) -> None:
    """A name of root's is no ordinary user."""
    passwd = machine.namespace.path("/etc/passwd")
    before = passwd.read_text()
    passwd.write_text("job:x:0:0::/root:/bin/sh\n" + before)
    try:
        ran = machine.run(RunJob("true"))
    finally:
        passwd.write_text(before)
    assert ran.said[-1] == "failed user the user job of the image is root"


def test_a_drive_of_another_job_or_for_cloud_init_is_left_alone(machine: Machine) -> None:
    job = RunJob("true")
    assert machine.run(job, arguments=["start"]).said == []
    job.settings["RUN_BOOT"] = "ready"
    assert machine.run(job, arguments=["start"]).said[-1] == "off"
    job.drive = lambda: bytes(1_048_576)  # type: ignore[method-assign]
    ran = machine.run(job, hurried=True)
    assert (ran.said, ran.status) == ([], 0)
    assert ran.slept == 30 - 1, "a drive may come late"
