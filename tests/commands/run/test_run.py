"""`vmgahp run`: the submit file of a program, which HTCondor's own reader has back, and what is refused before."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import htcondor2
import pytest

from tests.commands.run.support import AWKWARD
from tests.commands.support import absent, vmgahp
from vmgahp.cli import main
from vmgahp.commands.run import EXAMPLE
from vmgahp.commands.run.job import shell_line
from vmgahp.commands.submit.conversion import attribute_line
from vmgahp.job.ad import JobAd, literal, quote
from vmgahp.job.run import read_environment

OPTION = "MY.VMPARAM_vm_"


class FakeCollector:
    """What the bindings have of one, and its machines; None for one that does not answer."""

    machines: list[dict[str, object]] | None = None

    def query(self, _type: object, _constraint: str, _names: list[str]) -> list[dict[str, object]]:
        if self.machines is None:
            raise RuntimeError("Failed to\nconnect")
        return self.machines


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a script and data; the collector does not answer, the schedd does."""
    monkeypatch.setattr(htcondor2, "Collector", FakeCollector)
    monkeypatch.setattr(htcondor2, "Schedd", Mock(**{"return_value.submit.return_value.cluster.return_value": 12}))
    monkeypatch.chdir(tmp_path)
    for name in ("VM_CATALOG", "_CONDOR_VM_CATALOG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "fit.py").write_text("print(1)\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x.csv").write_text("1,2\n")
    return tmp_path


def told(*given: str, program: tuple[str, ...] = ("python3", "fit.py", "17")) -> list[str]:
    """The command line, with the image and its memory."""
    image = () if "--image" in given else ("--image", "catalog:debian-12", "--memory", "1G")
    return ["vmgahp", "run", *image, *given, "--", *program]


@pytest.fixture
def dry(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., htcondor2.Submit]:
    """Runs the command dry: the submit file as HTCondor's own reader has it."""

    def run(*given: str, **program: tuple[str, ...]) -> htcondor2.Submit:
        before = sorted(os.listdir())
        done = vmgahp(capsys, *told("--dry-run", *given, **program)[1:])
        assert done.status == 0, done.err
        assert sorted(os.listdir()) == before
        return htcondor2.Submit(done.out)

    return run


@pytest.fixture
def refused(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command, of which nothing comes: what it says."""

    def run(*given: str, **program: tuple[str, ...]) -> str:
        before = sorted(os.listdir())
        done = vmgahp(capsys, *told(*given, **program)[1:])
        assert done.status in (1, 2), done.out
        assert sorted(os.listdir()) == before
        return done.err

    return run


# --- the words


def test_words_arrive_byte_for_byte() -> None:
    """Through the submit file, as HTCondor reads it, the ad, as the server reads it, and the shell."""
    line = shell_line(["printf", "%s\\0", *AWKWARD])
    read = htcondor2.Submit(attribute_line("VMPARAM_vm_Run", line) + "\nqueue\n")
    assert literal(read.expand("MY.VMPARAM_vm_Run")) == line
    done = subprocess.run(["/bin/sh", "-c", line], stdout=subprocess.PIPE, check=True, timeout=60)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in AWKWARD]


@pytest.mark.parametrize("word", AWKWARD)
def test_no_language_on_the_way_finds_its_own_in_a_word(word: str) -> None:
    line = shell_line([word])
    assert line.isprintable()
    assert "$(" not in line
    assert "$$" not in line


@pytest.mark.parametrize("value", AWKWARD)
def test_a_variable_arrives_byte_for_byte(dry: Callable[..., htcondor2.Submit], value: str) -> None:
    """By HTCondor's own environment, where that can have it, and else by the command line."""
    read = dry("--env", f"VALUE={value}", program=("sh", "-c", 'printf %s "$VALUE"'))
    line = literal(read.expand("MY.VMPARAM_vm_Run"))
    assert isinstance(line, str)
    variables = dict(os.environ)
    if "environment" in read:  # which gets into the ad without the quotes around it
        raw = read.expand("environment")[1:-1].replace('""', '"')
        assert "$$" not in raw
        variables |= read_environment(JobAd([("Environment", quote(raw))]))
    done = subprocess.run(["/bin/sh", "-c", line], env=variables, stdout=subprocess.PIPE, check=True, timeout=60)
    assert done.stdout == os.fsencode(value)


def test_a_variable_may_be_that_of_here(dry, monkeypatch) -> None:
    monkeypatch.setenv("SEED", "4 2")
    assert dry("--env", "SEED").expand("environment") == "\"SEED='4 2'\""


def test_with_macros_the_process_is_htcondors(dry) -> None:
    read = dry("--macros", "--queue", "3", "--env", "N=$(Process)", program=("fit", "a b$(Process)", "$(not one"))
    assert "b$(Process)'" in read["MY.VMPARAM_vm_Run"]
    assert "N='$(Process)'" in read["environment"]
    assert "$(DOLLAR)''(not one" in read["MY.VMPARAM_vm_Run"]


# --- the job


def test_the_whole_job(dry) -> None:
    read = dry("--cpus", "2", "--input", "data/", "--input", "fit.py", "--output", "results/")
    wanted = {
        "universe": "vm",
        "executable": "fit",
        "vm_type": "kvm",
        "vm_memory": "1024",
        "request_memory": "1024MB",
        "request_cpus": "2",
        "vm_disk": "catalog:debian-12:vda:w",
        "vm_networking": "false",
        # Without a slash HTCondor sends the directory, and not what is in it.
        "transfer_input_files": "data, fit.py",
        "transfer_output_files": "vm_outputs/",
        "when_to_transfer_output": "ON_EXIT",
        "MY.VMPARAM_vm_Run": '"python3 fit.py 17"',
        "MY.VMPARAM_vm_Run_Outputs": '"results"',
        "MY.Out": '"fit.out"',
        "MY.StreamOut": "false",
        "MY.TransferOut": "true",
        "MY.Err": '"fit.err"',
        "log": "fit.log",
    }
    assert {name: read.expand(name) for name in wanted} == wanted
    assert "debian-12" in read["requirements"]
    assert "ExitBySignal == False" in read["on_exit_remove"]
    assert read["on_exit_remove"].endswith(" || NumJobStarts >= 3"), "a daemon that is killed again and again"
    assert read["on_exit_hold"] == "ChirpVMHoldReason isnt undefined"
    assert {name for name in read if name.startswith("MY.VMPARAM")} <= set(wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("--time-limit", "2h"), {f"{OPTION}Run_Time_Limit": "7200"}),
        (("--boot-timeout", "10m"), {f"{OPTION}Run_Boot_Timeout": "600"}),
        (("--as-root",), {f"{OPTION}Run_As_Root": "true"}),
        (("--boot", "ready"), {f"{OPTION}Run_Boot": '"ready"'}),
        (("--disk", "20G"), {f"{OPTION}Disk_Size": '"20G"'}),
        (("--disk", "1.5 GB"), {f"{OPTION}Disk_Size": '"1536M"'}),
        (("--firmware", "uefi"), {f"{OPTION}Firmware": '"uefi"'}),
        (("--output", ""), {f"{OPTION}Run_Outputs": '""'}),
        (("--output", "./a/", "--output", "*.png"), {f"{OPTION}Run_Outputs": '"a, *.png"'}),
        # As HTCondor reads them.
        *((("--memory", text), {"vm_memory": mib}) for text, mib in (("2 GB", "2048"), ("1.5G", "1536"))),
        *((("--memory", text), {"vm_memory": mib}) for text, mib in (("1500000k", "1465"), ("64.1", "65"))),
        # It must not be true for a program that has failed: max_retries adds to it.
        (("--retries", "3"), {"max_retries": "3", "on_exit_remove": "False"}),
        (
            ("--checkpoint", "--network", "nat"),
            {"vm_checkpoint": "true", "when_to_transfer_output": "ON_EXIT_OR_EVICT"},
        ),
        (("--checkpoint", "--network", "nat"), {"vm_networking": "true", "vm_networking_type": "nat"}),
    ],
)
def test_an_option_is_the_jobs(dry, given: tuple[str, ...], wanted: dict[str, str]) -> None:
    read = dry(*given)
    assert {name: read.expand(name) for name in wanted} == wanted


