"""A worker's machine: what it has of its own, and what becomes of it."""

import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.lab.namespace import REPOSITORY, wait_until, why_not
from tests.lab.worker_machine import MACHINE

pytestmark = [pytest.mark.libvirt, pytest.mark.skipif(why_not(pool=False) != "", reason=why_not(pool=False))]

CONSOLE = """
import sys
for line in sys.stdin:
    print(str(eval(line)).replace("\\n", " "), flush=True)
"""
"""What a worker is: it does what it is told by its standard input."""
DOMAIN = "<domain type='qemu'><name>x</name><memory>32768</memory><os><type>hvm</type></os></domain>"


class Worker:
    def __init__(self, process: "subprocess.Popen[str]", said: Path) -> None:
        self.process = process
        self.said = said
        """What it said on its standard error."""

    def tell(self, expression: str) -> str:
        """The value of an expression in it."""
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 60)[0], self.said.read_text()
        return self.process.stdout.readline().strip()

    def virsh(self, *words: str) -> str:
        return self.tell(f"__import__('subprocess').getoutput({shlex.join(['virsh', *words])!r})")


@contextmanager
def worker(directory: Path, number: int = 0) -> Iterator[Worker]:
    said = directory / f"said-{number}"
    with (
        open(said, "wb") as stderr,
        subprocess.Popen(
            ["bash", MACHINE, sys.executable, "-c", CONSOLE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        yield Worker(process, said)


@pytest.fixture
def domain(tmp_path: Path) -> Path:
    path = tmp_path / "domain.xml"
    path.write_text(DOMAIN)
    return path


def test_two_have_nothing_of_each_other(tmp_path: Path, domain: Path) -> None:
    with ExitStack() as stack:
        one, other = (stack.enter_context(worker(tmp_path, number)) for number in range(2))
        for subject in (one, other):  # equal names and numbers, and so equal cgroups
            assert "Domain 'x' created" in subject.virsh("create", str(domain))
        one.virsh("destroy", "x")
        assert one.virsh("list", "--name").strip() == ""
        assert other.virsh("list", "--name").strip() == "x"
    assert one.process.returncode == other.process.returncode == 0


def test_a_libvirtd_that_dies_is_started_again_and_that_is_said(tmp_path: Path) -> None:
    with worker(tmp_path) as subject:
        assert "QEMU" in subject.virsh("version")
        subject.tell("__import__('subprocess').call(['pkill', '-KILL', '-x', 'libvirtd'])")
        wait_until("libvirtd to come back", lambda: "QEMU" in subject.virsh("version"), 10)
        assert "libvirtd has died by itself (exit 137)" in subject.said.read_text()


def test_all_of_it_ends_with_its_starter(tmp_path: Path, domain: Path) -> None:
    with worker(tmp_path) as subject:
        assert "Domain 'x' created" in subject.virsh("create", str(domain))
        namespace = subject.tell("__import__('os').readlink('/proc/self/ns/pid')")
        assert namespace in namespaces()
        os.kill(subject.process.pid, signal.SIGKILL)
        wait_until("its processes to end", lambda: namespace not in namespaces(), 10)


CONFTEST = """
import os, socket

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        socket.create_connection(("127.0.0.1", int(os.environ["CONTROLLER"]))).close()
"""
INNER = """
import os, pytest

@pytest.mark.parametrize("number", range(2))
def test_own_network(number):
    assert os.readlink("/proc/self/ns/net") == os.readlink("/proc/1/ns/net") != os.environ["NETWORK"]
    assert os.path.exists("/run/libvirt/libvirt-sock")
"""


def test_workers_of_pytest_have_one_each_and_reach_their_controller(tmp_path: Path) -> None:
    """Some plugins connect to the controller's by TCP."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-p", "tests.lab.worker_machine", "-p", "no:cacheprovider", "-n", "1"]
    with socket.create_server(("127.0.0.1", 0)) as controller:
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "CONTROLLER": str(controller.getsockname()[1]),
            "NETWORK": os.readlink("/proc/self/ns/net"),
        }
        command += ["--rootdir", str(tmp_path), str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def namespaces() -> set[str]:
    """The namespaces of processes that this one sees."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/pid"))
        except OSError:  # it ended
            continue
    return found
