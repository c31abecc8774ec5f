"""Guests that have booted and wait for a job, which goes on from one instead of booting.

A template is a checkpoint of such a guest in a directory of root's, by ``vmgahp image warm``: its memory, its overlay
of the catalog's image, their manifest. It never had a network, user data or files of a job. It is for every job whose
VM differs from its own in name, files and NICs alone: the job gets a copy of the overlay, the memory is restored under
its name, and its NICs are plugged in. Before the guest answers it has taken random numbers, a time and an identity of
its own (``await_job`` and ``renew`` of `vmgahp/guest/run`). Whatever fails until then is followed by a cold start.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from queue import Empty
from secrets import token_hex
from time import monotonic, time
from xml.etree import ElementTree as etree

import libvirt

from vmgahp import errors
from vmgahp.checkpoint import store
from vmgahp.checkpoint.manifest import BACKING, DISK
from vmgahp.checkpoint.store import FileRef, Unusable
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.life.machine import LibvirtMachine
from vmgahp.drivers.libvirt.life.save import LibvirtCheckpoints, LibvirtRestart
from vmgahp.drivers.libvirt.link import domains
from vmgahp.drivers.libvirt.start.describe import CONTROL, Describer, Plan
from vmgahp.drivers.surveyor import Logger
from vmgahp.host import proc
from vmgahp.host.guardian import environment
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run
from vmgahp.host.serial_capture import LinePort
from vmgahp.host.trust import trouble_with_directory
from vmgahp.host.wait import start_thread
from vmgahp.images.catalog import WARM_SETTING, templates
from vmgahp.job.disks import Disk
from vmgahp.job.look import is_there
from vmgahp.job.run import guest_file

WAKE_SECONDS = 60.0
"""Seconds for a restored guest to answer; an emulated one on an emulated machine takes about 30."""
IMAGES_SETTING = "VM_WARM_IMAGES"
_SEEN, _MOST_SEEN = ".seen-", 200
"""The prefix of the files that count cold starts, a byte for each, by the name of the template; and their number."""
_IMAGE_COMMAND = "import sys; from vmgahp.cli import main; sys.exit(main(sys.argv))"
_BOOT_SECONDS = 1800


class Cold(Unusable):
    """A warm start that has failed: the job's VM is to boot."""

    def __init__(self, reason: object) -> None:
        super().__init__(str(reason), True)


def directory_for(plan: Plan, describer: Describer) -> str:
    """Return the directory of the template for a job; empty if there can be none. Raises `errors.Fault`, OSError."""
    spec, overlay = plan.spec, _overlay(plan, describer.settings)
    if overlay is None or overlay.image is None:
        return ""
    image = overlay.image
    base = store.describe(describer.identity, spec.vm.working_dir, FileRef(BACKING, image.path))
    same = (_shape(describer.show(plan), spec.vm.working_dir), str(base.size), base.digest)
    digest = hashlib.sha256("\0".join(same).encode() + guest_file("agent") + guest_file("run")).hexdigest()
    place = describer.settings.string(WARM_SETTING)
    return os.path.join(place, f"{image.name}-{spec.vm.memory_mib}-{spec.vm.vcpus}-{digest[:16]}")