def test_a_guest_has_a_gibibyte_where_nobody_says_more(home, capsys) -> None:
    assert main(["vmgahp", "run", "--image", "catalog:d", "--", "true"]) == 0
    assert "1024 MiB of memory; --memory" in capsys.readouterr().err
    assert "\nvm_memory = 1024\n" in (home / "true.sub").read_text()


def test_the_catalog_of_this_machine_may_ask_for_more(home, capsys, monkeypatch) -> None:
    entry = SimpleNamespace(kind="disk", min_memory=1500)
    monkeypatch.setattr("vmgahp.images.catalog.read", lambda _settings: SimpleNamespace(entries={"d": entry}, path="c"))
    assert main(["vmgahp", "run", "--image", "catalog:d", "--", "true"]) == 0
    assert "1500 MiB of memory" in capsys.readouterr().err


def test_a_disk_that_grows_has_room_beside_the_inputs(home, dry) -> None:
    with (home / "data/large").open("wb") as file:
        file.truncate(100 << 20)
    assert dry("--disk", "2G", "--input", "data/", "--input", "fit.py")["request_disk"] == f"{2048 + 200 + 64}MB"
    assert "request_disk" not in dry("--input", "data/")


def test_an_input_may_have_a_dollar_sign(home, dry) -> None:
    (home / "a$b.txt").write_text("")
    assert dry("--input", "a$b.txt").expand("transfer_input_files") == "a$b.txt"


