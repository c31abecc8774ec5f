"""A program that the guest is to run, as the job says it, and its environment as HTCondor writes it into an ad."""

import pytest

from tests.job.support import refusal, spec
from tests.jobs import MACHINE, ad, of_lines
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.job.run import Run, read_environment
from vmgahp.job.spec import JobSpec

PROGRAM = '"python3 fit.py 17"'


def run(**changes: str) -> Run:
    return spec(VMPARAM_vm_Run=PROGRAM, **changes).devices.run


def test_a_program_and_nothing_else() -> None:
    assert spec().devices.run is None
    assert run(QDate="1700000000") == Run(
        command="python3 fit.py 17", inputs=None, outputs=None, as_root=False, time_limit=0, boot_timeout=600,
        boot="cloud-init", environment=(), stdout="vm_stdout", stderr="vm_stderr", job="alice_example.org_17.0",
        when=1700000000, beside=("vm_stdout", "vm_stderr", ""),
    )  # fmt: skip


def test_all_that_can_be_said_of_it() -> None:
    found = run(
        VMPARAM_vm_Run_Inputs='"data/, fit.py,data"', VMPARAM_vm_Run_Outputs='"results/*.csv, -x"',
        VMPARAM_vm_Run_As_Root="true", VMPARAM_vm_Run_Time_Limit="3600", VMPARAM_vm_Run_Boot_Timeout="60",
        VM_ATTR_run_boot='"Ready"', Environment="\"B=x' 'y A=1\"", Out='"_condor_stdout"', Err='"_condor_stderr"',
        UserLog='"/home/fit.log"', OrigIwd='"/home"',
    )  # fmt: skip
    assert found.inputs == ("data", "fit.py")
    assert found.outputs == ("results/*.csv", "-x")
    assert (found.as_root, found.time_limit, found.boot_timeout, found.boot) == (True, 3600, 60, "ready")
    assert found.environment == (("A", "1"), ("B", "x y"))
    assert (found.stdout, found.stderr, "fit.log") == ("_condor_stdout", "_condor_stderr", found.beside[2])


def test_nothing_in_and_out_and_the_machines_own_boot_timeout() -> None:
    found = run(VMPARAM_vm_Run_Inputs='""', VMPARAM_vm_Run_Outputs='""', Out='"/dev/null"')
    assert (found.inputs, found.outputs, found.stdout) == ((), (), "vm_stdout")
    settings = Settings({"VM_MEMORY": "1024", "VM_RUN_BOOT_TIMEOUT": "1200"})
    found = spec(settings, VMPARAM_vm_Run=PROGRAM).devices.run
    assert found.boot_timeout == 1200


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"VMPARAM_vm_Run": '" "'}, "names no program"),
        ({"VMPARAM_vm_Run": f'"{"x" * 100_001}"'}, "longer than"),
        ({"VMPARAM_vm_Run_Boot": '"grub"'}, "no such way"),
        ({"VMPARAM_vm_Run_Time_Limit": "0"}, "whole number"),
        ({"VMPARAM_vm_Run_Boot_Timeout": '"60"'}, "whole number"),
        ({"VMPARAM_vm_Run_Inputs": '"/etc/passwd"'}, "plain relative name"),
        ({"VMPARAM_vm_Run_Inputs": '"a/../../b"'}, "plain relative name"),
        ({"VMPARAM_vm_Run_Inputs": '"d/e, d, d.x"'}, "'d/e' lies below 'd'"),
        ({"VMPARAM_vm_Run_Outputs": '"../*"'}, "plain relative name"),
        ({"VMPARAM_vm_Run_Outputs": f'"{",".join(map(str, range(1001)))}"'}, "1001 names"),
        ({"Environment": '"BASH_FUNC_x%%=1"'}, "BASH_FUNC_x%%"),
        ({"Environment": f'"A={"x" * 100_001}"'}, "environment has more"),
        ({"Out": '"/home/alice/out"'}, "Out = '/home/alice/out'"),
        ({"Out": '".job.ad"'}, "Out = '.job.ad'"),
        ({"Err": '"vm_checkpoint.json"'}, "Err = 'vm_checkpoint.json'"),
        ({"Err": '"vm_outputs.tar"'}, "Err = 'vm_outputs.tar'"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, str], problem: str) -> None:
    refusal(errors.MISMATCHED, problem, **({"VMPARAM_vm_Run": PROGRAM} | changes))


@pytest.mark.parametrize("name", ["vm_run.tar", "vm_outputs.tar", "vm_cidata.iso", "vm_run.json"])
def test_a_disk_that_would_be_replaced_is_refused(name: str) -> None:
    refusal(errors.INVALID_DISK_PARAM, name, VMPARAM_vm_Run=PROGRAM, VMPARAM_vm_Disk=f'"{name}:vda:w:raw"')


@pytest.mark.parametrize("name", ["As_Root", "Boot", "Boot_Timeout", "Inputs", "Outputs", "Time_Limit"])
def test_options_about_a_program_are_of_no_use_without_one(name: str) -> None:
    fault = refusal(errors.MISMATCHED, f"_Run_{name} = ", "without VMPARAM_vm_Run", **{f"VMPARAM_vm_Run_{name}": "1"})
    assert fault.hint.startswith("set VMPARAM_vm_Run")


def test_a_vm_that_this_package_does_not_describe_runs_no_program() -> None:
    with pytest.raises(JobFault, match="XML of its own"):
        JobSpec.parse(ad(VMPARAM_vm_Run=PROGRAM, VMPARAM_Libvirt_XML='"domain.xml"'), MACHINE)
    settings = Settings({"VM_MEMORY": "1024", "LIBVIRT_XML_SCRIPT": "/bin/true"})
    refusal(errors.MISMATCHED, "LIBVIRT_XML_SCRIPT", settings=settings, VMPARAM_vm_Run=PROGRAM)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("A=1 B=2  C=", {"A": "1", "B": "2", "C": ""}),
        ("B=x' 'y", {"B": "x y"}),
        ("'B=x y'", {"B": "x y"}),
        ("D=it''''s PATH=/usr/bin:/bin", {"D": "it's", "PATH": "/usr/bin:/bin"}),
        *(("D=a''b", {"D": "ab"}), ("D=a=b", {"D": "a=b"}), ("A=1 A=2", {"A": "2"}), (r"A=\n", {"A": r"\n"})),
    ],
)
def test_the_newer_form_of_an_environment(text: str, found: dict[str, str]) -> None:
    assert read_environment(of_lines(f'Environment = "{text}"')) == found


@pytest.mark.parametrize("text", ["A='", "A='''", "A=1 '", "A", "=1", "A=1 B"])
def test_an_environment_of_neither_form(text: str) -> None:
    with pytest.raises(JobFault, match="not of the form") as caught:
        read_environment(of_lines(f'Environment = "{text}"'))
    assert text in caught.value.problem


def test_the_older_form_of_an_environment_counts_without_the_newer() -> None:
    assert read_environment(of_lines('Env = "A=x y; B=it\'s"')) == {"A": "x y", "B": "it's"}
    assert read_environment(of_lines('Env = "A=1|B=;"', 'EnvDelim = "|"')) == {"A": "1", "B": ";"}
    assert read_environment(of_lines('Env = "A=1"', 'Environment = ""')) == {}
    assert read_environment(of_lines()) == {}


def test_a_long_environment_takes_no_time_that_grows_with_its_square() -> None:
    text = "A='" + "''" * 500_000 + "' B=1"
    assert len(read_environment(of_lines(f'Environment = "{text}"'))["A"]) == 500_000
