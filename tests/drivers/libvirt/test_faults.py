"""Whose fault an error is: the tables, row by row, and the real thing on libvirt and QEMU."""

import ast
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import libvirt
import pytest

from tests import REPOSITORY, fault_cases, jobs
from tests.drivers.libvirt import support
from tests.drivers.libvirt.support import ASKS, MAC, Job, greeted, libvirt_error, refused_cleanly, running, runs
from tests.lab.guest import make_guest
from tests.peer import environment
from tests.protocol.support import Client
from vmgahp import config, errors
from vmgahp.domain import build as domain_xml
from vmgahp.drivers.fault_rules import Rule
from vmgahp.drivers.libvirt.link import domains, faults
from vmgahp.job.look import look
from vmgahp.job.spec import JobSpec

PAGE = REPOSITORY / "docs" / "reference" / "faults.md"
SOURCES = REPOSITORY / "src" / "vmgahp"
CODES = {name for name in dir(libvirt) if name.startswith("VIR_ERR_")}
LEVELS = {"VIR_ERR_NONE", "VIR_ERR_WARNING", "VIR_ERR_ERROR"}
"""These say how bad an error is, and share the numbers of codes."""

INVALID_DISK, MISMATCHED = errors.INVALID_DISK_PARAM, errors.MISMATCHED


def code(name: str) -> int:
    return int(getattr(libvirt, f"VIR_ERR_{name}"))


def origin(name: str) -> int:
    return int(getattr(libvirt, f"VIR_FROM_{name}"))


# The tables


@pytest.mark.parametrize("rule", [rule for rule in faults.RULES if rule.example[0]], ids=lambda rule: rule.name)
def test_the_example_of_every_rule_fits_that_rule_first(rule: Rule) -> None:
    error = libvirt_error(code(rule.example[0]), origin(rule.example[1]), rule.example[2])
    assert faults.classify(error) is rule
    fault = faults.from_libvirt(error, "starting a VM")
    assert (type(fault), fault.code) == (rule.fault, rule.code)
    assert rule.hint in fault.render()
    assert rule.example[2] in fault.problem


def test_every_code_of_libvirt_is_in_a_rule() -> None:
    numbers = {name: getattr(libvirt, name) for name in CODES - LEVELS}
    said = {name: libvirt_error(number, libvirt.VIR_FROM_NONE, "never said") for name, number in numbers.items()}
    rules = {name: faults.classify(error) for name, error in said.items()}
    assert [name for name, rule in rules.items() if numbers[name] not in faults.numbers(rule.kinds)] == []


def test_no_code_is_in_two_rows_that_ask_for_nothing_else() -> None:
    named = [name for rule in faults.RULES if not (rule.message or rule.origins) for name in rule.kinds]
    assert sorted(named) == sorted(set(named))


@pytest.mark.parametrize("number", [0, 999, None])
def test_a_code_that_nobody_knows_is_the_hypervisors(number: int | None) -> None:
    fault = faults.from_libvirt(libvirt_error(number, None, "what nobody has ever said"), "starting a VM")
    assert (type(fault), fault.code) == (errors.HypervisorFault, errors.INTERNAL)


def test_a_code_holds_the_job_where_the_job_is_to_blame_and_nowhere_else() -> None:
    rows = [*faults.RULES, *fault_cases.OF_THE_JOB, *fault_cases.OF_THE_MACHINE]
    assert [row.name for row in rows if (row.code in errors.HOLD_CODES) != (row.fault is errors.JobFault)] == []
    assert [row.name for row in rows if not row.code.startswith(errors.PREFIX)] == []


def test_every_rule_but_that_of_a_domain_that_is_gone_has_a_hint() -> None:
    assert {rule.fault for rule in faults.RULES if not rule.hint} == {errors.ClientFault}


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("OPERATION_INVALID", "cannot migrate domain: The vmdk format of 'x' does not support live migration"),
        ("INTERNAL_ERROR", "unable to execute QEMU command 'migrate': State blocked by non-migratable device 'x'"),
        ("OPERATION_INVALID", "domain has assigned non-USB host devices"),
        ("OPERATION_UNSUPPORTED", "migration with virtiofs device is not supported"),
    ],
)
def test_a_save_that_qemu_blocks_is_told_from_one_that_fails(number: str, message: str) -> None:
    assert faults.is_blocked(libvirt_error(code(number), origin("QEMU"), message))
    assert not faults.is_blocked(libvirt_error(code(number), origin("QEMU"), "the save image could not be written"))


