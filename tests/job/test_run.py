"""A program that the guest is to run, as the job says it."""

import pytest

from tests.job.support import refusal, spec
from tests.jobs import MACHINE, ad
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.job.run import Run
from vmgahp.job.spec import JobSpec

PROGRAM = '"python3 fit.py 17"'


def run(**changes: str) -> Run:
    found = spec(VMPARAM_vm_Run=PROGRAM, **changes).devices.run
    assert found is not None
    return found


def test_a_job_without_one() -> None:
    assert spec().devices.run is None


def test_a_program_and_nothing_else() -> None:
    assert run(QDate="1700000000") == Run(
        command="python3 fit.py 17",
        inputs=None,
        outputs=None,
        as_root=False,
        time_limit=0,
        boot_timeout=600,
        boot="cloud-init",
        environment=(),
        stdout="vm_stdout",
        stderr="vm_stderr",
        job="alice_example.org_17.0",
        when=1700000000,
    )


def test_all_that_can_be_said_of_it() -> None:
    found = run(
        VMPARAM_vm_Run_Inputs='"data/, fit.py,data"',
        VMPARAM_vm_Run_Outputs='"results/*.csv, -x"',
        VMPARAM_vm_Run_As_Root="true",
        VMPARAM_vm_Run_Time_Limit="3600",
        VMPARAM_vm_Run_Boot_Timeout="60",
        VM_ATTR_run_boot='"Ready"',
        Environment="\"B=x' 'y A=1\"",
        Out='"_condor_stdout"',
        Err='"_condor_stderr"',
    )
    assert found.inputs == ("data", "fit.py")
    assert found.outputs == ("results/*.csv", "-x")
    assert (found.as_root, found.time_limit, found.boot_timeout, found.boot) == (True, 3600, 60, "ready")
    assert found.environment == (("A", "1"), ("B", "x y"))
    assert (found.stdout, found.stderr) == ("_condor_stdout", "_condor_stderr")


def test_nothing_in_and_nothing_out() -> None:
    found = run(VMPARAM_vm_Run_Inputs='""', VMPARAM_vm_Run_Outputs='""', Out='"/dev/null"')
    assert (found.inputs, found.outputs, found.stdout) == ((), (), "vm_stdout")


def test_the_machine_says_how_long_a_guest_may_boot() -> None:
    settings = Settings({"VM_MEMORY": "1024", "VM_RUN_BOOT_TIMEOUT": "1200"})
    found = spec(settings, VMPARAM_vm_Run=PROGRAM).devices.run
    assert found is not None
    assert found.boot_timeout == 1200


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"VMPARAM_vm_Run": '" "'}, "names no program"),
        ({"VMPARAM_vm_Run": f'"{"x" * 100_001}"'}, "longer than"),
        ({"VMPARAM_vm_Run_Boot": '"grub"'}, "no such way"),
        ({"VMPARAM_vm_Run_Time_Limit": "0"}, "whole number"),
        ({"VMPARAM_vm_Run_Time_Limit": "1.5"}, "whole number"),
        ({"VMPARAM_vm_Run_Time_Limit": "true"}, "whole number"),
        ({"VMPARAM_vm_Run_Boot_Timeout": '"60"'}, "whole number"),
        ({"VMPARAM_vm_Run_Inputs": '"/etc/passwd"'}, "plain relative name"),
        ({"VMPARAM_vm_Run_Inputs": '"a/../../b"'}, "plain relative name"),
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
    fault = refusal(
        errors.MISMATCHED, f"VMPARAM_vm_Run_{name} = ", "without VMPARAM_vm_Run", **{f"VMPARAM_vm_Run_{name}": "1"}
    )
    assert fault.hint.startswith("set VMPARAM_vm_Run")


def test_a_job_with_xml_of_its_own_runs_no_program() -> None:
    with pytest.raises(JobFault, match="XML of its own"):
        JobSpec.parse(ad(VMPARAM_vm_Run=PROGRAM, VMPARAM_Libvirt_XML='"domain.xml"'), MACHINE)


def test_a_machine_whose_vms_a_script_describes_runs_none() -> None:
    settings = Settings({"VM_MEMORY": "1024", "LIBVIRT_XML_SCRIPT": "/bin/true"})
    refusal(errors.MISMATCHED, "LIBVIRT_XML_SCRIPT", settings=settings, VMPARAM_vm_Run=PROGRAM)