def test_the_log_is_that_of_the_submit_file(home, capsys) -> None:
    assert main(told("--json", "--append", "log = my.log")) == 0
    assert json.loads(capsys.readouterr().out)["log"] == "my.log"


@pytest.mark.qemu
@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
def test_a_dry_run_prints_what_is_written(home, dry) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", "vhdx", "d.vhdx", "8M"], check=True, timeout=60)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "my d.qcow2", "8M"], check=True, timeout=60)
    assert dry("--image", "d.vhdx")["vm_disk"] == "d.qcow2:vda:w:qcow2"
    assert dry("--image", "my d.qcow2", "--convert")["vm_disk"] == "my_d.qcow2:vda:w:qcow2"


def test_what_is_elsewhere_has_its_full_path(home, dry, monkeypatch) -> None:
    (home / "sub").mkdir()
    assert dry("--input", "data", "--submit-file", "sub/fit.sub")["transfer_input_files"] == f"{home}/data"
    assert dry("--input", ".")["transfer_input_files"] == str(home), "which is sent under its name"
    monkeypatch.chdir(home / "sub")
    assert dry("--input", "../data", "--input", "../fit.py")["transfer_input_files"] == f"{home}/data, {home}/fit.py"


@pytest.mark.qemu
@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
def test_an_image_that_is_a_file(home, dry) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "debian.img", "1M"], check=True, timeout=60)
    read = dry("--image", "debian.img", "--memory", "1G", "--input", "fit.py")
    assert read["vm_disk"] == "debian.img:vda:w:qcow2"
    assert read["transfer_input_files"] == f"{home}/debian.img, fit.py"


def test_user_data_go_with_the_job(home, dry) -> None:
    (home / "more.yaml").write_text("#cloud-config\npackages: [r-base]\n")
    read = dry("--user-data", "more.yaml")
    assert read.expand("MY.VMPARAM_vm_User_Data") == '"more.yaml"'
    assert read["transfer_input_files"] == f"{home}/more.yaml"


