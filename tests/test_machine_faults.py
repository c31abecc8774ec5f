"""Every machine fault of the tree, and the state of the machine that causes it: none is a job's to bring about alone.

A machine fault of a START takes the machine from everybody. So each place in the code that makes one has a row here,
written by somebody who has looked whether a job can get there: by its ad, its scratch directory, its images, its guest.
"""

import ast
import re
from collections import Counter
from pathlib import Path

from tests import REPOSITORY
from vmgahp.drivers.fault_rules import Rule
from vmgahp.drivers.libvirt.link import faults
from vmgahp.drivers.vmrun.tool import RULES as VMRUN_RULES
from vmgahp.errors import MachineFault

SOURCES = REPOSITORY / "src/vmgahp"

SETTING = "a setting is missing or wrong"
PROGRAM = "a program of the administrator's fails with a plain job as well, or cannot be trusted"
LACKING = "this machine is out of processes, threads, descriptors, memory, or of room outside of EXECUTE"
ILL = "EXECUTE is ill, by root's look at it"
NOT_INSTALLED = "something that such jobs need is not installed, or does not run"
HYPERVISOR = "the hypervisor does not answer, or breaks its own word"
PLAIN = "neither the job's VM nor a plain guest starts (second_look)"
NETWORK = "a network of the settings is not there or not up"
VSPHERE = "vSphere, its datastore or its inventory does not do what the settings say"
DEVICE = "a device that HTCondor has assigned to the slot is not there, is used by the machine, or cannot be given"
BUG = "a bug of this daemon's"
IMAGES = "(an image of the catalog: it becomes a fault of the job's)"
RESTORE = "(a restore's: the checkpoint is set aside, and the guest boots afresh)"
LATER = "(the guest has run: no answer but that of START takes the machine)"
PROBE = "(the probe's, or a tool's: no job is there)"
STAND_IN = "(the simulated driver and the contract of drivers: for tests)"