def find(plan: Plan, describer: Describer, checkpoints: LibvirtCheckpoints, log: Logger) -> LibvirtRestart | None:
    """Open the template for a job, to go on from it under the job's name; None if there is none that can be used."""
    try:
        ours = _overlay(plan, describer.settings)
        if ours is None or ours.image is None or ours.image.name not in dict(templates(describer.settings)):
            return None
        came_back = checkpoints.store(plan.checkpoint_spec).exists()
        if came_back or is_there(plan.spec.vm.working_dir, ours, describer.identity):
            return None
        directory = directory_for(plan, describer)
        if not directory or not os.path.isdir(directory):
            return None
        if trouble := trouble_with_directory(directory):
            raise Cold(f"others could change it ({trouble})")
        root = Identity(os.geteuid(), os.getegid())
        store = checkpoints.store(plan.spec)._replace(identity=root, directory=directory)
        saved = store.load()
        if saved is None:
            return None
        if reasons := list(store.kind.differences(saved.facts, checkpoints.here(plan.domain_type))):
            raise Cold("; ".join(reasons))
        domain, uuid = etree.fromstring(saved.facts["xml"]), domains.new_uuid()
        for tag, text in (("name", plan.spec.vm.name), ("uuid", uuid)):
            for element in domain.iterfind(tag):
                element.text = text
        facts = {**saved.facts, "xml": etree.tostring(domain, encoding="unicode"), "uuid": uuid}
        [overlay] = [file.path for file in saved.files if file.role == DISK and file.writable]
        os.utime(directory)
        disk = os.open(os.path.join(directory, overlay), os.O_RDONLY | os.O_NOFOLLOW)
        with ExitStack() as undo:
            undo.callback(os.close, disk)
            memory = store.open_memory(saved, plan.spec.vm.memory_mib)
            undo.pop_all()
        return LibvirtRestart(saved._replace(cpu_seconds=0.0, facts=facts), memory, disk)
    except (Unusable, errors.Fault, OSError, ValueError) as error:
        log(f"{plan.spec.vm.name} starts cold, its template cannot be used: {error}")
        return None


def want(plan: Plan, describer: Describer, log: Logger) -> None:
    """Have this machine make the template that a job could have gone on from, where there have been such jobs before.

    A thread asks for it, for which the START does not wait. Raises `errors.MachineFault` if there can be none.
    """
    overlay, wanted = _overlay(plan, describer.settings), describer.settings.strings(IMAGES_SETTING)
    if overlay is not None and overlay.image is not None and {overlay.image.name, "*"} & set(wanted):
        start_thread("warm", _ask_for, overlay.image.name, plan, describer, log)


def _ask_for(image: str, plan: Plan, describer: Describer, log: Logger) -> None:
    """Have a service of systemd's, which outlives the job, make a template, also in place of a useless one."""
    spec = plan.spec
    assert spec.devices.run
    try:
        directory = directory_for(plan, describer)
        place, name = os.path.split(directory)
        if not directory or not _is_wanted(place, name):
            return
        [available] = proc.meminfo("MemAvailable")
        if available >> 10 < 2 * spec.vm.memory_mib:
            log(f"{place} gets no {name}: it takes {2 * spec.vm.memory_mib} MiB of memory that are available")
            return
        words = ["systemd-run", "--quiet", "--collect", "--no-block", "--nice=19", f"--unit=vmgahp-warm-{name}"]
        words += [f"--property=RuntimeMaxSec={2 * _BOOT_SECONDS}"]
        if context := proc.selinux_context(os.getpid()):  # the policy lets a guest connect to a server in that alone
            words += [f"--property=SELinuxContext={context}"]
        words += [f"--setenv={variable}={value}" for variable, value in environment(os.environ).items()]
        words += ["--", sys.executable, "-I", "-c", _IMAGE_COMMAND, "image", "warm", image]
        words += [f"--memory={spec.vm.memory_mib}", f"--cpus={spec.vm.vcpus}", f"--type={plan.domain_type}"]
        said = run([*words, f"--boot={spec.devices.run.boot}", f"--timeout={_BOOT_SECONDS}"], deadline=10.0)
        why = "" if said.status == 0 else " ".join(said.complaints) or "systemd-run does not answer"
        log(f"{place} gets {name} for jobs to come" if not why else f"{place} gets no {name}: {why}")
    except (errors.Fault, OSError) as error:
        log(f"no guest of {image} is booted for jobs to come: {error}")


def _is_wanted(place: str, name: str) -> bool:
    """Count a cold start; return True for the second, and for the fourth, eighth and so on. Raises OSError."""
    os.makedirs(place, mode=0o700, exist_ok=True)
    if trouble := trouble_with_directory(place):
        raise PermissionError(f"others could change {place} ({trouble})")
    with open(os.path.join(place, _SEEN + name), "ab") as file:
        file.write(b".")
        count = file.tell()
    seen = (entry.path for entry in os.scandir(place) if entry.name.startswith(_SEEN))
    for path in sorted(seen, key=os.path.getmtime)[:-_MOST_SEEN]:
        os.unlink(path)
    return count > 1 and not count & (count - 1)


