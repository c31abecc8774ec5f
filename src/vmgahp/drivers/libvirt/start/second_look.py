"""A second look at a machine on which a start has failed: the trial start of a plain guest.

Messages of libvirt and QEMU about a start do not distinguish a job that asks for too much from a machine that lacks
something, and contain words that the job chose. So if a job may be the cause, a guest is started that has nothing of
the job's but its memory, and the machine is blamed only if that fails as well. It runs as libvirt's own user: a process
of the job's user could kill it. LIBVIRT_XML_SCRIPT, which makes a description from the job ad, makes one for a plain
job.
"""

import os
import shutil
import tempfile
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.domain import build, verify
from vmgahp.drivers.libvirt.link import domains
from vmgahp.drivers.libvirt.start import capabilities, tpm
from vmgahp.drivers.libvirt.start.describe import Describer, Plan
from vmgahp.drivers.libvirt.start.hooks import described
from vmgahp.hooks import xml_script
from vmgahp.host.job_user import Identity
from vmgahp.host.runtime_dir import claim
from vmgahp.job.devices import Devices
from vmgahp.job.disks import Disk

SECONDS = 60.0
"""Seconds for a plain guest to start and end."""
_PAUSED = libvirt.VIR_DOMAIN_START_PAUSED | libvirt.VIR_DOMAIN_START_AUTODESTROY


def judge(fault: errors.Fault, plan: Plan, describer: Describer, *, with_disk: bool = False) -> errors.Fault:
    """Return the fault of a start that the job may have caused: the job's, unless a plain guest fails to start, too.

    `with_disk` gives the plain guest a disk beside the job's scratch directory, in EXECUTE, for faults of files there.
    """
    if not isinstance(fault, errors.MachineFault):
        return fault
    if domains.is_qemu(plan.domain_type):
        if not _plain_guest_starts(plan, describer, with_disk=with_disk):
            return fault
        # As this daemon's own user, for the same reason; the trial uses nothing of the job's.
        own = Identity(os.geteuid(), os.getegid())
        if plan.spec.devices.tpm and (reason := tpm.trouble(own, SECONDS)):
            return errors.MachineFault(f"{fault.problem} A plain VM starts, and {reason}.", tpm.NO_ANSWER_HINT)
    elif plan.xml is None:  # there is no plain guest for another hypervisor's script
        return fault
    hint = "take out what the message is about, or ask for less; no process of the job's may disturb its VM's start."
    return errors.JobFault(errors.MISMATCHED, f"{fault.problem} A plain VM starts on this machine.", hint)


def _plain_guest_starts(plan: Plan, describer: Describer, *, with_disk: bool) -> bool:
    uuid = domains.new_uuid()
    name = f"{domains.LOOK}{uuid}"
    bare = plan.spec.vm._replace(name=name, nics=(), vcpus=1)
    devices = Devices(arch=plan.spec.devices.arch)
    spec = plan.spec._replace(vm=bare, disks=(), requests=(), vnc=False, devices=devices)
    plain = plan._replace(spec=spec, label="", passt=False, panic="")

    def start(opened: libvirt.virConnect) -> None:
        marked = etree.fromstring(made.xml)
        domains.mark(marked)
        # Defined like a job's, since that may be what fails.
        domain = opened.defineXML(etree.tostring(marked, encoding="unicode"))
        try:
            domain.createWithFlags(_PAUSED)
            if not made.authors:
                verify.against_job(domain.XMLDesc(), made.xml, spec)
            elif script:
                verify.against_script(domain.XMLDesc(), made.xml, spec)
        finally:
            domains.end(domain)

    script, room, claimed = describer.settings.xml_script(), "", ""
    try:
        claimed = claim(uuid)  # what is left of it is removed when this process is gone
        if script:
            room = claimed
            _plain_disk(room)
            spec = spec._replace(vm=bare._replace(working_dir=room, memory_mib=xml_script.PLAIN_MEMORY))
            lines = xml_script.plain(room, name, f'JobVMType = "{spec.vm.vm_type}"')
            xml = describer.by_script(script, lines, spec, uuid)
            verify.before_libvirt(xml)
        else:
            if with_disk:
                room = tempfile.mkdtemp(prefix=domains.LOOK, dir=os.path.dirname(spec.vm.working_dir))
                os.chmod(room, 0o711)  # noqa: S103 - libvirt's user passes
                spec = spec._replace(disks=(_plain_disk(room),))
            xml = build.build(spec, describer.host(plain, uuid))
        made = described(plan.view, describer.log, spec, xml, dry=False)
        describer.connection.call(start, seconds=SECONDS)
    except (libvirt.libvirtError, errors.Fault, verify.Mismatch, OSError) as error:
        describer.log(f"A plain VM does not start here either: {error}")
        return False
    finally:
        capabilities.forget_firmware(name, describer.connection.uri, describer.log)
        for made_for_it in filter(None, (room, claimed)):
            shutil.rmtree(made_for_it, ignore_errors=True)
    return True


def _plain_disk(room: str) -> Disk:
    """Make an empty disk, which libvirt's user may only read. Raises OSError."""
    path = os.path.join(room, xml_script.PLAIN_DISK)
    with open(path, "xb") as file:
        file.truncate(1 << 20)
    return Disk(path, "vda", "", False, "raw", True, "disk")
