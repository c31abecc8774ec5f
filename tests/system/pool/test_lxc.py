"""VM type libvirt with containers: libvirt's LXC driver, in a namespace over this very system.

The driver is laid over the system from its Debian package and never installed: a libvirtd that cannot start one of
its drivers does not start at all.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import JOB_UID
from tests.lab.namespace import LAB, REPOSITORY, Namespace, default_root, require_namespace
from tests.lab.programs import a_program

from vmgahp import errors, findings, lifecycle
from vmgahp.config import Settings
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
from vmgahp.testing.contract import DriverContract, Subject

pytestmark = pytest.mark.pool

WHO = Identity(JOB_UID, JOB_UID)

SCRIPT = """#!/bin/sh
# What an administrator would write: this system's own files, to be looked at only, as the root of each container.
name=$(sed -n 's/^VMPARAM_VM_NAME = "\\(.*\\)"$/\\1/p')
cat <<EOF
<domain type='lxc'>
  <name>$name</name>
  <memory unit='MiB'>64</memory>
  <vcpu>1</vcpu>
  <os><type>exe</type><init>/bin/sleep</init><initarg>1000</initarg></os>
  <devices>
    <filesystem type='mount'><source dir='/'/><target dir='/'/><readonly/></filesystem>
    <console type='pty'/>
  </devices>