def has_failed(restart: LibvirtRestart | None, error: BaseException) -> bool:
    """Return True if a warm start has failed, by whose fault ever: the job is to start cold."""
    fails = isinstance(error, (errors.Fault, OSError, Unusable, libvirt.libvirtError))
    return restart is not None and restart.is_warm and fails and not isinstance(error, errors.ClientFault)


def copy(source: int, output: int) -> None:
    """Copy the overlay of a template into a file of the job's. Raises OSError."""
    with open(source, "rb", closefd=False) as reader, open(output, "wb", closefd=False) as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)


def without_nics(xml: str) -> tuple[str, tuple[str, ...]]:
    """Return a domain XML without its NICs, and the XML of each: a template has none."""
    domain = etree.fromstring(xml)
    nics = []
    for devices in domain.iterfind("devices"):
        for nic in devices.findall("interface"):
            nics.append(etree.tostring(nic, encoding="unicode"))
            devices.remove(nic)
    return etree.tostring(domain, encoding="unicode"), tuple(nics)


def with_nics(xml: str, nics: Sequence[str]) -> str:
    """Return a domain XML with the NICs that were plugged in."""
    domain = etree.fromstring(xml)
    for devices in domain.iterfind("devices"):
        devices.extend(map(etree.fromstring, nics))
    return etree.tostring(domain, encoding="unicode")


def _control(machine: LibvirtMachine) -> LinePort:
    port = machine.resources.run_ports[CONTROL]
    assert isinstance(port, LinePort)
    return port


def hear(machine: LibvirtMachine, words: Sequence[str], seconds: float, ask: Callable[[LinePort], None]) -> str:
    """Return the first line of a guest that begins with one of `words`; empty if it says none, or is gone.

    Twice a second `ask` is called with its port.
    """
    port = _control(machine)
    end, is_gone = monotonic() + seconds, False
    while monotonic() < end:
        ask(port)
        try:
            line = port.lines.get(True, 0.5) or ""
        except Empty:
            if is_gone:  # and its last words would be here
                break
            is_gone = machine.guest.watch.gone.is_set()
            continue
        if line.partition(" ")[0] in words:
            return line
    return ""


def wake(machine: LibvirtMachine) -> None:
    """Let a restored guest take the job, and wait until it says that it has. Raises `Cold`."""

    def ask(port: LinePort) -> None:
        port.say(f"go {round(time())} {token_hex(64)}")  # lost where the port is not open yet

    line = hear(machine, ("hello", "failed"), WAKE_SECONDS, ask)
    if not line.startswith("hello"):
        raise Cold(f"the restored guest has said {line!a}" if line else "the restored guest is silent, or is gone")
    _control(machine).lines.put(line)  # for the monitor of the program


def _overlay(plan: Plan, settings: Settings) -> Disk | None:
    """Return the overlay of a VM with a program, for which there may be a template; None for any other VM."""
    spec = plan.spec
    seed, overlays = spec.devices.user_data, [disk for disk in spec.disks if disk.image and disk.writable]
    changed = settings.xml_script() or settings.string("VM_POLICY") or settings.string("VM_MAC_HOOK") or plan.xml
    own = plan.devices or spec.devices.ssh or (seed and seed.user_data) or any(disk.grow for disk in spec.disks)
    return overlays[0] if len(overlays) == 1 and not (changed or own) else None


def _shape(xml: str, directory: str) -> str:
    """Return what a domain XML has in common with that of every job of the same kind."""
    domain = etree.fromstring(without_nics(xml)[0])
    for tag in ("name", "uuid", "genid", "description", "seclabel"):
        for element in domain.findall(tag):
            domain.remove(element)
    return etree.tostring(domain, encoding="unicode").replace(os.path.join(directory, ""), "")
