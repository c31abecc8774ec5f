"""What a process holds on to when the package beneath it is replaced or removed."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY

SOURCE = REPOSITORY / "src/vmgahp"
pack_code = runpy.run_path(str(REPOSITORY / "packaging/hatch_build.py"))["pack_code"]

BEGIN = """
import shutil, subprocess, sys
site, kept = sys.argv[1:]
sys.path.insert(1, site)
from vmgahp.host import own_code, runtime_dir
runtime_dir._bases = lambda: [kept]
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with the package as a wheel has it."""
    shutil.copytree(SOURCE, tmp_path / "site/vmgahp", ignore=shutil.ignore_patterns("__pycache__"))
    pack_code(SOURCE, SOURCE / "__init__.py", tmp_path / "site/vmgahp/_code.zip")
    (tmp_path / "kept").mkdir(0o755)
    return tmp_path / "site"


def said(site: Path, program: str) -> list[str]:
    command = [sys.executable, "-I", "-B", "-c", BEGIN + program, str(site), str(site.parent / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_is_loaded_later_and_by_helpers_of_helpers_is_its_own(site: Path) -> None:
    helper = "from vmgahp.host import own_code; print(own_code.interpreter()[-1], own_code.__file__)"
    (site / "vmgahp/asked.py").write_text(helper)
    pack_code(site / "vmgahp", SOURCE / "__init__.py", site / "vmgahp/_code.zip")
    program = """
own_code.hold()
print(own_code.interpreter()[-1])
shutil.rmtree(site + "/vmgahp")
import vmgahp.job.pack
print(vmgahp.job.pack.__file__)
sys.stdout.flush()
subprocess.run([*own_code.interpreter(), "vmgahp.asked"], check=True)
"""
    before, pack, helpers = said(site, program)
    [kept] = (site.parent / "kept").iterdir()
    assert before == "-m"
    assert pack == f"{kept}/vmgahp/job/pack.py"
    assert helpers == f"{kept} {kept}/vmgahp/host/own_code.py"


def test_another_thread_waits_for_it_to_be_unpacked(site: Path) -> None:
    program = """
import threading, time
own_code.hold()
unpacked = own_code._unpacked
begun, may = threading.Event(), threading.Event()
def slowly(*words):
    begun.set()
    may.wait()
    return unpacked(*words)
own_code._unpacked = slowly
(shutil.os.replace(site + "/vmgahp/_code.zip", site + "/next"), open(site + "/vmgahp/_code.zip", "w").close())
open(site + "/vmgahp/job/pack.py", "w").write("raise AssertionError('of the next version')")
first = threading.Thread(target=own_code.look)
first.start()
begun.wait()
def load():
    import vmgahp.job.pack
    print(vmgahp.job.pack.__file__)
second = threading.Thread(target=load)
second.start()
second.join(0.2)
may.set()
first.join(), second.join()
"""
    [kept_pack] = said(site, program)
    assert kept_pack.startswith(f"{site.parent}/kept/")


def test_a_server_and_its_helpers_unpack_it_at_once(site: Path) -> None:
    program = """
import multiprocessing, os
own_code.hold()
shutil.rmtree(site + "/vmgahp")
fork = multiprocessing.get_context("fork")
both = fork.Barrier(2)
look = runtime_dir.is_private
def wait_for_the_other(place):
    found = look(place)
    runtime_dir.is_private = look
    both.wait(60)
    return found
runtime_dir.is_private = wait_for_the_other
def load(server):
    runtime_dir.belong_to(server)
    import vmgahp.job.pack
    print(vmgahp.job.pack.__file__, flush=True)
helpers = [fork.Process(target=load, args=(os.getpid(),)) for _ in range(2)]
[each.start() for each in helpers]
[each.join() for each in helpers]
"""
    loaded = said(site, program)
    [kept] = (site.parent / "kept").iterdir()
    assert loaded == [f"{kept}/vmgahp/job/pack.py"] * 2


def test_where_there_is_no_archive_nothing_is_held(site: Path) -> None:
    (site / "vmgahp/_code.zip").unlink()
    program = "before = [*sys.meta_path]; own_code.hold(); print(own_code.interpreter()[-1], sys.meta_path == before)"
    assert said(site, program) == ["-m True"]
