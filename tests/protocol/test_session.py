"""The session without any I/O: replies, results, the order of things, and a model of the states."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.protocol.support import AD, Client
from vmgahp import errors, lifecycle
from vmgahp.metrics import Status
from vmgahp.protocol import session, wire
from vmgahp.protocol.wire import MAX_AD, MAX_AD_LINES


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def started(client: Client) -> Client:
    """A client whose VM 1 runs."""
    client.started()
    return client


def test_a_server_has_a_type_of_its_own() -> None:
    assert Client("qemu").send("SUPPORT_VMS") == ["S xen kvm qemu"]
    client = Client("xen")
    client.send("CLASSAD", *AD, "CLASSAD_END", "CONDOR_VM_START 1 kvm")
    assert client.results() == ["1 1 VMGAHP_ERR_NO_SUPPORTED_VM_TYPE"]


@pytest.mark.parametrize(
    "line",
    [
        *("CONDOR_VM_START 1 kvm extra", "CONDOR_VM_STATUS 1", "CONDOR_VM_STATUS x 1", "CONDOR_VM_STATUS 0 1"),
        *("CONDOR_VM_STATUS 2147483648 1", "CONDOR_VM_STATUS ² 1", "CONDOR_VM_START 1 vmware", "\0", "VERSION\0"),
        *("QUIT now", "ünïcode"),
    ],
)
def test_what_makes_no_sense_is_refused_with_one_line(client: Client, line: str) -> None:
    assert client.send(line) == ["E"]
    assert client.results() == []


def test_bad_utf8_and_a_line_without_an_end_are_refused_once(client: Client) -> None:
    client.session.receive(b"VERS\xffION\n", 0.0)
    assert client.read() == ["E"]
    for _ in range(10):
        client.session.receive(b"x" * (1 << 20), 0.0)
    assert client.read() == []
    assert client.send("x", "VERSION")[0] == "E"


def test_a_request_id_may_not_be_used_while_it_is_pending(client: Client) -> None:
    client.start(5)
    assert client.send("CONDOR_VM_STATUS 5 1") == ["E"]
    assert client.end() == ["R"]
    assert client.send("CONDOR_VM_STATUS 5 1") == ["S"]


def test_requests_beyond_the_limit_are_refused_until_results_are_fetched(client: Client) -> None:
    for request_id in range(1, session.MAX_OUTSTANDING + 1):
        assert client.send(f"CONDOR_VM_STATUS {request_id} 1")[0] == "S"
    assert client.send("CONDOR_VM_STATUS 9999999 1") == ["E"]
    assert len(client.results()) == session.MAX_OUTSTANDING
    assert client.send("CONDOR_VM_STATUS 9999999 1")[0] == "S"


def test_r_is_written_once_until_results_are_fetched(client: Client) -> None:
    assert client.send("CONDOR_VM_STATUS 1 9", "CONDOR_VM_STATUS 2 9") == ["S", "R", "S"]
    assert client.results() == ["1 0 STATUS=Stopped", "2 0 STATUS=Stopped"]
    assert client.send("CONDOR_VM_STATUS 3 9") == ["S", "R"]


def test_no_r_with_async_mode_off(client: Client) -> None:
    assert client.send("ASYNC_MODE_OFF", "CONDOR_VM_STATUS 1 9") == ["S", "S"]
    assert client.send("ASYNC_MODE_ON", "CONDOR_VM_STATUS 2 9") == ["S", "S", "R"]


def test_a_failed_start_answers_the_word_of_the_fault_and_leaves_no_vm(client: Client) -> None:
    client.start()
    client.end(errors.JobFault(errors.NO_DISK_PARAM, "VMPARAM_vm_Disk is missing"))
    assert client.results() == ["1 1 VMGAHP_ERR_JOBCLASSAD_KVM_NO_DISK_PARAM"]
    client.send("CONDOR_VM_STOP 2 1")
    assert client.results() == ["2 1 VMGAHP_ERR_VM_NOT_FOUND"]


@pytest.mark.parametrize(
    "value",
    ['"xen"', "undefined", "error", "7", "true", '{"kvm"}', '[a = "kvm"]', 'strcat("k", "vm")', '"kvm', "x" * 10_000],
)
def test_what_the_job_says_of_its_type_is_judged_by_who_carries_out_the_start(client: Client, value: str) -> None:
    """The engine that may be needed for that could hold up every request."""
    client.send("CLASSAD", *AD, f"JobVMType = {value}", "CLASSAD_END", "CONDOR_VM_START 1 kvm")
    assert client.results() == []
    assert [call.operation for call in client.calls] == ["START"]


@pytest.mark.parametrize("vm_type", [" kvm", "kvm, vmware", ""])
def test_a_job_whose_type_is_no_word_is_started_by_a_client_that_escapes_nothing(vm_type: str) -> None:
    client = Client(vm_type)
    client.send("CLASSAD", *AD, f'JobVMType = "{vm_type}"', "CLASSAD_END")
    assert client.send(f"CONDOR_VM_START 1 {vm_type}")[0] == "S"
    assert len(client.calls) == 1


@pytest.mark.parametrize("name", ["JobVMType", "VM_WORKING_DIR"])
def test_an_ad_that_is_too_long_for_what_must_be_there_is_the_jobs_fault(client: Client, name: str) -> None:
    lines = [line for line in AD if not line.startswith(name)]
    many, long = [f"A{number} = 1" for number in range(MAX_AD_LINES)], "x" * wire.MAX_REQUEST
    for more in ([*many, f'{name} = "/kvm"'], [f'{name} = "/{long}"']):
        client.send("CLASSAD", *lines, *more, "CLASSAD_END", "CONDOR_VM_START 1 kvm")
        assert client.results() == ["1 1 VMGAHP_ERR_JOBCLASSAD_MISMATCHED_HARDWARE_VT"]
    client.send("CLASSAD", *lines, "CLASSAD_END", "CONDOR_VM_START 2 kvm")
    assert client.results() == ["2 1 VMGAHP_ERR_NO_JOBCLASSAD_INFO"]


def test_secrets_of_the_ad_are_neither_kept_nor_logged(client: Client) -> None:
    client.send("CLASSAD", 'ClaimId="secret"', 'claimids="secret-2"', '_Condor_PrivX\t= "secret-3"', *AD, "CLASSAD_END")
    assert len(client.session._ad.lines) == len(AD)
    assert "secret" not in repr(client.session._ad.lines)
    client.send("CLASSAD", 'ClaimId = "secret-1"', "TransferKey secret-2", 'broken"secret-3', "CLASSAD_END")
    client.send("CONDOR_VM_START 1 kvm", "secret-4")
    assert client.logged
    assert "secret" not in " ".join(client.logged)


def test_an_ad_has_a_limit_of_lines_and_what_is_skipped_is_logged_once(client: Client) -> None:
    client.send("CLASSAD", *AD, "nonsense", "1x = 2", "more nonsense")
    client.session.receive(b"a = 1\n" * MAX_AD_LINES, client.now)
    client.send("last = 1", "CLASSAD_END", "CONDOR_VM_START 1 kvm")
    (call,) = client.calls
    assert call.job.expression("a") == "1"
    assert call.job.expression("last") is None
    assert [text for text in client.logged if "skipped" in text] == [
        "skipped 2 bad lines of the job ad",
        f"skipped {len(AD) + 2} attributes of the job ad: it has more than {MAX_AD_LINES} lines or {MAX_AD} bytes",
        "skipped 1 bad lines of the job ad",
    ]


def running(cpu: float = 0.0, **more: str) -> Status:
    return Status(lifecycle.RUNNING, cpu_seconds=cpu, vcpus=2, memory_kib=1024, max_memory_kib=2048, **more)


def test_status_of_a_running_vm(started: Client) -> None:
    started.now += 10
    assert started.run("STATUS", 2, running(5.0, mac="52:54:00:00:00:01", ip="192.168.122.7")) == [
        "2 0 MAC=52:54:00:00:00:01 IP=192.168.122.7 STATUS=Running CPUUTILIZATION=0.250000 CPUTIME=5.000000 "
        "MEMORY=1024 MAXMEMORY=2048"
    ]


def test_utilization_counts_from_the_start_and_is_never_more_than_all(client: Client) -> None:
    """A guest has used CPU before START is answered, and a first STATUS may come right after."""
    client.start()
    client.now += 4
    client.end()
    client.results()
    shown = []
    for cpu in (1.0, 50.0):
        shown.append(client.run("STATUS", 2, running(cpu))[0].split()[3])
        client.now += 1
    assert shown == ["CPUUTILIZATION=0.125000", "CPUUTILIZATION=1.000000"]


def test_cpu_time_goes_on_when_the_hypervisor_counts_from_zero_again(started: Client) -> None:
    shown = []
    for cpu in (5.0, 7.0, 1.0, 2.0):
        started.now += 10
        shown.append(started.run("STATUS", 2, running(cpu))[0].split()[3:5])
    assert shown == [
        ["CPUUTILIZATION=0.250000", "CPUTIME=5.000000"],
        ["CPUUTILIZATION=0.100000", "CPUTIME=7.000000"],
        ["CPUUTILIZATION=0.050000", "CPUTIME=8.000000"],
        ["CPUUTILIZATION=0.050000", "CPUTIME=9.000000"],
    ]


def test_a_suspended_vm_is_never_reported_as_stopped(started: Client) -> None:
    started.send("CONDOR_VM_SUSPEND 2 1", "CONDOR_VM_STATUS 3 1")
    assert [call.operation for call in started.calls] == [lifecycle.SUSPEND]
    started.end()
    started.end(Status(lifecycle.SUSPENDED))
    assert started.results() == ["2 0 NULL", "3 0 STATUS=Suspended"]


def test_the_soft_suspend_of_a_suspended_guest_needs_no_driver(started: Client) -> None:
    started.send("CONDOR_VM_SOFT_SUSPEND 2 1", "CONDOR_VM_SOFT_SUSPEND 3 1", "CONDOR_VM_STATUS 4 1")
    started.end()
    started.end(Status(lifecycle.SOFT_SUSPENDED))
    assert started.results() == ["2 0 NULL", "3 0 NULL", "4 0 STATUS=SoftSuspended"]
    assert started.calls == []


def test_a_guest_that_powered_off_is_stopped_for_good(started: Client) -> None:
    started.send("CONDOR_VM_STATUS 2 1", "CONDOR_VM_GETPID 3 1", "CONDOR_VM_RESUME 4 1", "CONDOR_VM_STATUS 5 1")
    started.end(Status(lifecycle.STOPPED))
    assert started.calls == []
    assert started.results() == [
        *("2 0 STATUS=Stopped", "3 0 0", "4 1 VMGAHP_ERR_VM_INVALID_OPERATION", "5 0 STATUS=Stopped")
    ]
    started.send("CONDOR_VM_STOP 6 1", "CONDOR_VM_STOP 7 1")
    assert started.results() == ["6 0 NULL", "7 1 VMGAHP_ERR_VM_NOT_FOUND"]


def test_a_failed_stop_keeps_the_vm_and_what_waits_behind_one_finds_none(started: Client) -> None:
    assert started.run("STOP", 2, errors.HypervisorFault("QEMU does not die")) == ["2 1 VMGAHP_ERR_INTERNAL"]
    assert 1 in started.session.vms
    started.send("CONDOR_VM_STOP 2 1", "CONDOR_VM_SUSPEND 3 1", "CONDOR_VM_STATUS 4 1")
    started.end()
    assert started.results() == ["2 0 NULL", "3 1 VMGAHP_ERR_VM_NOT_FOUND", "4 0 STATUS=Stopped"]


def test_a_status_behind_a_long_save_is_answered_from_memory(started: Client) -> None:
    before = started.run("STATUS", 2, running(1.0))[0].partition(" ")[2]
    assert started.session.next_deadline() is None
    started.send("CONDOR_VM_SUSPEND 3 1", "CONDOR_VM_STATUS 4 1")
    assert started.session.next_deadline() == started.now + session.PATIENCE
    started.session.expire(started.now + session.PATIENCE - 0.1)
    assert started.results() == []
    started.session.expire(started.now + session.PATIENCE)
    assert started.results() == [f"4 {before}"]
    assert started.session.next_deadline() == started.now + 280, "the save itself has the client's time"
    started.end()
    assert started.results() == ["3 0 NULL"]


def test_what_takes_too_long_is_answered_before_the_client_gives_up(client: Client) -> None:
    client.session.request_timeout = 100.0
    client.started()
    client.send("CONDOR_VM_SUSPEND 2 1", "CONDOR_VM_RESUME 3 1")
    client.session.expire(client.now + 74)
    assert client.results() == []
    client.session.expire(client.now + 80)
    assert client.results() == ["3 1 VMGAHP_ERR_CRITICAL", "2 1 VMGAHP_ERR_CRITICAL"]
    client.send("CONDOR_VM_STATUS 4 1")
    client.end()
    client.end(Status(lifecycle.SUSPENDED))
    assert client.results() == ["4 0 STATUS=Suspended"], "the save continued, and its outcome is the truth"


def test_a_stop_does_not_wait_for_what_may_hang_for_good(client: Client) -> None:
    client.session.request_timeout = 100.0
    client.started()
    client.send("CONDOR_VM_SUSPEND 2 1", "CONDOR_VM_STOP 3 1")
    assert [call.operation for call in client.calls] == [lifecycle.SUSPEND], "it waits while the client does"
    client.session.expire(client.now + 80)
    client.send("CONDOR_VM_STOP 4 1")
    suspend, stop = client.calls
    assert (suspend.operation, stop.operation) == (lifecycle.SUSPEND, lifecycle.STOP)
    client.session.finished(suspend, errors.HypervisorFault("its guest is gone"), client.now)
    assert 1 in client.session.vms
    client.session.finished(stop, None, client.now)
    assert client.results() == ["3 1 VMGAHP_ERR_CRITICAL", "2 1 VMGAHP_ERR_CRITICAL", "4 0 NULL"]
    assert client.session.vms == {}


@pytest.mark.parametrize("answer", [errors.CRITICAL, errors.MISMATCHED])
def test_a_vm_that_starts_too_late_is_stopped_again(client: Client, answer: str) -> None:
    client.start()
    client.calls[0].late = answer
    client.session.expire(client.now + 399)
    assert client.results() == []
    client.session.expire(client.now + 400)
    assert client.results() == [f"1 1 {answer}"]
    client.end()
    assert [call.operation for call in client.calls] == [lifecycle.STOP]
    client.end()
    assert client.results() == []
    assert client.session.vms == {}


def test_a_checkpointed_vm_is_suspended_for_the_client(started: Client) -> None:
    started.send("CONDOR_VM_CHECKPOINT 2 1", "CONDOR_VM_STATUS 3 1", "CONDOR_VM_RESUME 4 1")
    started.end()
    started.end(Status(lifecycle.SUSPENDED))
    assert started.calls[0].state == lifecycle.CHECKPOINTED
    started.end()
    assert started.results() == ["2 0 NULL", "3 0 STATUS=Suspended", "4 0 NULL"]


def checkpointed(outcome: errors.Fault | None = None) -> Client:
    """A client whose VM has had a periodic checkpoint, or was to have one."""
    client = Client("libvirt")
    client.started()
    client.send("CONDOR_VM_CHECKPOINT 2 1")
    client.end(outcome)
    return client


def test_a_vm_goes_on_after_a_periodic_checkpoint_unless_it_was_suspended_before() -> None:
    client = checkpointed()
    client.send("CONDOR_VM_STATUS 3 1")
    assert [(call.operation, call.state) for call in client.calls] == [(lifecycle.RESUME, lifecycle.CHECKPOINTED)]
    client.end()
    client.end(running(1.0))
    assert client.results()[1].startswith("3 0 STATUS=Running")
    client.send("CONDOR_VM_STATUS 4 1")
    assert [call.operation for call in client.calls] == [lifecycle.STATUS], "once"
    client = checkpointed()
    client.send("CONDOR_VM_STATUS 3 1")
    client.end(errors.HypervisorFault("libvirtd is being restarted."))
    client.end(Status(lifecycle.SUSPENDED))
    assert client.results()[1] == "3 0 STATUS=Suspended"
    client.send("CONDOR_VM_STATUS 4 1")
    assert [call.operation for call in client.calls] == [lifecycle.RESUME], "tried again by the next one"
    client.session.expire(client.now + session.PATIENCE)
    client.send("CONDOR_VM_STOP 5 1")
    assert [call.operation for call in client.calls] == [lifecycle.RESUME, lifecycle.STOP], "it waits for none of ours"
    client = Client("libvirt")
    client.started()
    client.send("CONDOR_VM_SUSPEND 2 1", "CONDOR_VM_CHECKPOINT 3 1", "CONDOR_VM_STATUS 4 1")
    client.end()
    client.end()
    assert [call.operation for call in client.calls] == [lifecycle.STATUS]
    client.end(Status(lifecycle.SUSPENDED))
    assert client.results()[2] == "4 0 STATUS=Suspended"


def followed(client: Client) -> Client:
    """A client that has asked for the pid, and has its result."""
    client.run("GETPID", 2, 4711)
    return client


def test_a_guest_that_has_ended_is_found_without_a_request(started: Client) -> None:
    followed(started).look()
    assert [(call.operation, call.request_id) for call in started.calls] == [(lifecycle.STATUS, 0)]
    assert started.end(Status(lifecycle.STOPPED)) == [], "the client has not asked"
    assert started.session.is_over
    started.look()
    assert started.calls == []


def test_a_guest_is_not_looked_at_before_its_client_attends_to_it(started: Client) -> None:
    """condor_starter sleeps for 30 s before it asks for the pid."""
    started.look()
    started.send("CONDOR_VM_GETPID 2 1")
    started.look()
    assert [call.operation for call in started.calls] == [lifecycle.GETPID]
    started.end(4711)
    started.look()
    assert started.calls == [], "the client has not fetched the result"
    started.results()
    started.look()
    assert [call.operation for call in started.calls] == [lifecycle.STATUS]


@pytest.mark.parametrize("operation", [lifecycle.SUSPEND, lifecycle.SOFT_SUSPEND, lifecycle.CHECKPOINT])
def test_a_guest_that_cannot_end_by_itself_is_not_looked_at(started: Client, operation: str) -> None:
    followed(started).send(f"CONDOR_VM_{operation} 3 1")
    started.look()
    assert [call.operation for call in started.calls] == [operation]
    started.end()
    started.results()
    started.look()
    assert started.calls == []


def test_looks_change_nothing_that_the_client_is_told(started: Client) -> None:
    followed(started)
    for seconds in (10, 5):
        started.now += seconds
        started.look()
        started.end(running(2.0))
    started.now += 5
    [told] = started.run("STATUS", 3, running(5.0))
    assert "CPUUTILIZATION=0.125000 CPUTIME=5.000000" in told, "of all the time since the START"


@pytest.mark.parametrize("outcome", [running(1.0), errors.HypervisorFault("the guest is lost")], ids=["runs", "lost"])
def test_a_guest_that_runs_or_is_lost_is_not_over(started: Client, outcome: Status | errors.Fault) -> None:
    followed(started).look()
    assert started.end(outcome) == []
    assert not started.session.is_over
    started.send("CONDOR_VM_STATUS 3 1")
    assert [call.operation for call in started.calls] == [lifecycle.STATUS]


def test_what_is_asked_during_a_look_is_answered_as_ever(started: Client) -> None:
    followed(started).look()
    started.send("CONDOR_VM_SUSPEND 3 1", "CONDOR_VM_STATUS 4 1", "CONDOR_VM_STOP 5 1")
    started.end(Status(lifecycle.STOPPED))
    assert not started.session.is_over
    assert started.results() == ["3 1 VMGAHP_ERR_VM_INVALID_OPERATION", "4 0 STATUS=Stopped", "5 0 NULL"]
    assert not started.session.is_over, "it has no VM any more"


def test_two_vms_are_over_when_both_have_ended(started: Client) -> None:
    followed(started)
    started.start(3)
    started.end()
    started.results()
    started.look()
    started.end(Status(lifecycle.STOPPED))
    assert not started.session.is_over
    started.send("CONDOR_VM_GETPID 4 2")
    started.end(4712)
    started.results()
    started.look(2)
    started.end(Status(lifecycle.STOPPED))
    assert started.session.is_over


FOUND = (lifecycle.RUNNING, lifecycle.SOFT_SUSPENDED, lifecycle.SUSPENDED, lifecycle.STOPPED)
OUTCOMES = st.sampled_from(["ok", "fault", *FOUND])
"""How a call ends: as it should, with a fault, or, for a STATUS, with what an administrator, a crash or a full
disk has made of the VM meanwhile."""
ACTIONS = st.one_of(
    st.tuples(st.just("request"), st.sampled_from(lifecycle.OPERATIONS), st.integers(1, 3)),
    st.tuples(st.just("end"), st.integers(0, 3), OUTCOMES),
    st.tuples(st.just("results"), st.just(0), st.just(0)),
    st.tuples(st.just("expire"), st.just(0), st.just(0)),
    st.tuples(st.just("look"), st.integers(1, 3), st.just(0)),
)


@settings(max_examples=examples(300))
@given(st.lists(ACTIONS, max_size=60))
def test_random_conversations(actions: list[tuple[str, object, object]]) -> None:
    """Every accepted request has one result; a VM has one call at a time, in order; states follow the table."""
    client = Client()
    client.send("CLASSAD", *AD, "CLASSAD_END")
    accepted: set[int] = set()
    answered: list[int] = []
    issued: dict[int, list[int]] = {}
    signalled = False

    def hear(lines: list[str]) -> None:
        nonlocal signalled
        assert lines.count("R") <= (0 if signalled else 1)
        signalled |= "R" in lines

    for request_id, (action, first, second) in enumerate(actions, start=1):
        if action == "request":
            argument = "kvm" if first == lifecycle.START else second
            lines = client.send(f"CONDOR_VM_{first} {request_id} {argument}")
            assert lines[0] == "S"
            accepted.add(request_id)
            hear(lines)
        elif action == "end" and client.calls:
            call = client.calls.pop(first % len(client.calls))
            before = call.vm.state
            outcome: Status | int | errors.Fault | None = None
            if second == "fault":
                outcome = errors.HypervisorFault("it failed")
            elif call.operation == lifecycle.STATUS:
                outcome = Status(second if second in FOUND else lifecycle.STATUS_WORDS[before])
            elif call.operation == lifecycle.GETPID:
                outcome = 4711
            client.session.finished(call, outcome, client.now)
            is_look = not call.request_id and outcome != Status(lifecycle.STOPPED)
            if second == "fault" or call.operation == lifecycle.GETPID or is_look:
                assert call.vm.state == before
            elif call.operation == lifecycle.STATUS:
                assert lifecycle.STATUS_WORDS[call.vm.state] == outcome.state, "what the hypervisor says is believed"
            else:
                assert call.vm.state == lifecycle.TRANSITIONS[before, call.operation]
            hear(client.read())
        elif action == "results":
            answered += [int(line.split()[0]) for line in client.results()]
            signalled = False
        elif action == "expire":
            client.now += session.PATIENCE
            client.session.expire(client.now)
            hear(client.read())
        elif action == "look" and first in client.session.vms:
            client.session.look(first, client.now)
            hear(client.read())
        for call in client.calls:
            seen = issued.setdefault(call.vm.id, [])
            if call.request_id and call.request_id not in seen:
                assert not seen or call.request_id > seen[-1], "a VM's calls are issued in order"
                seen.append(call.request_id)
        busy = [call.vm.id for call in client.calls]
        assert len(busy) == len(set(busy)), "one call at a time for a VM"
        assert client.session.vms or client.session.next_deadline() is None, "without a VM nothing waits"
    while client.calls:
        call = client.calls[0]
        state = call.vm.state
        client.end({lifecycle.STATUS: Status(lifecycle.STATUS_WORDS[state]), lifecycle.GETPID: 1}.get(call.operation))
    answered += [int(line.split()[0]) for line in client.results()]
    assert sorted(answered) == sorted(accepted)


@pytest.mark.parametrize("operation", [lifecycle.SUSPEND, lifecycle.SOFT_SUSPEND])
def test_a_vm_that_is_to_be_suspended_after_its_periodic_checkpoint_stays_so(operation: str) -> None:
    client = checkpointed()
    client.send(f"CONDOR_VM_{operation} 3 1", "CONDOR_VM_STATUS 4 1")
    assert [call.operation for call in client.calls] == [lifecycle.STATUS]
    client = checkpointed()
    client.send("CONDOR_VM_STATUS 3 1")
    client.session.expire(client.now + session.PATIENCE)
    client.send(f"CONDOR_VM_{operation} 4 1")
    client.end(errors.HypervisorFault("libvirtd is being restarted."))
    client.send("CONDOR_VM_STATUS 5 1")
    assert [call.operation for call in client.calls] == [lifecycle.STATUS]


def test_a_vm_that_a_failed_periodic_checkpoint_leaves_saved_is_resumed() -> None:
    client = checkpointed(errors.HypervisorFault("It failed, and the guest could not be restored."))
    client.run("STATUS", 3, Status(lifecycle.SUSPENDED))
    client.send("CONDOR_VM_STATUS 4 1")
    assert [call.operation for call in client.calls] == [lifecycle.RESUME]
    client = checkpointed(errors.HypervisorFault("It failed, and the guest runs again."))
    client.run("STATUS", 3, running(1.0))
    client.run("STATUS", 4, Status(lifecycle.SUSPENDED))
    client.send("CONDOR_VM_STATUS 5 1")
    assert [call.operation for call in client.calls] == [lifecycle.STATUS], "it was not the checkpoint"
