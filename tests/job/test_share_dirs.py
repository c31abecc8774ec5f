"""The directories of the machine that a job may ask for: their names, their settings, for whom they are."""

import pytest

from tests.job.support import refusal, spec
from tests.jobs import ad
from vmgahp import config, errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault, MachineFault
from vmgahp.job.devices import Share, inspect_shares, offered_shares, require_shares_allowed
from vmgahp.job.policy_view import PolicyView

BASE = {"VM_MEMORY": "1024", "VM_SHARE_DIRS": "ref, Data"}
DIRS = {"VM_SHARE_DIR_REF": "/srv/ref", "VM_SHARE_DIR_DATA": "/srv/data:rw"}
SETTINGS = Settings(BASE | DIRS)
REF = Share("ref", "/srv/ref", "virtiofs", writable=False, setting="VM_SHARE_DIR_REF")
DATA = Share("Data", "/srv/data", "virtiofs", writable=True, setting="VM_SHARE_DIR_DATA")


def test_a_job_has_what_it_asks_for_and_nothing_unasked() -> None:
    assert spec(SETTINGS).devices.shares == ()
    assert spec(SETTINGS, VMPARAM_vm_Share_Dirs='"DATA"').devices.shares == (DATA,)
    assert spec(SETTINGS, VMPARAM_vm_Share_Dirs='" ref,data, ref"').devices.shares == (REF, DATA)
    both = SETTINGS.given()[0] | {"VM_SHARE_SCRATCH": "9p"}
    found = spec(Settings(both), VMPARAM_vm_Share="true", VM_ATTR_share_dirs='"ref"').devices.shares
    assert found == (Share("share", "/scratch", "9p"), REF)


def test_what_there_is_not_is_refused_by_name() -> None:
    fault = refusal(
        errors.MISMATCHED, "VMPARAM_vm_Share_Dirs", "'other'", settings=SETTINGS, VMPARAM_vm_Share_Dirs='"other"'
    )
    assert 'stringListIMember("other", VM_kvm_ATTR_share_dirs)' in fault.hint
    odd = refusal(errors.MISMATCHED, "'\\x08'", settings=SETTINGS, VMPARAM_vm_Share_Dirs='"\x08"')
    assert odd.hint.isprintable(), "a name that no directory can have is not to be copied"
    refusal(errors.MISMATCHED, "VMPARAM_vm_Share_Dirs", VMPARAM_vm_Share_Dirs='"ref"')
    refusal(errors.MISMATCHED, "not a string", settings=SETTINGS, VMPARAM_vm_Share_Dirs="true")
    asks = {"VMPARAM_vm_Share_Dirs": '"ref"', "JobVMCheckpoint": "true"}
    refusal(errors.MISMATCHED, "VMPARAM_vm_Share_Dirs", "JobVMCheckpoint", settings=SETTINGS, **asks)
    scripted = Settings(SETTINGS.given()[0] | {"LIBVIRT_XML_SCRIPT": "/opt/script"})
    refusal(errors.MISMATCHED, "LIBVIRT_XML_SCRIPT", settings=scripted, VMPARAM_vm_Share_Dirs='"ref"')


@pytest.mark.parametrize(
    ("value", "kind", "writable"),
    [
        ("/srv/ref:ro", "virtiofs", False),
        ("/srv/ref:RW", "virtiofs", True),
        ("/srv/ref:9p", "9p", False),
        ("/srv/ref:rw:9p", "9p", True),
        ("/srv/ref:9p,rw", "9p", True),
        ("/srv/ref:rw,ro", "virtiofs", False),
    ],
)
def test_how_a_directory_is_shared(value: str, kind: str, writable: bool) -> None:
    [found] = offered_shares(Settings({"VM_SHARE_DIRS": "ref", "VM_SHARE_DIR_REF": value}))
    assert found == REF._replace(kind=kind, writable=writable)


@pytest.mark.parametrize("value", ["", "srv/ref", "/srv/a:b", "/srv/ref:rx", "ref:rw"])
def test_a_directory_that_is_not_rightly_set(value: str) -> None:
    settings = Settings(BASE | {"VM_SHARE_DIR_REF": value})
    with pytest.raises(MachineFault, match="VM_SHARE_DIR_REF"):
        offered_shares(settings)


@pytest.mark.parametrize("name", ["share", "Share", "a/b", "ref_if", "x" * 32, "é"])
def test_a_name_that_cannot_be_one(name: str) -> None:
    with pytest.raises(MachineFault, match="VM_SHARE_DIRS"):
        offered_shares(Settings({"VM_SHARE_DIRS": name}))


@pytest.mark.parametrize(
    ("condition", "allowed"),
    [
        ("", True),
        ("true", True),
        ('Owner == "alice"', True),
        ('TARGET.Owner == "alice" && MY.JobVMMemory < 100000', True),
        ('stringListMember("ref", VMPARAM_vm_Share_Dirs)', True),
        ('Owner == "bob"', False),
        ("NoSuchAttribute", False),
        ('"a string"', False),
    ],
)
def test_for_whom_it_is(condition: str, allowed: bool) -> None:
    settings = Settings(SETTINGS.given()[0] | {"VM_SHARE_DIR_REF_IF": condition})
    view = PolicyView(ad(Owner='"alice"', VMPARAM_vm_Share_Dirs='"ref"'), settings)
    require_shares_allowed(view, (DATA,))
    if allowed:
        require_shares_allowed(view, (DATA, REF))
        return
    with pytest.raises(JobFault, match="VM_SHARE_DIR_REF_IF"):
        require_shares_allowed(view, (DATA, REF))


def test_a_condition_that_is_no_expression_is_the_machines_fault() -> None:
    settings = Settings(SETTINGS.given()[0] | {"VM_SHARE_DIR_REF_IF": "Owner =="})
    with pytest.raises(MachineFault, match="VM_SHARE_DIR_REF_IF"):
        require_shares_allowed(PolicyView(ad(), settings), (REF,))
    with pytest.raises(MachineFault, match="VM_SHARE_DIR_REF_IF"):
        inspect_shares(settings)
    behind = Settings(SETTINGS.given()[0] | {"VM_SHARE_DIR_REF_IF": "false", "VM_SHARE_DIR_DATA_IF": "Owner =="})
    with pytest.raises(MachineFault, match="VM_SHARE_DIR_DATA_IF"):
        inspect_shares(behind)
    assert inspect_shares(SETTINGS) == [REF, DATA]


def test_their_settings_are_read_from_the_same_source(tmp_path: "object") -> None:
    environ = {f"_CONDOR_{name}": value for name, value in (BASE | DIRS).items()}
    environ["_CONDOR_VM_SHARE_DIR_OTHER"] = "/etc"
    settings = config.load(environ | {"HOME": str(tmp_path)})
    assert settings.string("VM_SHARE_DIR_DATA") == "/srv/data:rw"
    assert settings.where("VM_SHARE_DIR_REF") == "the environment"
    assert settings.where("VM_SHARE_DIR_REF_IF") == "default"
    assert "VM_SHARE_DIR_OTHER" not in settings.given()[0], "nobody has named it"
