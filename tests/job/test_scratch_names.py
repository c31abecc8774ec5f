"""Names in a scratch directory that are not the job's."""

import importlib.util
import re
from pathlib import Path

import pytest

import vmgahp
from vmgahp.job.scratch_files import FILES, is_reserved


@pytest.mark.parametrize(
    "name",
    [
        *(
            ".job.ad",
            ".machine.ad",
            "vm_checkpoint.json.refused-1",
            ".vm_run.tar.7.tmp",
            ".update.ad",
            ".chirp.config",
            ".condor_creds/x",
            "_condor_stdout",
            "condor_exec.exe",
        ),
        *("_condor_stderr", "docker_stderror", "vm_exit.json", "vm_run.tar", "lost+found", "vm_outputs/a"),
    ],
)
def test_what_is_htcondors_or_ours(name: str) -> None:
    assert is_reserved(name)


@pytest.mark.parametrize("name", ["fit.py", "vm_list.txt", ".netrc", "data/vm_exit.json", "data/.job.ad", "condor.sub"])
def test_what_is_the_jobs(name: str) -> None:
    assert not is_reserved(name)


def test_every_file_that_the_code_names_is_known() -> None:
    text = "".join(path.read_text() for path in Path(vmgahp.__file__).parent.rglob("*.py"))
    named = set(re.findall(r'"((?:[a-z]+_checkpoint|vm_[a-z_]+)\.[a-z]{3,5})"', text))
    assert {"vm_exit.json", "vm_suspend.mem", "vm_screenshot.png"} <= named
    assert {name for name in named if not is_reserved(name)} == set()


def test_every_file_has_a_module_that_writes_it() -> None:
    writers = {file.writer.replace("/", ".") for file in FILES}
    assert [writer for writer in writers if not importlib.util.find_spec(f"vmgahp.{writer}")] == []