PLACES = {
    "checkpoint/store.py:CheckpointStore.write": (1, LATER),
    "config/__init__.py:Settings._bad": (1, SETTING),
    "config/__init__.py:Settings._evaluate": (1, SETTING),
    "config/sources.py:_ask": (1, SETTING),
    "config/sources.py:_from_bindings": (1, SETTING),
    "config/sources.py:_require_short": (1, SETTING),
    "config/sources.py:ask_tool": (3, SETTING),
    "config/sources.py:entries": (1, SETTING),
    "config/sources.py:expand": (1, SETTING),
    "config/sources.py:logical_lines": (1, SETTING),
    "config/sources.py:read_file": (3, SETTING),
    "daemon/containers.py:_run.reason": (1, PROBE),
    "daemon/containers.py:version": (1, PROBE),
    "daemon/probe.py:_free_mib": (2, PROBE),
    "daemon/probe.py:_require_absolute_libraries": (1, PROBE),
    "daemon/probe.py:run": (1, PROBE),
    "daemon/server.py:Server._configure": (1, SETTING),
    "daemon/server.py:Server._explain": (1, ILL),
    "daemon/server.py:Server._work": (1, BUG),
    "daemon/transfer_plugin.py:_directories": (1, PROBE),
    "domain/job_xml.py:copy_boot_files": (1, LACKING),
    "drivers/any/__init__.py:AnyDriver._nothing_left": (1, NOT_INSTALLED),
    "drivers/base.py:Driver.describe": (1, PROBE),
    "drivers/surveyor.py:load": (1, NOT_INSTALLED),
    "drivers/base.py:find": (2, SETTING),
    "drivers/libvirt/life/save.py:LibvirtCheckpoints.write": (1, LATER),
    "drivers/libvirt/link/connection.py:LibvirtConnection._take": (1, HYPERVISOR),
    "drivers/libvirt/start/describe.py:Describer._dac_label": (1, SETTING),
    "drivers/libvirt/start/describe.py:Describer.show": (1, PROBE),
    "drivers/libvirt/driver.py:LibvirtDriver._blame": (1, PLAIN),
    "drivers/libvirt/link/faults.py:hanging": (1, HYPERVISOR),
    "drivers/libvirt/link/faults.py:late": (1, HYPERVISOR),
    "drivers/libvirt/link/faults.py:unreachable": (1, HYPERVISOR),
    "drivers/libvirt/start/hooks.py:mismatch_fault": (2, HYPERVISOR),
    "drivers/libvirt/start/hooks.py:refused": (1, PROGRAM),
    "drivers/libvirt/start/hooks.py:with_macs": (1, PROGRAM),
    "drivers/libvirt/survey/__init__.py:look_at_bridge": (3, PROBE),
    "drivers/libvirt/link/domains.py:require_free_mac": (1, PROGRAM),
    "drivers/libvirt/life/machine.py:LibvirtMachine.save": (1, LATER),
    "drivers/libvirt/life/machine.py:LibvirtMachine._settle": (1, LATER),
    "drivers/libvirt/life/machine.py:LibvirtMachine._write": (1, LATER),
    "drivers/libvirt/life/machine.py:LibvirtMachine.restart_from": (1, RESTORE),
    "drivers/libvirt/start/forwarding.py:ports_of": (1, SETTING),
    "drivers/libvirt/start/forwarding.py:address_of": (1, SETTING),
    "drivers/libvirt/start/forwarding.py:judge": (4, PROBE),
    "drivers/libvirt/start/hooks.py:_reserve.wrong": (1, PROGRAM),
    "drivers/libvirt/link/domains.py:clear": (1, "somebody has defined a domain by the name of a job's"),
    "drivers/libvirt/survey/__init__.py:is_active": (2, PROBE),
    "drivers/libvirt/survey/__init__.py:judge_network": (1, PROBE),
    "drivers/libvirt/start/capabilities.py:require_hypervisor": (2, SETTING),
    "drivers/libvirt/start/capabilities.py:wanted_type": (1, SETTING),
    "drivers/libvirt/life/machine.py:LibvirtMachine._restore_from": (1, LATER),
    "drivers/libvirt/start/disks.py:Provision._overlay": (1, IMAGES),
    "drivers/libvirt/survey/__init__.py:_run": (1, PROBE),
    "drivers/libvirt/survey/__init__.py:require_share": (1, PROBE),
    "drivers/libvirt/survey/__init__.py:start_passt": (4, PROBE),
    "drivers/libvirt/start/machine_devices.py:_of_slot": (2, DEVICE),
    "drivers/libvirt/start/machine_devices.py:_slot": (2, DEVICE),
    "drivers/libvirt/start/machine_devices.py:offered": (1, PROBE),
    "drivers/libvirt/start/machine_devices.py:refused": (1, DEVICE),
    "host/pci.py:look": (4, DEVICE),
    "host/pci.py:require_free": (1, DEVICE),
    "host/pci.py:whole": (1, DEVICE),
    "drivers/libvirt/survey/__init__.py:start_qemu": (2, PROBE),
    "drivers/libvirt/life/save.py:Saver.fault": (1, LATER),
    "drivers/libvirt/life/save.py:_unusable": (1, LATER),
    "drivers/libvirt/survey/__init__.py:_there.missing": (1, PROBE),
    "drivers/libvirt/survey/__init__.py:_trouble": (2, PROBE),
    "drivers/libvirt/survey/__init__.py:LibvirtSurveyor.survey": (1, PROBE),
    "drivers/libvirt/survey/__init__.py:kvm_fault": (1, "KVM does not work, and VM_ALLOW_EMULATION is False"),
    "drivers/libvirt/start/second_look.py:judge": (1, NOT_INSTALLED),
    "drivers/libvirt/start/tpm.py:_run": (2, f"{NOT_INSTALLED}, or {LACKING}"),
    "drivers/libvirt/start/virtiofs.py:_refused": (1, SETTING),
    "drivers/libvirt/start/virtiofs.py:begin": (2, NOT_INSTALLED),
    "drivers/libvirt/xen/__init__.py:XenDriver._domain_type": (1, HYPERVISOR),
    "drivers/libvirt/xen/__init__.py:XenSurveyor.survey.ask": (1, HYPERVISOR),
    "drivers/libvirt/xen/dom0.py:LibxlLog.judge": (2, HYPERVISOR),
    "drivers/libvirt/xen/dom0.py:attach": (1, LACKING),
    "drivers/managed.py:ManagedMachine._take_over": (1, LATER),
    "drivers/managed.py:ManagedMachine.report_lost": (1, LATER),
    "drivers/base.py:machine_types": (1, SETTING),
    "drivers/managed.py:ManagedDriver._fault_for": (1, LACKING),
    "drivers/script/machine.py:ScriptMachine.write_manifest": (1, LATER),
    "drivers/script/machine.py:Program.fault": (1, PROGRAM),
    "drivers/script/machine.py:Program.__init__": (2, SETTING),
    "drivers/script/machine.py:hypervisor": (1, SETTING),
    "drivers/script/machine.py:limits": (1, SETTING),
    "drivers/script/machine.py:named_user": (2, SETTING),
    "drivers/script/__init__.py:ScriptDriver.explain": (1, PROGRAM),
    "drivers/script/__init__.py:ScriptDriver.survey": (1, PROBE),
    "drivers/simulated.py:SimulatedDriver._fault": (1, STAND_IN),
    "drivers/simulated.py:SimulatedDriver.start": (1, STAND_IN),
    "drivers/vmrun/__init__.py:VmrunDriver._power_on": (1, HYPERVISOR),
    "drivers/vmrun/__init__.py:VmrunDriver.explain": (1, PROGRAM),
    "drivers/vmrun/__init__.py:VmrunDriver._take_snapshot": (1, HYPERVISOR),
    "drivers/vmrun/tool.py:from_vmrun": (1, HYPERVISOR),
    "drivers/vmrun/machine.py:VmrunMachine._require_free_space": (1, LATER),
    "drivers/vmrun/machine.py:VmrunMachine.ask_to_power_off": (1, LATER),
    "drivers/vmrun/machine.py:VmrunMachine.save": (1, LATER),
    "drivers/vmrun/tool.py:Tool.end": (1, "a VM of an earlier start is there and cannot be killed"),
    "drivers/vmrun/tool.py:Tool.find_product": (2, NOT_INSTALLED),
    "drivers/vmrun/tool.py:find_tool": (1, NOT_INSTALLED),
    "drivers/vmrun/working_copy.py:_local_settings": (1, SETTING),
    "drivers/vsphere/connection.py:VsphereConnection._open": (1, VSPHERE),
    "drivers/vsphere/connection.py:VsphereConnection._wait": (1, VSPHERE),
    "drivers/vsphere/connection.py:VsphereConnection._wait.ended": (1, VSPHERE),
    "drivers/vsphere/connection.py:VsphereConnection.once": (1, VSPHERE),
    "drivers/vsphere/connection.py:Access.from_settings": (1, SETTING),
    "drivers/vsphere/connection.py:_full_path": (1, SETTING),
    "drivers/vsphere/connection.py:_needed": (1, SETTING),
    "drivers/vsphere/connection.py:read_password": (3, SETTING),
    "drivers/vsphere/connection.py:tls_context": (1, SETTING),
    "drivers/vsphere/inventory.py:Store._transfer": (1, VSPHERE),
    "drivers/vsphere/inventory.py:Store.download": (1, LATER),
    "drivers/vsphere/inventory.py:Store._require_wanted": (1, LATER),
    "drivers/vsphere/inventory.py:_write": (1, LATER),
    "drivers/vsphere/connection.py:from_vsphere": (1, VSPHERE),
    "drivers/vsphere/connection.py:unreachable": (2, VSPHERE),
    "drivers/vsphere/inventory.py:Inventory._choose": (1, VSPHERE),
    "drivers/vsphere/inventory.py:Inventory.network": (1, VSPHERE),
    "drivers/vsphere/inventory.py:Inventory._at": (1, VSPHERE),
    "drivers/vsphere/inventory.py:network_map": (1, SETTING),
    "drivers/vsphere/machine.py:VsphereMachine.ask_to_power_off": (1, LATER),
    "drivers/vsphere/machine.py:VsphereMachine.look": (1, LATER),
    "drivers/vsphere/machine.py:VsphereMachine._is_home": (1, LATER),
    "drivers/vsphere/__init__.py:VsphereDriver._datastore": (2, PROBE),
    "drivers/vsphere/machine.py:Transport._create": (1, VSPHERE),
    "drivers/vsphere/machine.py:Transport.deploy": (1, VSPHERE),
    "drivers/vsphere/machine.py:Transport.fetch": (2, LATER),
    "drivers/vsphere/inventory.py:VsphereVm.go_back_to": (1, VSPHERE),
    "findings.py:Checks.outcome": (2, PROBE),
    "hooks/policy.py:choose_mac": (1, PROGRAM),
    "hooks/policy.py:Policy._made": (1, PROGRAM),
    "hooks/__init__.py:converse": (3, PROGRAM),
    "hooks/__init__.py:text_of": (2, PROGRAM),
    "hooks/xml_script.py:_bad_arguments": (1, SETTING),
    "hooks/xml_script.py:inspect": (3, PROGRAM),
    "hooks/xml_script.py:_run": (4, PROGRAM),
    "host/budget.py:Budget.left": (1, "this machine is too slow for a START: the job's programs took less than half"),
    "host/child.py:_fork": (1, LACKING),
    "host/child.py:_result": (1, LACKING),
    "host/system_logs.py:with_denial": (1, "a security module denies files of plain guests too (second_look)"),
    "host/job_user.py:blame": (1, ILL),
    "host/job_user.py:require_entry": (1, ILL),
    "host/job_user.py:require_means": (1, LACKING),
    "host/job_user.py:Identity.from_environ": (1, "HTCondor has not said whose job it is"),
    "host/job_user.py:_id": (1, "HTCondor has not said whose job it is"),
    "host/runtime_dir.py:runtime_dir": (1, LACKING),
    "host/serial_capture.py:ConsoleCapture.__init__": (2, LACKING),
    "host/wait.py:start_thread": (1, LACKING),
    "host/trust.py:require_trustworthy.refuse": (1, PROGRAM),
    "images/formats.py:_info": (2, NOT_INSTALLED),
    "images/qemu_img.py:CannotRun.fault": (1, NOT_INSTALLED),
    "images/qemu_img.py:NotInstalled.fault": (1, NOT_INSTALLED),
    "images/catalog.py:_broken": (1, IMAGES),
    "images/catalog.py:read": (1, IMAGES),
    "job/cloud_init.py:_check_yaml": (1, NOT_INSTALLED),
    "images/iso.py:_write": (2, NOT_INSTALLED),
    "job/engine.py:_ask": (2, f"{NOT_INSTALLED}, or {LACKING}"),
    "job/engine.py:judge": (1, NOT_INSTALLED),
    "job/archive.py:pack": (1, NOT_INSTALLED),
    "job/policy_view.py:PolicyView.meets": (1, SETTING),
    "job/run.py:guest_file": (1, NOT_INSTALLED),
    "job/devices.py:offered_shares": (2, SETTING),
    "job/devices.py:own_share": (1, SETTING),
    "job/vm_spec.py:memory_mib": (1, SETTING),
    "job/xen.py:require_bootloader": (1, SETTING),
    "protocol/transcript.py:create_file": (2, PROBE),
    "testing/contract.py:DriverContract.test_a_resume_that_failed_can_be_tried_again.fail": (1, STAND_IN),
}
"""Module and function -> how many machine faults are made there, and by which state of the machine."""

