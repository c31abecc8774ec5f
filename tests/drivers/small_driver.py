"""A whole driver in 100 lines, blank ones aside, as anybody would write one: its guest is a shell that counts."""

import os
import select
import signal
import subprocess
import time
import uuid as uuids
from contextlib import suppress

from vmgahp import errors, findings, lifecycle
from vmgahp.drivers.base import Status, Survey
from vmgahp.drivers.managed import ManagedDriver, ManagedMachine
from vmgahp.host import proc
from vmgahp.job import vm_spec

GUEST = b'[ $2 = anew ] && : >"$1/count"; while :; do printf . >>"$1/count"; sleep 0.02; done'
"""It counts in a file, so that there is no memory to be saved."""


def find(directory):
    """The process of the guest in a scratch directory, or 0."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            ours = file.read().split(b"\0")[2:5] == [GUEST, b"small-vm", os.fsencode(directory)]
            if ours and os.getsid(pid) == pid:  # a child of it looks the same until its exec
                return pid
    return 0


def tell(directory, number):
    """Signal the guest, and wait for the end of one that is killed; whether there was one."""
    pid = find(directory)
    with suppress(OSError), open(os.pidfd_open(pid), "rb") as process:
        if find(directory) == pid:  # the number might be another process's by now
            signal.pidfd_send_signal(process.fileno(), number)
            return number != signal.SIGKILL or bool(select.select([process], [], [], 10)[0])
    return False


class SmallMachine(ManagedMachine):
    def pid(self):
        return find(self.spec.working_dir)

    def look(self):
        pid = self.pid()
        used = self.usage.read(proc.cpu_seconds(pid) if pid else None)
        return Status(self.state if pid else lifecycle.STOPPED, used, self.spec.vcpus, self.spec.memory_mib << 10)

    def ask_to_power_off(self):
        self.unpause()
        self.signal(signal.SIGTERM)

    def wait_until_off(self, seconds):
        end = time.monotonic() + seconds
        while self.pid() and time.monotonic() < end and not self.overruled:
            time.sleep(0.02)
        return not self.pid()

    def end_guest(self):
        tell(self.spec.working_dir, signal.SIGKILL)

    def pause(self):
        self.signal(signal.SIGSTOP)

    def unpause(self):
        self.signal(signal.SIGCONT)

    def save(self, operation):
        self.pause()
        self.step("save.written")
        self.end_guest()

    def restore(self, before_it_runs):
        before_it_runs()
        self.run("again")

    def signal(self, number):
        if not tell(self.spec.working_dir, number):
            raise errors.ClientFault(errors.VM_NOT_FOUND, f"{self.name} is gone.")

    def run(self, how):
        argv = ["/bin/sh", "-c", GUEST, "small-vm", self.spec.working_dir, how]
        self.process = subprocess.Popen(argv, start_new_session=True, **self.identity.of_process())
        count = os.path.join(self.spec.working_dir, "count")  # a program that begins has no arguments and no file yet
        while self.process.poll() is None and not (self.pid() and os.path.exists(count)):
            time.sleep(0.001)


class SmallDriver(ManagedDriver):
    def plan(self, job):
        return vm_spec.parse(job, self.settings)

    def show(self, spec):
        return f"a shell that counts for {spec.name}\n"

    def clear(self, spec):
        tell(spec.working_dir, signal.SIGKILL)

    def prepare(self, spec, resources):
        machine = SmallMachine(spec.name, resources, self.deadlines(10), self.log)
        machine.spec, machine.identity = spec, self.identity
        self.claim(resources, spec.working_dir, str(uuids.uuid4()))
        return machine

    def launch(self, machine, spec):
        machine.run("anew")

    def keep(self, machine, spec):
        self.record_end(machine.resources, spec.name, spec.working_dir, lambda: machine.usage.seconds, spec.sent)

    def kill(self, match, uuid=""):
        return tell(match, signal.SIGKILL)

    def survey(self, end):
        fault = None if self.settings.integer("VM_MEMORY") > 0 else errors.MachineFault("VM_MEMORY is 0.", "set it.")
        return Survey([findings.judge("sh", "/bin/sh", fault, "it counts")], hypervisors=["sh"], vm_types=["small"])
