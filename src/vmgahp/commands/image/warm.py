"""``vmgahp image warm``: a guest of an image that has booted, from which jobs go on.

`vmgahp.drivers.libvirt.program.warm` describes such a template, and starts jobs from it.
"""

import argparse
import os
import shutil
import tempfile
import time

from vmgahp import vm_types
from vmgahp.checkpoint.store import MANIFEST_FILE
from vmgahp.commands.arguments import NotDone
from vmgahp.commands.image import say
from vmgahp.commands.image.store import advertise, no_such_image, settings_and_catalog
from vmgahp.commands.page import size as in_words
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.drivers.libvirt.life.machine import LibvirtMachine
from vmgahp.drivers.libvirt.program import warm
from vmgahp.drivers.libvirt.start.describe import Plan
from vmgahp.drivers.libvirt.start.disks import RECORD
from vmgahp.drivers.managed import ManagedDriver
from vmgahp.host.job_user import Identity
from vmgahp.host.trust import trouble_with_directory
from vmgahp.images.catalog import WARM_SETTING, templates
from vmgahp.job.ad import JobAd, as_expression

MOST = "VM_WARM_MAX"


class _Warmer(LibvirtDriver):
    """A driver whose guests wait for a job."""

    def plan(self, job: JobAd) -> Plan:
        plan = super().plan(job)
        run = plan.spec.devices.run
        assert run is not None
        self.target = warm.directory_for(plan, self._describer)
        if not self.target:
            raise NotDone("LIBVIRT_XML_SCRIPT, VM_POLICY or VM_MAC_HOOK is set, with which every job boots.")
        devices = plan.spec.devices._replace(run=run._replace(waits=True))
        return plan._replace(spec=plan.spec._replace(devices=devices), may_restart=False)

    def boot(self, job: JobAd, seconds: int) -> str:
        """Boot a guest, and leave it as a checkpoint in its working directory; return the place for jobs like this one.

        Raises `NotDone`, `errors.Fault`.
        """
        machine = ManagedDriver.start(self, job)
        try:
            if not (problem := _wait(machine, seconds)):
                machine.checkpoint()
        finally:
            machine.destroy()
        if problem:
            said = machine.resources.console.tail() if machine.resources.console else b""
            raise NotDone(f"{problem}. It printed: {said.decode('utf-8', 'replace')[-500:]!a}")
        return self.target


def make(options: argparse.Namespace) -> None:
    """Execute ``vmgahp image warm``. Raises `NotDone`, `errors.Fault`, OSError."""
    settings, found = settings_and_catalog()
    entry, place = found.entries.get(options.name), settings.string(WARM_SETTING)
    if entry is None:
        raise no_such_image(found, options.name)
    if options.type not in vm_types.QEMU:
        raise NotDone(f"--type {options.type}: jobs go on so with {', '.join(vm_types.QEMU)} only.")
    if os.geteuid() != 0:
        raise NotDone(f"only root may write to {place} ({WARM_SETTING}).")
    os.makedirs(place, mode=0o700, exist_ok=True)
    if trouble := trouble_with_directory(place):
        raise NotDone(f"{WARM_SETTING} = {place} is reached by {trouble}; only root may write there.")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=place, prefix=".unfinished-") as above:
        directory = os.path.join(above, "scratch")
        os.mkdir(directory)
        driver = _Warmer(options.type, settings, Identity(0, 0), say)
        try:
            target = driver.boot(_ad(options, directory), options.timeout)
        finally:
            driver.close()
        for name in os.listdir(directory):
            if name not in (MANIFEST_FILE, driver.checkpoints.memory, RECORD) and not name.endswith(".qcow2"):
                os.unlink(os.path.join(directory, name))
        if os.path.lexists(target):  # guests that have begun from it have their own files
            shutil.rmtree(target)
        os.rename(directory, target)
    occupied = _occupied(target)
    say(f"{target} has {in_words(occupied)}, and took {time.monotonic() - began:.0f} s; jobs like this go on from it:")
    say(f"vmgahp run --image catalog:{options.name} --memory {options.memory} --cpus {options.cpus} -- PROGRAM")
    _keep_within(settings, target)
    advertise(settings)


def _ad(options: argparse.Namespace, directory: str) -> JobAd:
    """Return the ad of the job that is booted, as ``vmgahp run`` makes it."""
    attributes: dict[str, str | int | bool] = {
        "VM_WORKING_DIR": directory, "User": "vmgahp_warm", "ClusterId": os.getpid(), "ProcId": 0,
        "JobVMType": options.type, "JobVMMemory": options.memory, "JobVM_VCPUS": options.cpus,
        "JobVMNetworking": False, "JobVMCheckpoint": True, "VMPARAM_vm_Disk": f"catalog:{options.name}:vda:w",
        "VMPARAM_vm_Run": "true", "VMPARAM_vm_Run_Boot": options.boot, "VMPARAM_vm_Run_Inputs": "",
    }  # fmt: skip
    return JobAd((name, as_expression(value)) for name, value in attributes.items())


def _wait(machine: LibvirtMachine, seconds: int) -> str:
    """Wait until the guest says that it has booted; return the reason why it does not, empty for none."""
    word, _, rest = warm.hear(machine, ("warm", "failed"), seconds, lambda _port: None).partition(" ")
    if word == "failed":
        return f"No job can go on from a guest of this image: {rest.partition(' ')[2] or rest}"
    problem = f"The guest has ended, or was not ready within {seconds} s (--timeout)"
    return "" if word else f"{problem}: it has no cloud-init (see --boot), or it does not boot"


def _occupied(directory: str) -> int:
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory))


def _keep_within(settings: Settings, made: str) -> None:
    """Remove the templates that were not used for the longest time, until the rest is small enough."""
    found = sorted((directory for _, directory in templates(settings)), key=os.path.getmtime)
    total, most = sum(map(_occupied, found)), settings.size(MOST)
    for directory in found:
        if total > most and directory != made:
            total -= _occupied(directory)
            shutil.rmtree(directory)
            say(f"{directory} is removed, the least used: all of them may have {in_words(most)} ({MOST})")