@pytest.mark.parametrize(
    "path", ["/home/alice/No space left on device", "/x/Cannot allocate memory", "/x/network 'a' is not active"]
)
def test_what_the_job_chose_does_not_choose_the_rule(path: str) -> None:
    message = f"Cannot access storage file '{path}': No such file or directory"
    assert isinstance(faults.from_libvirt(libvirt_error(38, 18, message), "starting", [path]), errors.JobFault)
    # the same at the end of a message, where only the cut tells it from the operating system's own word
    ends = f"internal error: Failed to open file '/a' of {path}"
    assert isinstance(faults.from_libvirt(libvirt_error(1, 10, ends), "starting", [path, "/a"]), errors.JobFault)


@pytest.mark.parametrize(
    ("message", "number", "word"),
    [
        ("Path '/base.img' is not accessible: No such file or directory", 38, INVALID_DISK),
        ("XML error: target 'vda' duplicated for disk sources '/a' and '/b'", 27, INVALID_DISK),
        ("XML error: Unknown disk name 'zzz' and no address specified", 27, INVALID_DISK),
        ("qemu: Address space limit 0xffff < 0x1ffff phys-bits too low (40)", 1, errors.NO_MEMORY_PARAM),
        # What a CPU is called is not the machine's network.
        ("unsupported configuration: unsupported CPU cache level for mode 'passthrough'", 67, INVALID_DISK),
        # Nobody could cut these names out: they are in the header of an image of an image.
        ("internal error: Could not open backing file '/home/alice/network 'x' is not active'", 1, INVALID_DISK),
        ("internal error: Could not open '/No space left on device/x': No such file or directory", 1, INVALID_DISK),
        ("internal error: Could not open '/run/libvirt/qemu/passt': Permission denied", 1, INVALID_DISK),
    ],
)
def test_what_libvirt_and_qemu_have_said_of_jobs(message: str, number: int, word: str) -> None:
    fault = faults.from_libvirt(libvirt_error(number, 10, message), "starting")
    assert (type(fault), fault.code) == (errors.JobFault, word)


def test_the_page_shows_the_tables(request: pytest.FixtureRequest) -> None:
    head, begin, rest = PAGE.read_text().partition("<!-- tables -->\n")
    shown, end, tail = rest.partition("<!-- end of tables -->")
    if request.config.getoption("--update-golden"):
        PAGE.write_text(head + begin + "\n" + fault_cases.page() + "\n" + end + tail)
        return
    assert shown.strip() == fault_cases.page().strip()


@pytest.mark.parametrize("module", ["daemon/probe.py", "drivers/libvirt/survey/__init__.py"])
def test_every_finding_of_the_probe_is_in_the_table(module: str) -> None:
    names = {check.name for check in fault_cases.OF_THE_MACHINE}
    for node in ast.walk(ast.parse((SOURCES / module).read_text())):
        if isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if called in ("Finding", "judge") and isinstance(first, ast.Constant):
                assert first.value in names, f"{module}, line {node.lineno}"


def spoil(scratch: Path, *, by_qemu_img: bool = True) -> None:
    """Make images that nobody can use."""
    (scratch / "link.img").symlink_to(scratch / "guest.img")
    if by_qemu_img:
        spoil_by_qemu_img(scratch)
    owner = scratch.stat()
    for path in scratch.iterdir():
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    (scratch / "secret.img").write_bytes(bytes(512))
    (scratch / "secret.img").chmod(0)


def spoil_by_qemu_img(scratch: Path) -> None:
    make = ["qemu-img", "create", "-q", "-f", "qcow2"]
    subprocess.run([*make, "-u", "-b", "/nowhere/base.img", "-F", "raw", scratch / "orphan.qcow2", "1M"], check=True)
    subprocess.run([*make, "-u", "-b", scratch / "guest.img", scratch / "vague.qcow2", "1M"], check=False)
    if not (scratch / "vague.qcow2").exists():  # qemu-img no longer makes such an image
        subprocess.run([*make, scratch / "vague.qcow2", "1M"], check=True)
        content = bytearray((scratch / "vague.qcow2").read_bytes())
        name = os.fsencode(scratch / "guest.img")
        content[8:20] = (0x400).to_bytes(8, "big") + len(name).to_bytes(4, "big")
        content[0x400 : 0x400 + len(name)] = name
        (scratch / "vague.qcow2").write_bytes(content)
    subprocess.run([*make, scratch / "corrupt.qcow2", "1M"], check=True)
    content = bytearray((scratch / "corrupt.qcow2").read_bytes())
    content[40:48] = b"\xff" * 8  # the offset of the first table
    (scratch / "corrupt.qcow2").write_bytes(content)


