"""The check that this machine has the architecture, UEFI, TPM or share that a job asks for.

libvirt would refuse most of it too, with an error that does not say who must act.
"""

import os

from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.domain.build import firmware_of
from vmgahp.drivers.libvirt import qemu_process
from vmgahp.drivers.libvirt.connection import LibvirtConnection
from vmgahp.drivers.libvirt.emulator import of_machines, uefis
from vmgahp.host import packages
from vmgahp.host.job_user import Identity
from vmgahp.job.devices import Devices
from vmgahp.job.kinds import ARM, BIOS, NINEP, VIRTIOFS, X86
from vmgahp.job.spec import JobSpec

PANIC_MODELS = {X86: ("isa", 0), ARM: ("pvpanic", 9_001_000)}
"""The panic device of an architecture's machines, and the first libvirt that knows it.

s390x and pseries have panic devices of their own.
"""


def type_for(spec: JobSpec, domain_type: str, settings: Settings) -> str:
    """Return the domain type for the architecture that the job wants: a foreign one needs an emulator.

    Raises `errors.JobFault`.
    """
    if not is_foreign(spec) or domain_type == "qemu":
        return domain_type
    if domain_type == "kvm" and settings.boolean("VM_ALLOW_EMULATION"):
        return "qemu"
    raise _refused(
        f"The job wants a guest of the architecture {spec.devices.arch}, and this machine is of {os.uname().machine} "
        "and does not emulate others (VM_ALLOW_EMULATION)",
        "require a machine that runs such guests (VM_kvm_ATTR_arches).",
    )


def is_foreign(spec: JobSpec) -> bool:
    """Return True if the guest's architecture is another than the machine's."""
    return spec.devices.arch not in ("", os.uname().machine)


def arch_of(spec: JobSpec) -> str:
    """Return the guest's architecture for `vmgahp.domain.build.Host`: empty for x86_64 on itself."""
    arch = spec.devices.arch or os.uname().machine
    return "" if arch == X86 and not is_foreign(spec) else arch


def require(
    spec: JobSpec, domain_type: str, label: str, connection: LibvirtConnection, settings: Settings, identity: Identity
) -> None:
    """Make sure that this machine has what the job asks for. Raises `errors.JobFault`, `libvirt.libvirtError`.

    `label` is the user that QEMU runs as, empty for libvirt's own.
    """
    wanted = spec.devices
    firmware = firmware_of(spec, arch_of(spec))
    if not qemu_process.is_qemu(domain_type):
        if wanted != Devices():
            raise _refused(
                f"The job asks for devices that domains of type {domain_type} do not get here: {_named(wanted)}",
                "leave them out, or require a machine with kvm or qemu in VM_HYPERVISORS.",
            )
        return
    kinds = {share.kind for share in wanted.shares}
    if NINEP in kinds and not label and identity.switching:
        raise _refused(
            "A directory is to be shared by 9p, and on this machine QEMU cannot run as the job's user, who alone is to "
            "work on it",
            "require another machine (VM_kvm_ATTR_share, VM_kvm_ATTR_share_dirs), or hand the files over on a disk.",
        )
    if VIRTIOFS in kinds:
        from vmgahp.drivers.libvirt import virtiofs

        if reason := virtiofs.trouble(identity, virtiofs.TRIAL_WAIT):
            raise _refused(
                f"A directory is to be shared by virtiofs, and this machine cannot do that: {reason}",
                f"require a machine that can (VM_kvm_ATTR_share, VM_kvm_ATTR_share_dirs). {virtiofs.hint()}",
            )
    arch = wanted.arch or os.uname().machine
    if firmware == BIOS and not wanted.arch and not wanted.tpm:
        return  # the usual job needs no query
    capabilities = connection.call(lambda libvirtd: of_machines(libvirtd, arch, domain_type))
    if capabilities is None:
        raise _refused(
            f"The job wants a guest of the architecture {arch}, for which this machine has no QEMU",
            "leave VMPARAM_vm_Arch out, or require a machine that has one (VM_kvm_ATTR_arches).",
        )
    if wanted.tpm:
        from vmgahp.drivers.libvirt import tpm

        # The same check as the probe's: a job that asks for a TPM does not match a machine that offers none.
        if reason := tpm.why_none(tpm.is_offered(capabilities)) or tpm.trouble(identity, tpm.TRIAL_WAIT):
            raise _refused(
                f"VMPARAM_vm_TPM = true, and this machine has no software TPM: {reason}",
                f"require a machine that has one (VM_kvm_ATTR_tpm); here: {packages.of_system(tpm.PACKAGES)}.",
            )
    if firmware not in (BIOS, *uefis(capabilities)):
        raise _refused(
            f"The job boots by the firmware {firmware}, and this machine has none for {arch}",
            "require a machine that has it (VM_kvm_ATTR_firmware).",
        )


def panic_model(spec: JobSpec, domain_type: str, connection: LibvirtConnection) -> str:
    """Return the panic device that the guest gets; empty if there is none for its machine."""
    arch = spec.devices.arch or os.uname().machine
    if not qemu_process.is_qemu(domain_type) or arch not in PANIC_MODELS:
        return ""
    model, since = PANIC_MODELS[arch]
    return model if not since or connection.call(lambda libvirtd: libvirtd.getLibVersion()) >= since else ""


def _named(wanted: Devices) -> str:
    return ", ".join(name for name, value in wanted._asdict().items() if value)


def _refused(problem: str, hint: str) -> errors.JobFault:
    return errors.JobFault(errors.MISMATCHED, f"{problem}.", hint)
