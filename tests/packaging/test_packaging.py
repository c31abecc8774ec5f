"""What is in the sdist and in the wheel, and that the wheel installs; the Debian package is in pool/."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests import REPOSITORY
from tests.lab.namespace import shared_by_workers
from tests.lab.programs import a_program

pytestmark = pytest.mark.timeout(300)  # the first one builds the distribution, and the others wait for it

PROGRAMS = ("condor_vm-gahp", "vmgahp", "vmgahp-image-plugin")
MADE = {f"share/man/man1/{page}.1" for page in PROGRAMS} | {
    "share/bash-completion/completions/vmgahp",
    "share/fish/vendor_completions.d/vmgahp.fish",
    "share/zsh/site-functions/_vmgahp",
}
"""What hatchling's hook makes at least; commands of vmgahp's may have manual pages of their own."""

INTERPRETER = "vmgahp-python"
"""What the programs read their Python from, in its first line."""

# fmt: off
STRANGERS = (
    "sitecustomize.py", "usercustomize.py", "encodings/__init__.py", "vmgahp/__init__.py", "libvirt.py", "os.py",
    "classad2/__init__.py", "htcondor2.py", "lxml/__init__.py", "lib/python3.11/os.py",
    f"lib/python3.{sys.version_info.minor}/encodings/__init__.py",
)
# fmt: on
"""Modules in a scratch directory, each of which writes down that it was imported."""

# fmt: off
ENVIRONMENTS = (
    "PYTHONPATH=.", "PYTHONPATH=/opt/x:", "PYTHONPATH=/opt::/srv", "PYTHONPATH={scratch}", "PYTHONHOME=.",
    "PYTHONHOME={scratch}", "PYTHONSTARTUP=os.py", "PYTHONUSERBASE=.", "PYTHONPLATLIBDIR=.", "PYTHONINSPECT=1",
    "PYTHONBREAKPOINT=libvirt.x", "PYTHONWARNINGS=error::libvirt.X", "PYTHONPYCACHEPREFIX=.", "PYTHONEXECUTABLE=./x",
    "PYTHONEXECUTABLE={scratch}/bin/x", "__PYVENV_LAUNCHER__=./x", "HOME=.", "ENV=./os.py", "BASH_ENV=./os.py",
    "PATH=.:/usr/bin:/bin", "PATH=:/usr/bin:/bin",
)
# fmt: on

EDITABLE = ("PYTHONPATH=.", "PATH=:/usr/bin:/bin")
"""Where it is installed editable: its programs are the same, and only the code is elsewhere."""

DATE = "1700000000"
"""Of all that is built here, in seconds."""

HOOKS = runpy.run_path(str(REPOSITORY / "packaging/hatch_build.py"))
VERSION = runpy.run_path(str(REPOSITORY / "packaging/version.py"))


def run(*command: str, **how: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from it: once for all workers."""
    with shared_by_workers(tmp_path_factory, "dist") as directory:
        if not list(directory.glob("vmgahp-*.whl")):
            command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(REPOSITORY))
            run(*command, env=os.environ | {"SOURCE_DATE_EPOCH": DATE})
    return directory


@pytest.fixture(scope="module")
def in_sdist(built: Path) -> set[str]:
    [path] = built.glob("vmgahp-*.tar.gz")
    with tarfile.open(path) as archive:
        assert {member.name.partition("/")[0] for member in archive} == {path.name.removesuffix(".tar.gz")}
        return {member.name.partition("/")[2] for member in archive}


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("vmgahp-*-py3-none-any.whl")
    return path


def sources(directory: str) -> set[str]:
    """The files of a directory of the clone that belong to it."""
    found = (path for path in (REPOSITORY / directory).rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(REPOSITORY)) for path in found if not {"__pycache__", "_build"} & set(path.parts)}


def test_the_sdist_has_what_is_needed_to_build_and_to_test_and_nothing_that_was_made(in_sdist: set[str]) -> None:
    for directory in ("src", "tests", "bench", "launchers", "config", "scripts", "docs", "packaging", ".github"):
        assert sources(directory) <= in_sdist, f"files of {directory} are missing"
    hidden = {".editorconfig", ".pre-commit-config.yaml"}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml"} | hidden <= in_sdist
    made = ("__pycache__", ".pyc", ".venv", "_cache/", "_build/html", "_build/doctrees", ".git/", ".hypothesis")
    assert [name for name in in_sdist if any(part in name for part in made)] == []