def asks_qemu_img(check: fault_cases.Check) -> bool:
    """Whether a START with it has qemu-img look at an image."""
    return any(line.endswith(':qcow2"') for line in check.example) and "two writers" not in check.wrong


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=check.wrong, marks=[pytest.mark.qemu] if asks_qemu_img(check) else [])
        for check in fault_cases.OF_THE_JOB
        if check.example
    ],
)
def test_every_check_of_a_job_blames_whom_the_table_says(check: fault_cases.Check, scratch: Path) -> None:
    make_guest(scratch / "guest.img", seconds=1)
    spoil(scratch, by_qemu_img=asks_qemu_img(check))
    if os.getuid() != 0 and "secret" in check.example[0] and os.access(scratch / "secret.img", os.R_OK):
        pytest.skip("this user may read everything")
    identity = jobs.owner(scratch)
    settings = config.load(environment("kvm", scratch, **support.USER_NETWORK))
    ad = jobs.BASE | {"VMPARAM_vm_Disk": '"guest.img:hda:w:raw"'}
    job = jobs.ad(ad, scratch, **dict(line.split(" = ", 1) for line in check.example))

    def describe() -> None:
        spec = look(JobSpec.parse(job, settings), settings, identity)
        domain_xml.build(spec, domain_xml.Host("00000000-0000-4000-8000-000000000000", "qemu", ""))

    with pytest.raises(errors.Fault) as caught:
        describe()
    assert (type(caught.value), caught.value.code) == (check.fault, check.code)
    assert caught.value.hint


# QEMU's last words

UUID = "c7a5fdbd-edaf-9455-926a-d65c16db1809"
BARE = "internal error: qemu unexpectedly closed the monitor"
LOG = """2026-11-20 12:00:00.000+0000: starting up libvirt version: 9.0.0
/usr/bin/qemu-system-x86_64 -uuid {first}
2026-11-20T12:00:01.000000Z qemu-system-x86_64: cannot set up guest memory 'pc.ram': Cannot allocate memory
2026-11-20 12:00:01.000+0000: shutting down, reason=failed
2026-11-20 12:47:44.000+0000: starting up libvirt version: 9.0.0
/usr/bin/qemu-system-x86_64 -uuid {last}
{words}"""
LOCKED = '2026-11-20T12:47:44.0Z qemu-system-x86_64: -device {"id":"a"}: Failed to get "write" lock\nIs another?\n'


def test_an_error_without_a_reason_is_judged_by_qemus_log(tmp_path: Path) -> None:
    assert domains.says_nothing(BARE)
    assert domains.says_nothing("internal error: QEMU unexpectedly closed the monitor (vm='vm')"), "newer ones say so"
    assert domains.says_nothing("internal error: process exited while connecting to monitor: ")
    assert not domains.says_nothing(f"{BARE}: qemu-system-x86_64: Failed")
    (tmp_path / "vm.log").write_text(LOG.format(first="other", last=UUID, words=LOCKED))
    words = domains.last_words("vm", UUID, [str(tmp_path / "none"), str(tmp_path)])
    fault = faults.from_libvirt(libvirt_error(code("INTERNAL_ERROR"), origin("QEMU"), BARE), "starting", (), words)
    assert (type(fault), fault.code) == (errors.JobFault, INVALID_DISK)
    assert 'Failed to get "write" lock' in fault.problem


def test_the_log_of_an_earlier_start_says_nothing_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "PATIENCE", 0.0)
    (tmp_path / "vm.log").write_text(LOG.format(first=UUID, last="other", words=LOCKED))
    assert domains.last_words("vm", UUID, [str(tmp_path)]) == ""
    (tmp_path / "vm.log").write_text(LOG.format(first=UUID, last=UUID, words=""))
    assert domains.last_words("vm", UUID, [str(tmp_path)]) == ""
    assert type(faults.from_libvirt(libvirt_error(1, 10, BARE), "starting")) is errors.HypervisorFault