RULES = {
    "another daemon of libvirt's": HYPERVISOR,
    "the connection to libvirtd": HYPERVISOR,
    "libvirtd hung up": HYPERVISOR,
    "a network that is not active": NETWORK,
    "a network that is not there": NETWORK,
    "a bridge": NETWORK,
    "libvirt's own directory": "VM_RUN_AS_JOB_USER is True, and libvirt's directory is closed to that user",
    "passt": NETWORK,
    "the machine's networks": NETWORK,
    "what libvirt lets this daemon do": HYPERVISOR,
}
"""Rows of libvirt's table that blame the machine without a second look."""


def machine_faults() -> frozenset[str]:
    """The classes that blame the machine."""
    found = {"MachineFault"}
    bases = {
        name: set(re.findall(r"\w+", above))
        for path in SOURCES.rglob("*.py")
        for name, above in re.findall(r"^ *class (\w+)\(([^)]*)\):", path.read_text(), re.MULTILINE)
    }
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found)


def places(path: Path, faults: frozenset[str]) -> Counter[str]:
    """Where a module makes one, by the functions that are around it."""
    found: Counter[str] = Counter()
    text = path.read_text()
    if not any(name in text for name in faults):
        return found

    def visit(node: ast.AST, around: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = around
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = (*around, child.name)
            elif isinstance(child, ast.Call):
                name = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
                if name in faults:
                    found[f"{path.relative_to(SOURCES)}:{'.'.join(around)}"] += 1
            visit(child, inner)

    visit(ast.parse(text), ())
    return found


def test_every_place_that_makes_a_machine_fault_says_by_which_state_of_the_machine() -> None:
    faults = machine_faults()
    found = sum((places(path, faults) for path in SOURCES.rglob("*.py")), Counter())
    assert dict(found) == {place: number for place, (number, _) in PLACES.items()}


def test_a_rule_of_libvirts_that_a_job_may_cause_has_a_second_look() -> None:
    unlooked = [rule.name for rule in faults.RULES if blames_the_machine(rule) and not rule.job_may_cause]
    assert sorted(unlooked) == sorted(RULES)


def test_no_rule_of_vmrun_takes_a_text_of_the_jobs_for_the_machines() -> None:
    """The words of the job are cut out first, and only the last rule takes what nobody knows."""
    assert [rule.name for rule in VMRUN_RULES[:-1] if blames_the_machine(rule) and not rule.message] == []


def blames_the_machine(rule: Rule) -> bool:
    return issubclass(rule.fault, MachineFault)