@pytest.mark.parametrize(
    ("given", "program", "name"),
    [
        (("--input", "fit.py"), ("python3", "fit.py"), "fit"), ((), ("/usr/bin/Rscript", "x.R"), "Rscript"),
        (("--name", "n"), ("a",), "n"), ((), ("./a b!",), "a_b"),
    ],
)  # fmt: skip
def test_the_name_of_a_job(dry, given: tuple[str, ...], program: tuple[str, ...], name: str) -> None:
    assert dry(*given, program=program)["executable"] == name


def test_a_dry_run_shows_what_cloud_init_is_told(home, capsys) -> None:
    """Behind the submit file, as comments, so that the whole is a submit file."""
    (home / "more.yaml").write_text("#!/bin/dash\n: [r-base]\x1b\n")
    assert main(told("--dry-run", "--verbose", "--user-data", "more.yaml")) == 0
    text, _, data = capsys.readouterr().out.partition("\nqueue\n")
    assert "universe = vm" in text
    assert all(line.startswith("#") for line in data.splitlines() if line)
    own, ours = data.index("\n# : [r-base]?\n"), data.index("\n# #!/bin/sh\n")
    assert own < ours
    assert main(told("--dry-run", "--verbose", "--boot", "ready")) == 0
    assert capsys.readouterr().out.endswith("\nqueue\n"), "cloud-init is told nothing"
    assert main(told("--dry-run")) == 0
    assert capsys.readouterr().out.endswith("\nqueue\n"), "only what matters, unless more is asked for"


# --- what is written, and submitted


def test_a_file_is_written_and_the_next_command_said(home, capsys) -> None:
    assert main(told("--input", "fit.py")) == 0
    assert absent(capsys.readouterr().err, "Written: fit.sub", "45 s at least", "condor_submit fit.sub") == []
    assert main(told("--input", "fit.py")) == 1
    assert absent(capsys.readouterr().err, "fit.sub is there already", "--force") == []
    assert main(told("--input", "fit.py", "--force")) == 0


def test_each_of_many_jobs_has_a_directory(home) -> None:
    """Or one would overwrite what another brings home."""
    (home / "part-0").write_text("0")
    (home / "part-1").write_text("1")
    given = ("--queue", "2", "--macros", "--input", "part-$(Process)", "--input", "fit.py")
    assert main(told(*given)) == 0
    text = (home / "fit.sub").read_text()
    read = htcondor2.Submit(text)
    assert read["initialdir"] == "fit.$(Process)"
    assert read["log"] == f"{home}/fit.log"
    assert f"{home}/part-$(Process)" in read["transfer_input_files"]
    assert text.endswith("\nqueue 2\n")
    assert (home / "fit.0").is_dir()
    assert (home / "fit.1").is_dir()


def test_a_job_is_submitted_by_the_bindings(home, capsys) -> None:
    assert main(told("--submit", "--input", "fit.py")) == 0
    out, err = capsys.readouterr()
    assert out == "12.0\n"
    assert absent(err, "condor_tail -f 12.0", "condor_wait fit.log", "condor_history 12.0", "condor_q -hold 12.0") == []
    [(submitted,)] = (call.args for call in htcondor2.Schedd().submit.call_args_list)
    assert submitted["executable"] == "fit"
    assert main(told("--submit", "--queue", "2", "--force", "--input", "fit.py")) == 0
    assert capsys.readouterr().out == "12\n"