def test_a_log_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    timer = threading.Timer(0.2, (tmp_path / "vm.log").write_text, [LOG.format(first="other", last=UUID, words=LOCKED)])
    timer.start()
    assert "lock" in domains.last_words("vm", UUID, [str(tmp_path)])
    timer.join()


# No START answers NULL


FAULTS = (
    errors.ClientFault(errors.NO_JOBCLASSAD_INFO, "The job ad is empty."),
    *(errors.JobFault(word, "The job is wrong.") for word in errors.HOLD_CODES),
    errors.MachineFault("The machine is wrong."),
    errors.HypervisorFault("The hypervisor is wrong."),
)


def test_every_class_of_fault_is_walked() -> None:
    def below(kind: type[errors.Fault]) -> set[type[errors.Fault]]:
        return {kind} | {each for sub in kind.__subclasses__() for each in below(sub)}

    ours = {kind for kind in below(errors.Fault) if kind.__module__ == "vmgahp.errors"}
    assert {type(fault) for fault in FAULTS} == ours - {errors.Fault}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
def test_a_start_that_fails_answers_the_word_of_its_fault(fault: errors.Fault) -> None:
    client = Client()
    client.start()
    client.end(fault)
    assert client.results() == [f"1 1 {fault.code}"]
    assert any(fault.problem in line for line in client.logged)


# The real thing


SPOILED = {
    "missing backing file": ("orphan.qcow2:vda:w:qcow2", INVALID_DISK, "/nowhere/base.img"),
    "corrupt": ("corrupt.qcow2:vda:w:qcow2", errors.BAD_IMAGE, "corrupt.qcow2"),
    "unreadable": ("secret.img:vda:w:raw", INVALID_DISK, "secret.img"),
    "of another format": ("guest.img:vda:w:vmdk", errors.BAD_IMAGE, "guest.img"),
    "no such device": ("guest.img:hdx:w:raw", INVALID_DISK, "hdx"),
    "more IDE disks than a VM has": ("guest.img:vdz:w:raw,other.img:fdc:w:raw", INVALID_DISK, "fdc"),
}


@pytest.mark.libvirt
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_job_whose_disk_does_not_work_is_held_and_the_machine_runs_the_next(job: Job) -> None:
    spoil(job.scratch)
    with greeted(job) as peer:
        for disk, word, named in SPOILED.values():
            assert named in refused_cleanly(peer, job, word, f'VMPARAM_vm_Disk = "{disk}"')
        for memory in (0, -5, 1 << 40):
            assert "vm_memory" in refused_cleanly(peer, job, errors.NO_MEMORY_PARAM, f"JobVMMemory = {memory}")
        runs(peer, job)
        log = peer.quit()
    assert log.count("Hint: ") == len(SPOILED) + 3
    assert "Traceback" not in log


@pytest.mark.libvirt
def test_an_image_that_another_vm_has_locked_holds_the_job(job, elsewhere, connection):
    """By the lease on it; by QEMU's own lock where there are no leases."""
    other = Job(elsewhere, connection)
    image = job.scratch / "guest.qcow2"
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", job.disk, image], check=True)
    job.own(image)
    disk = f'VMPARAM_vm_Disk = "{image}:hda:w:qcow2"'
    with running(job, disk) as peer:
        assert "open in another process" in support.refused_by(peer, other, INVALID_DISK, disk)
        assert peer.run("STATUS", 1)[-5] == "STATUS=Running"


@pytest.mark.libvirt
def test_a_mac_address_in_use_holds_the_job(job, elsewhere, connection):
    other = Job(elsewhere, connection)
    with running(job, *ASKS, **support.USER_NETWORK) as peer:
        assert f"JobVM_MACADDR = {MAC}" in support.refused_by(peer, other, MISMATCHED, *ASKS)
        runs(peer, other, ASKS[0], f'JobVM_MACADDR = "{support.OTHER_MAC}"')  # another address will do
        assert peer.run("STATUS", 1)[-5] == "STATUS=Running"
        assert job.name in peer.quit(), "the log names the other VM"


