"""What SELinux and AppArmor have denied, by lines that auditd and the kernel wrote, and whose fault it makes."""

from pathlib import Path

import pytest

from vmgahp import errors
from vmgahp.host import system_logs

NOW = 1_795_661_124
SVIRT = (
    'type=AVC msg=audit({when}.783:23): avc:  denied  {{ open }} for  pid=382 comm="qemu-system-x86" '
    'path="/var/lib/condor/execute/dir_5/guest.img" dev="vda" ino=215 scontext=system_u:system_r:svirt_tcg_t:s0:c1,c2 '
    "tcontext=system_u:object_r:condor_var_lib_t:s0 tclass=file permissive={permissive}"
)
APPARMOR = (
    'type=AVC msg=audit({when}.1:9): apparmor="DENIED" operation="open" class="file" '
    'profile="libvirt-5e1b4d66-0000-4000-8000-000000000000" name="/srv/x" pid=7 comm="qemu-system-x86"'
)


def last(tmp_path: Path, *lines: str, since: float = NOW) -> str:
    log = tmp_path / "audit.log"
    log.write_text("\n".join(lines))
    return system_logs.denial_since(since, str(log), str(tmp_path / "no kernel log"))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_logs, "_SETTLES", 0)


@pytest.mark.parametrize("line", [SVIRT, APPARMOR])
def test_the_last_denial_is_told(tmp_path: Path, line: str) -> None:
    wanted = line.format(when=NOW, permissive=0)
    told = last(tmp_path, "type=USER msg=audit(1.0:1): x", wanted, "type=EOE msg=audit(1.0:1):")
    assert told == " ".join(wanted.split())


@pytest.mark.parametrize(
    "line",
    [
        SVIRT.format(when=NOW - 5, permissive=0),
        SVIRT.format(when=NOW, permissive=1),
        SVIRT.format(when=NOW, permissive=0).replace("svirt_tcg_t", "getty_t"),
        APPARMOR.format(when=NOW).replace("libvirt-", "firefox-"),
        APPARMOR.format(when=NOW).replace("DENIED", "ALLOWED"),
    ],
    ids=["earlier", "permissive", "another domain", "another profile", "allowed"],
)
def test_what_is_no_denial_of_the_guest(tmp_path: Path, line: str) -> None:
    assert last(tmp_path, line) == ""


def test_a_machine_without_an_audit_log(tmp_path: Path) -> None:
    assert system_logs.denial_since(NOW, str(tmp_path / "none"), str(tmp_path / "none")) == ""


def test_a_file_that_qemu_may_not_open_is_the_machines_fault() -> None:
    job = errors.JobFault("VMGAHP_ERR_JOBCLASSAD_KVM_INVALID_DISK_PARAM", "Could not open 'x': Permission denied.")
    told = system_logs.with_denial(job, "avc: denied { open }")
    assert isinstance(told, errors.MachineFault)
    assert "avc: denied { open }" in told.hint
    assert system_logs.with_denial(job, "") is job


def test_another_fault_has_the_denial_in_its_hint() -> None:
    fault = errors.MachineFault("libvirt is gone.", "look.")
    assert (
        system_logs.with_denial(fault, "avc: denied { use }").hint
        == "look. And a security module has denied it: avc: denied { use }"
    )