MACHINES = [
    {"VM_Type": "kvm", "VM_Images": "debian-12,tools", "TotalMemory": 8192, "VM_Memory": 512},
    {"VM_Type": "KVM", "TotalMemory": 4096, "VM_Memory": 2048},
    {"VM_Type": "xen", "VM_Images": "other", "TotalMemory": 65536, "VM_Memory": 65536},
]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--image", "catalog:other", "--memory", "1G"), "the image other; they have: debian-12, tools."),
        (("--image", "catalog:debian-12", "--memory", "16G"), "16384 MiB of memory; the largest has 8192 MiB."),
    ],
    ids=["image", "memory"],
)
def test_what_no_machine_has_is_told_before_it_is_submitted(home, capsys, monkeypatch, given, said) -> None:
    monkeypatch.setattr(FakeCollector, "machines", MACHINES)
    assert main(told("--submit", *given)) == 1
    assert absent(capsys.readouterr().err, said, "--force") == []
    assert not (home / "python3.sub").exists()
    assert main(told("--submit", "--force", *given)) == 0


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        (MACHINES, "No machine has 4096 MiB for VMs free now, but 2048 MiB"),
        (MACHINES[2:], "No machine of the pool offers VMs of type kvm now"),
        (None, "The collector does not say which machines there are: Failed to connect"),
    ],
    ids=["busy", "none", "no collector"],
)
def test_what_may_change_is_a_note(home, capsys, monkeypatch, machines, said) -> None:
    monkeypatch.setattr(FakeCollector, "machines", machines)
    assert main(told("--submit", "--image", "catalog:debian-12", "--memory", "4G")) == 0
    assert said in capsys.readouterr().err


def test_a_program_reads_what_came_of_it(home, capsys) -> None:
    def run(*given: str) -> dict[str, object]:
        main(told("--json", *given))
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    assert "universe = vm" in str(run("--dry-run")["text"])
    came = run("--submit")
    wanted = {"submit_file": "python3.sub", "log": "python3.log", "job": "12.0", "problem": ""}
    assert {name: came[name] for name in wanted} == wanted
    assert "is there already" in str(run()["problem"])


@pytest.mark.parametrize("words", [(), ("--image", "catalog:debian-12"), ("--", "date")])
def test_a_bare_command_shows_an_example(home, capsys, words) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["vmgahp", "run", *words])
    assert f"such as: {EXAMPLE}" in capsys.readouterr().err


def test_a_schedd_that_refuses_is_quoted(home, capsys, monkeypatch) -> None:
    monkeypatch.setattr(htcondor2, "Schedd", Mock(side_effect=RuntimeError("Unable to locate\nlocal daemon\x1b\n")))
    assert main(told("--submit")) == 1
    err = capsys.readouterr().err
    assert absent(err, "Unable to locate local daemon", "condor_submit python3.sub") == []
    assert "\x1b" not in err
    assert (home / "python3.sub").exists(), "what was written is as good as before"


def test_an_image_that_was_unpacked_stays_with_its_submit_file(home, capsys, monkeypatch) -> None:
    """Whatever becomes of the job that was submitted then."""
    monkeypatch.setitem(sys.modules, "htcondor2", None)
    (home / "disk.raw.gz").write_bytes(gzip.compress(bytes(1 << 20)))
    assert main(told("--submit", "--image", "disk.raw.gz")) == 1
    assert absent(capsys.readouterr().err, "bindings", "condor_submit python3.sub") == []
    assert (home / "disk.raw").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--time-limit", "2 hours"), ["--time-limit", "'2 hours'", "2h"]),
        (("--disk", "20"), ["--disk", "'20'", "20G"]),
        (("--queue", "0"), ["--queue", "'0'"]),
        (("--input", "none.csv"), ["--input 'none.csv'", "No such file"]),
        (("--input", "data", "--input", "sub/data"), ["--input 'sub/data'", "two files of the job are called data"]),
        (("--input", "/"), ["--input '/'", "name what is in it"]),
        (("--input", "pipe"), ["--input 'pipe'", "neither a file nor a directory"]),
        (("--input", "a,b"), ["--input 'a,b'", "rename it"]),
        (("--input", "vm_run.json"), ["--input 'vm_run.json'", "rename it"]),
        (("--input", "http://h/a b"), ["--input 'http://h/a b'", "%20"]),
        (("--output", "/tmp/x"), ["--output '/tmp/x'", "not in the directory"]),
        (("--output", "a/../../x"), ["--output 'a/../../x'", "not in the directory"]),
        (("--output", "a,b"), ["--output 'a,b'", "pattern"]),
        (("--output", "$(Process)"), ["--output '$(Process)'"]),
        (("--input", "part-$(Process)"), ["--input 'part-$(Process)'", "--macros"]),
        *((("--output", f"./python3.{end}"), [f"python3.{end}", "--name"]) for end in ("out", "err", "log")),
        (("--env", "1A=2"), ["--env '1A=2'", "NAME=VALUE"]),
        (("--env", "NOT_THERE_AT_ALL"), ["--env NOT_THERE_AT_ALL", "NOT_THERE_AT_ALL=VALUE"]),
        (("--user-data", "fit.py"), ["fit.py", "#cloud-config"]),
        (("--image", "none.qcow2"), ["--image 'none.qcow2'", "No such file", "catalog:NAME"]),
        (("--image", "fit.py"), ["--image 'fit.py'", "text", "after --"]),
        (("--image", "https://h/x"), ["https://h/x", "image.qcow2"]),
        (("--type", "vmrun"), ["VMPARAM_vm_"]),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(home, refused, given: tuple[str, ...], said: list[str]) -> None:
    (home / "sub/data").mkdir(parents=True)
    (home / "a,b").write_text("")
    (home / "vm_run.json").write_text("")
    os.mkfifo(home / "pipe")
    (home / "fit.py").write_text("")
    assert absent(refused(*given), *said) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="needs an ordinary user")