@pytest.mark.libvirt
def test_of_two_vms_with_one_mac_address_the_later_one_is_refused(job: Job, connection: "libvirt.virConnect") -> None:
    """Of two starts at once, each of which finds the other."""
    vm = partial(support.another_vm, connection, devices=support.nic_xml(MAC), flags=libvirt.VIR_DOMAIN_START_PAUSED)
    # The driver's own bindings, whose errors are its own: VMs of other tests end meanwhile.
    with vm(f"{job.name}-1") as first, vm(f"{job.name}-2") as later, closing(libvirt.open(support.URI)) as ours:
        domains.require_free_mac(ours, MAC, print, first.ID())
        with pytest.raises(errors.JobFault):
            domains.require_free_mac(ours, MAC, print, later.ID())
        with pytest.raises(errors.JobFault):
            domains.require_free_mac(ours, MAC, print)


@pytest.mark.libvirt
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_network_that_is_not_active_is_the_machines(job: Job, connection: "libvirt.virConnect") -> None:
    name = f"vmgahp-test-inactive-{os.getpid()}"
    network = connection.networkDefineXML(f"<network><name>{name}</name><bridge name='vgi{os.getpid()}'/></network>")
    try:
        with greeted(job, **support.NAT | {"VM_NAT_NETWORK": name}) as peer:
            text = refused_cleanly(peer, job, support.CRITICAL, "JobVMNetworking = true")
            assert name in text
            assert "virsh net-start" in text
    finally:
        network.undefine()


@pytest.mark.libvirt
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_directory_that_is_closed_to_its_user_is_the_machines_and_one_that_he_has_closed_the_jobs(job: Job) -> None:
    owner = job.scratch.stat()
    with greeted(job) as peer:
        os.chown(job.scratch, 0, 0)
        job.scratch.chmod(0o700)
        refused_cleanly(peer, job, support.CRITICAL, explained=False)
        os.chown(job.scratch, owner.st_uid, owner.st_gid)
        job.scratch.parent.chmod(0o700)
        refused_cleanly(peer, job, support.CRITICAL, explained=False)
        job.scratch.parent.chmod(0o755)
        job.scratch.chmod(0)
        refused_cleanly(peer, job, INVALID_DISK, explained=False)
        job.scratch.chmod(0o500)
        refused_cleanly(peer, job, MISMATCHED, explained=False)
        job.scratch.chmod(0o755)
        runs(peer, job)
        log = peer.quit()
    assert f"{job.scratch} cannot be entered" in log
    assert f"{support.CONSOLE} cannot be written in the job's scratch directory (Permission denied)" in log
    assert log.count("Hint: ") == 4


@pytest.fixture
def small(scratch: Path) -> Iterator[Path]:
    """A scratch directory that is a small file system of its own."""
    options = f"size=4m,mode=755,uid={scratch.stat().st_uid},gid={scratch.stat().st_gid}"
    with support.mounted(scratch.parent / "small", options) as directory:
        yield directory


@pytest.mark.libvirt
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("scratch_of_it", "word", "said"),
    [
        (".", MISMATCHED, ("There is no room in the scratch directory {}", "raise request_disk")),
        ("dir_1", support.CRITICAL, ("EXECUTE ({}) is ill: No space left on device",)),
    ],
    ids=["of the scratch directory alone", "of EXECUTE"],
)
def test_a_file_system_without_room_is_whose_it_is(small, connection, scratch_of_it, word, said):
    scratch = small / scratch_of_it
    scratch.mkdir(exist_ok=True)
    jobs.own(small, scratch)
    job = Job(scratch, connection)
    filling = small / "filling"
    subprocess.run(["dd", "if=/dev/zero", f"of={filling}", "bs=4096"], check=False, stderr=subprocess.DEVNULL)
    with greeted(job) as peer:
        refused_cleanly(peer, job, word, explained=False)
        filling.unlink()
        runs(peer, job)
        log = peer.quit()
    assert [words for words in said if words.format(small) not in log] == []


@pytest.mark.libvirt
def test_a_libvirtd_that_is_not_there_is_the_machines(job: Job) -> None:
    place = job.scratch.parent / "no-socket"
    with greeted(job, VM_LIBVIRT_URI=f"qemu+unix:///system?socket={place}") as peer:
        assert "start libvirtd" in refused_cleanly(peer, job, support.CRITICAL)