</domain>
EOF
"""

CGROUPS = """mount -t tmpfs cgroup /sys/fs/cgroup
while IFS=: read -r _ controllers _; do
    [ -n "$controllers" ] || continue
    mkdir /sys/fs/cgroup/${controllers#name=}
    case $controllers in name=*) controllers=none,$controllers ;; esac
    mount -t cgroup -o $controllers cgroup /sys/fs/cgroup/${controllers#*name=}
done < /proc/self/cgroup
[ -n "$(ls /sys/fs/cgroup)" ] || { umount /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup; }"""
"""A namespace has no control groups, and a container is nothing but a group of processes."""


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """A namespace with a libvirtd that has containers."""
    require_namespace()
    packages = sorted(default_root().with_name("lxc").glob("libvirt-daemon-driver-lxc_*.deb"))
    if not packages:
        pytest.skip("libvirt's LXC driver was not fetched (scripts/test --pool does it)")
    exchange = tmp_path_factory.mktemp("lxc")
    shutil.copy(packages[-1], exchange / "driver.deb")
    with Namespace(exchange, root="/") as made:
        made.run("dpkg-deb", "-x", f"{LAB}/driver.deb", "/")
        made.run("sh", "-e", "-c", CGROUPS)
        made.run("libvirtd", "-d")
        made.wait_for_libvirt("lxc:///system")
        yield made


class Containers(Subject):
    """A container that sleeps; libvirtd is another's, reached by its socket."""

    vm_type = "libvirt"
    suspend = False
    checkpoint = False
    has_guest = False
    namespace: Namespace

    def prepare(self, scratch: Path, number: int, ends: bool) -> dict[str, str]:
        os.chown(scratch, WHO.uid, WHO.gid)
        return {}

    def exists(self, job: JobAd) -> bool:
        return job.vm_name() in self.virsh("list", "--all", "--name").split()

    def virsh(self, *words: str) -> str:
        return self.namespace.run("virsh", "-q", "-c", "lxc:///system", *words).stdout

    def bad_jobs(self) -> dict[str, JobAd]:
        job = self.job(2)
        return {
            "no memory": self.changed(job, JobVMMemory="0"),
            "a disk that is not there": self.changed(job, VMPARAM_vm_Disk='"nothing.img:vda:w:raw"'),
            "XML, where a script makes it": self.changed(job, VMPARAM_Libvirt_XML='"domain.xml"'),
        }

    def unfit(self) -> Settings:
        return containers(self.namespace, VM_LIBVIRT_DOMAIN_TYPE="xen")

    def power_off(self, job: JobAd) -> None:
        pid = self.virsh("dumpxml", job.vm_name()).partition("id='")[2].partition("'")[0]
        self.namespace.run("sh", "-c", f"kill -9 $(cat /proc/{pid}/task/{pid}/children)")


def containers(namespace: Namespace, **changes: str) -> Settings:
    socket = namespace.path("/run/libvirt/libvirt-sock")
    ours = {
        "VM_MEMORY": "1024", "VM_STOP_TIMEOUT": "1", "VM_LIBVIRT_URI": f"lxc+unix:///system?socket={socket}",
        "VM_LIBVIRT_DOMAIN_TYPE": "lxc", "LIBVIRT_XML_SCRIPT": str(namespace.exchange / "make-xml"),
    }  # fmt: skip
    return Settings({name: value for name, value in (ours | changes).items() if value})


@pytest.fixture
def settings(namespace: Namespace) -> Settings:
    a_program(namespace.exchange / "make-xml", SCRIPT)
    return containers(namespace)


class TestLxc(DriverContract):
    @pytest.fixture
    def subject(self, scratch: Path, namespace: Namespace, settings: Settings) -> Iterator[Subject]:
        with Containers(scratch.parent, settings, WHO) as subject:
            subject.namespace = namespace
            yield subject

    def test_our_description_is_not_for_containers(self, subject: Subject, job: JobAd, namespace: Namespace) -> None:
        driver = subject.driver(containers(namespace, LIBVIRT_XML_SCRIPT=""))
        with pytest.raises(errors.MachineFault, match="VM_LIBVIRT_DOMAIN_TYPE = lxc") as caught:
            driver.start(subject.changed(job, VMPARAM_vm_Disk=None))
        assert caught.value.code == errors.CRITICAL
        assert "LIBVIRT_XML_SCRIPT" in caught.value.hint
        bad = findings.first_bad(driver.survey(time.monotonic() + 60).findings)
        assert "exe" in bad.seen

    def test_the_survey_names_what_runs_here(self, subject: Subject) -> None:
        survey = subject.driver().survey(time.monotonic() + 60)
        assert survey.hypervisors == ["lxc"]
        assert survey.attributes["suspend"] is False
        assert "accel" not in survey.attributes


PID = """
import sys
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd
pairs = [JobAd.parse_line(line) for line in sys.stdin]
settings = Settings({"VM_MEMORY": "1024", "VM_LIBVIRT_URI": "lxc:///system", "VM_LIBVIRT_DOMAIN_TYPE": "lxc",
                     "LIBVIRT_XML_SCRIPT": "/lab/make-xml"})
machine = LibvirtDriver("libvirt", settings, Identity(54321, 54321), print).start(JobAd(pairs))
with open(f"/proc/{machine.pid()}/cmdline", "rb") as file:
    print("PROCESS", file.read().split(b"\\0")[0].decode(), machine.status().state)
machine.destroy()
print("GONE", machine.pid())
"""


def test_its_process_where_it_runs(namespace: Namespace, settings: Settings) -> None:
    if not namespace.path(str(REPOSITORY / "src")).exists():
        pytest.skip("the clone is on another file system than /, and not in the namespace")
    ad = 'VM_WORKING_DIR = "/lab/dir_1"\nUser = "alice@lab"\nClusterId = 1\nProcId = 0\nJobVMType = "libvirt"\n'
    (namespace.exchange / "dir_1").mkdir()
    os.chown(namespace.exchange / "dir_1", WHO.uid, WHO.gid)
    (namespace.exchange / "ad").write_text(ad + "JobVMMemory = 64\n")
    (namespace.exchange / "pid.py").write_text(PID)
    done = namespace.run("sh", "-c", f"{sys.executable} {LAB}/pid.py < {LAB}/ad")
    assert "PROCESS /usr/lib/libvirt/libvirt_lxc " + lifecycle.RUNNING in done.stdout, done
    assert "GONE 0" in done.stdout