def test_an_input_that_cannot_be_read_is_refused(home, refused) -> None:
    (home / "data").chmod(0o300)
    assert "cannot be read by you" in refused("--input", "data")


@pytest.mark.parametrize(("name", "given"), [("access.log", ()), ("sim.out", ()), ("x.err", ("--name", "x"))])
def test_no_input_is_what_htcondor_writes(home, refused, name: str, given: tuple[str, ...]) -> None:
    (home / name).write_text("mine\n")
    said = refused("--input", name, *given, program=("wc", "-l", name))
    assert name in said
    assert "--name" in said


def test_a_dry_run_leaves_no_image_that_it_has_unpacked(home, dry) -> None:
    (home / "a.raw.gz").write_bytes(gzip.compress(bytes(1 << 20)))
    assert dry("--image", "a.raw.gz")["transfer_input_files"] == f"{home}/a.raw"


def test_what_would_hold_the_job_later_is_refused_now(home, refused) -> None:
    """A link to a directory, and what is no file at all, wherever it lies in a directory."""
    (home / "data/sub").mkdir()
    (home / "data/sub/more").symlink_to("..")
    assert absent(refused("--input", "data"), "data/sub/more", "link to a directory") == []
    (home / "data/sub/more").unlink()
    os.mkfifo(home / "data/sub/pipe")
    assert absent(refused("--input", "data"), "data/sub/pipe", "neither a file nor a directory") == []


def test_links_to_files_go_and_links_to_nothing_do_not(home, capsys) -> None:
    (home / "data/here").symlink_to("x.csv")
    (home / "data/nowhere").symlink_to("gone")
    assert main(told("--input", "data")) == 0
    said = capsys.readouterr().err
    assert absent(said, "data/nowhere", "leads nowhere") == []
    assert "data/here" not in said


# --- what would fail in the guest after minutes


def notes(capsys, *given: str, **program: tuple[str, ...]) -> tuple[str, str]:
    """The notes of a dry run, and the line of the submit file with the program."""
    assert main(told("--dry-run", *given, **program)) == 0
    out, err = capsys.readouterr()
    return err, next(line for line in out.splitlines() if "VMPARAM_vm_Run =" in line)