def test_the_wheel_has_the_package_and_its_programs_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    package = {f"src/{name}" for name in names if name.startswith("vmgahp/")}
    assert package == sources("src")
    others = [name for name in names if not name.startswith("vmgahp/")]
    assert {name.partition("/")[0].rpartition(".")[2] for name in others} == {"data", "dist-info"}
    assert {Path(name).name for name in others if ".data/scripts/" in name} == {*PROGRAMS, INTERPRETER}
    data = [name.partition(".data/data/")[2] for name in others if ".data/data/" in name]
    assert set(data) >= MADE
    assert {name for name in data if not name.startswith("share/man/man1/")} <= MADE
    assert any(name.endswith("licenses/LICENSE") for name in others)


def test_an_sdist_has_the_manual_pages_so_that_a_wheel_of_it_needs_no_tools(tmp_path: Path, in_sdist: set[str]) -> None:
    assert {name.removeprefix("made/") for name in in_sdist if name.startswith("made/")} >= MADE
    hook = HOOKS["Made"](str(tmp_path / "no sdist"), {}, None, None, "", "wheel")
    assert {Requirement(text).name for text in hook.dependencies()} == {"sphinx", "myst-parser", "shtab"}
    (tmp_path / "an sdist/made").mkdir(parents=True)
    assert HOOKS["Made"](str(tmp_path / "an sdist"), {}, None, None, "", "wheel").dependencies() == []


def test_their_tools_are_all_that_they_need(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip builds in an environment without what the package needs at run time, and takes out what an editable
    installation has put into sys.path. Made twice, they are the same.
    """
    (tmp_path / "refuse").mkdir()
    (tmp_path / "refuse/sitecustomize.py").write_text(
        "import sys\n"
        "for name in ('libvirtmod', 'libvirt', 'lxml', 'classad2', 'htcondor2', 'rich', 'prompt_toolkit', 'pycdlib',"
        " 'pyVmomi', 'furo', 'sphinx_copybutton', 'pytest'):\n"
        "    sys.modules[name] = None\n"
        f"sys.path[:] = [path for path in sys.path if path != {str(REPOSITORY / 'src')!r}]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "refuse"))
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", "import lxml"], check=True, stderr=subprocess.DEVNULL)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", DATE)
    HOOKS["make"](REPOSITORY, tmp_path / "share")
    files = (path for path in (tmp_path / "share").rglob("*") if path.is_file())
    made = {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}
    assert set(made) >= MADE
    assert b"\n.SH vmgahp image add\n" in made["share/man/man1/vmgahp-image.1"], "names keep their case"
    [sdist] = built.glob("vmgahp-*.tar.gz")
    with tarfile.open(sdist) as archive:
        for name, text in made.items():
            member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/made/{name}")
            assert member
            assert member.read() == text, name


def test_a_wheel_can_be_built_without_these_tools_where_somebody_wants_that(tmp_path: Path) -> None:
    """Such as in an environment where nothing may come in that was not looked at."""
    venv.create(tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv/lib").glob("python3*/site-packages"))
    for name in ("hatchling", "packaging", "pathspec", "pluggy", "trove_classifiers"):
        [where] = importlib.util.find_spec(name).submodule_search_locations or ()
        (site / name).symlink_to(where)
    build = f"from hatchling.build import build_wheel; build_wheel({str(tmp_path)!r})"
    run(str(tmp_path / "venv/bin/python"), "-B", "-c", build, cwd=REPOSITORY)
    [path] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        assert [name for name in archive.namelist() if ".data/data/" in name] == []


def test_what_shows_the_readme_elsewhere_links_to_nothing_of_the_clone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        told = archive.read(name).decode()
    assert "condor_vm-gahp" in told.partition("\n\n")[2]
    assert [link for link in re.findall(r"\]\(([^)]*)\)", told) if not link.startswith("https://")] == []
    assert "## Documents" not in told
    assert "Project-URL: " in told


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a wheel that was installed without what it depends on, which takes a compiler and a network."""
    with shared_by_workers(tmp_path_factory, "installed") as directory:
        programs = directory / "bin"
        if not (programs / INTERPRETER).exists():
            venv.create(directory, symlinks=True)
            pip = (sys.executable, "-m", "pip", "--python", str(programs / "python"))
            run(*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel))
    return programs


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "_CONDOR_VM_MEMORY": "64", "VMGAHP_SIMULATED": "1"}
    if os.geteuid() == 0:
        environ |= {"VMGAHP_USER_UID": "54321", "VMGAHP_USER_GID": "54321"}
    return environ