@pytest.mark.parametrize(
    ("given", "program"),
    [
        (("--input", "crlf.sh"), ("./crlf.sh",)),
        (("--input", "crlf.sh"), ("sh", "crlf.sh")),
        (("--input", "tools"), ("sh", "tools/crlf.sh")),
        (("--user-data", "crlf.sh"), ("date",)),
    ],
)
def test_a_script_with_line_ends_of_windows_is_warned_of(home, capsys, given, program) -> None:
    (home / "tools").mkdir()
    for name in ("crlf.sh", "tools/crlf.sh"):
        (home / name).write_bytes(b"#!/bin/sh\r\necho hi\r\n")
        (home / name).chmod(0o755)
    assert absent(notes(capsys, *given, program=program)[0], "crlf.sh", "CRLF", "sed -i") == []


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"\xef\xbb\xbf#!/bin/sh\n", "a byte order mark"),
        (b"\x7fELF\2\1\1" + bytes(11) + b"\xb7\0" + bytes(200), "a program for aarch64"),
        (b"MZ\x90\0" + bytes(200), "a program for Windows"),
        (b"\xcf\xfa\xed\xfe" + bytes(200), "a program for macOS"),
        (b"\x7fELF\2\1\1" + bytes(11) + b"\x3e\0" + bytes(200), ""),
    ],
)
def test_a_program_that_no_guest_can_start_is_warned_of(home, capsys, head, said) -> None:
    (home / "prog").write_bytes(head)
    (home / "prog").chmod(0o755)
    told, _ = notes(capsys, "--input", "prog", program=("./prog",))
    assert (said in told) if said else ("prog is" not in told)


def test_a_script_that_its_interpreter_reads_may_have_them(home, capsys) -> None:
    (home / "fit.py").write_bytes(b"#!/usr/bin/env python3\r\nprint(1)\r\n")
    assert "CRLF" not in notes(capsys, "--input", "fit.py")[0]


@pytest.mark.parametrize(("name", "word"), [("plain.sh", "./plain.sh"), ("a name.sh", "'./a name.sh'")])
def test_a_program_without_the_x_bit_gets_it_in_the_guest(home, capsys, name, word) -> None:
    (home / name).write_text("#!/bin/sh\necho hi\n")
    said, line = notes(capsys, "--input", name, "--env", "A=$$(b)", program=(f"./{name}", "1"))
    assert "is not executable here" in said
    assert f"chmod +x {word} && A=" in line
    (home / name).chmod(0o755)
    said, line = notes(capsys, "--input", name, program=(f"./{name}", "1"))
    assert ("chmod" in line, "executable" in said) == (False, False)


def test_a_program_is_made_executable_by_the_shell(tmp_path) -> None:
    (tmp_path / "x.sh").write_text("#!/bin/sh\necho $A $1\n")
    line = shell_line(["./x.sh", "b c"], [("A", "a")], executable=False)
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, check=True).stdout == b"a b c\n"


@pytest.mark.parametrize("given", [(), ("--input", "fit.py")])
def test_a_path_of_this_machine_is_warned_of(home, capsys, given) -> None:
    said = notes(capsys, *given, program=("python3", f"{home}/fit.py"))[0]
    assert f"{home}/fit.py is a path of this machine: say --input {home}/fit.py, and write ./fit.py" in said


@pytest.mark.parametrize(
    ("given", "program", "said"),
    [
        ((), ("python3", "fit.py"), "fit.py is a file here and no input"),
        (("--input", "data"), ("./fit.py", "data/x.csv"), "./fit.py is a file here and no input"),
        ((), ("python3", "--config=data/x.csv"), "data/x.csv is a file here"),
        (("--input", "fit.py"), ("fit.py",), "write ./fit.py"),
        (("--input", "fit.py", "--input", "data"), ("python3", "./fit.py", "data/x.csv", "/bin/sh", "."), ""),
        ((), ("fit.py",), "say --input fit.py, and write ./fit.py for it"),
        ((), ("other.py",), ""),
    ],
)
def test_a_word_that_names_a_file_of_here_is_warned_of(home, capsys, given, program, said) -> None:
    found = notes(capsys, *given, program=program)[0]
    assert said in found
    assert said or "fit.py" not in found