def test_the_wheel_runs_with_that_python(wheel: Path, installed: Path, environ: dict[str, str], tmp_path: Path) -> None:
    def out(program: str, *words: str) -> str:
        return run(str(installed / program), *words, env=environ, cwd=tmp_path)

    version = wheel.name.split("-")[1]
    commit = VERSION["version"](REPOSITORY).partition(".d2")[0]
    assert version.partition(".d2")[0] == commit, "but for the time of what is not committed"
    assert out("vmgahp", "version").startswith(f"vmgahp {version} ")
    assert out("condor_vm-gahp", "-version").startswith(f"vmgahp {version} ")
    plugin = out("vmgahp-image-plugin", "-classad")
    assert 'PluginType = "FileTransfer"' in plugin
    assert f'PluginVersion = "{version}"' in plugin
    assert 'VM_Type = "simulated"' in out("condor_vm-gahp", "-f", "-M", "0", "vmtype", "simulated")
    assert (installed / INTERPRETER).read_text().startswith(f"#!{installed}/python")


def test_an_option_behind_that_python_is_its_own(installed: Path, environ: dict[str, str], tmp_path: Path) -> None:
    """pipx 1.18 writes ``python -E``, a program that nobody has."""
    for name in PROGRAMS:
        (tmp_path / name).write_bytes((installed / name).read_bytes())
        (tmp_path / name).chmod(0o755)
    (tmp_path / INTERPRETER).write_text(f"#!{installed}/python -E\n")
    assert run(str(tmp_path / "vmgahp"), "version", env=environ).startswith("vmgahp ")
    assert run(str(tmp_path / "condor_vm-gahp"), "-version", env=environ).startswith("vmgahp ")


@pytest.mark.parametrize(
    ("kind", "variable"),
    [*(("wheel", variable) for variable in ENVIRONMENTS), *(("editable", variable) for variable in EDITABLE)],
)
def test_nothing_is_imported_from_the_working_directory(kind, variable, installed, environ, tmp_path):
    """Which is a job's scratch directory, while the environment is HTCondor's and may be careless."""
    programs = installed if kind == "wheel" else Path(sys.executable).parent
    scratch, imported = tmp_path / "scratch", tmp_path / "imported"
    for name in STRANGERS:
        module = scratch / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f"open({str(imported)!r}, 'a').write(__file__ + '\\n')\n")
    (scratch / "pyvenv.cfg").write_text(f"home = {scratch}/bin\n")
    for name in ("readlink", "python3", "python"):
        a_program(scratch / name, f"echo $0 >>{imported}")
    name, _, value = variable.partition("=")
    link = tmp_path / "condor_vm-gahp"
    link.symlink_to(programs / "condor_vm-gahp")
    commands = (
        [programs / "condor_vm-gahp", "-f", "-M", "0", "vmtype", "simulated"],
        [link, "-version"],
        [programs / "vmgahp", "version"],
        [programs / "vmgahp-image-plugin", "-classad"],
    )
    for command in commands:
        environ = {**environ, name: value.format(scratch=scratch)}
        run(*map(str, command), env=environ, cwd=scratch, stdin=subprocess.DEVNULL)
    assert not imported.exists(), imported.read_text()


def test_the_programs_find_their_python_in_one_way() -> None:
    """Of Debian's package, which knows its Python, only these lines are others (packaging/debian/rules)."""
    texts = [(REPOSITORY / "launchers" / name).read_text() for name in PROGRAMS]
    [head] = {text.partition("\n'''\n")[0] for text in texts}
    [edit] = re.findall(r"sed -i '(/.*)'", (REPOSITORY / "packaging/debian/rules").read_text())
    for name in PROGRAMS:
        of_debian = run("sed", edit, str(REPOSITORY / "launchers" / name))
        assert of_debian.startswith(f'{head.partition("here=")[0]}python=/usr/bin/python3\nexec "$python" -I ')


def test_the_versions_of_python_that_it_claims_are_those_that_it_takes() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    claimed = [name.rpartition(" ")[2] for name in project["classifiers"] if ":: Python :: 3." in name]
    assert claimed == ["3.11", "3.12", "3.13", "3.14"]
    assert project["requires-python"] == ">=3.11"
    control = (REPOSITORY / "packaging/debian/control").read_text()
    for name, package in (("libvirt-python", "python3-libvirt"), ("lxml", "python3-lxml")):
        [least] = [one.partition(">=")[2] for one in project["dependencies"] if one.startswith(f"{name}>=")]
        assert f"{package} (>= {least})" in control
