"""The RPMs: what they are made of, EL 9's run by this system's Python 3.11, EL 10's in a pool of Debian's.

Neither system is Enterprise Linux: EL's packages that these need have stand-ins, each named where it is put.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.lab.namespace import LAB, REFERENCE_SERVER, REPOSITORY, Namespace, why_not
from tests.lab.pool import Pool

pytestmark = pytest.mark.pool

SERVER = "/usr/libexec/condor/condor_vm-gahp"
PYTHON = Path("/usr/bin/python3.11")
SITE9 = "/usr/lib64/vmgahp/lib/python3.11/site-packages"


def build(directory: Path, *words: str) -> dict[str, Path]:
    """The packages by the first and the last but one part of their names, such as `vmgahp-selinux.el9`."""
    command = [str(REPOSITORY / "scripts/build-rpm"), str(directory), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paths = [Path(line) for line in done.stdout.splitlines()]
    binary = [path for path in paths if not path.name.endswith(".src.rpm")]
    assert len(binary) * 3 == len(paths) * 2, "two for each release, and their source"
    return {f"{path.name.rsplit('-', 2)[0]}.{path.name.split('.')[-3]}": path for path in binary}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not shutil.which("rpmbuild"):
        pytest.skip("there is no rpmbuild here (scripts/test --pool installs it)")
    return build(tmp_path_factory.mktemp("packages"))


def query(package: Path, *words: str) -> list[str]:
    done = subprocess.run(["rpm", "-qp", *words, str(package)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_rpmlint_finds_nothing(packages: dict[str, Path]) -> None:
    """Nothing for which packaging/rpm/rpmlint.toml has no reason; the source packages are two of one name."""
    for release in ("el9", "el10"):
        [source] = packages["vmgahp." + release].parent.glob(f"*.{release}.src.rpm")
        found = [packages[name] for name in packages if name.endswith("." + release)]
        settings = REPOSITORY / "packaging/rpm/rpmlint.toml"
        command = ["rpmlint", "-c", str(settings), *map(str, [source, *found])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, re.findall(r": [EW]: .*", done.stdout)) == (0, []), done.stdout
        assert " 3 packages" in done.stdout


def test_the_same_commit_gives_the_same_packages(packages: dict[str, Path], tmp_path: Path) -> None:
    again = build(tmp_path, "--el", "9")
    for name, path in again.items():
        assert path.read_bytes() == packages[name].read_bytes(), name


def test_what_is_compiled_needs_nothing_newer_than_el_9_has(packages: dict[str, Path]) -> None:
    """glibc 2.34 and libvirt 9, by the versions of symbols; and nothing that no package of EL's provides."""
    needed = query(packages["vmgahp.el9"], "--requires")
    versions = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", "\n".join(needed))]
    assert (2, 17) < max(versions) <= (2, 34)
    ours = [tuple(map(int, found.split("."))) for found in re.findall(r"LIBVIRT_([0-9.]+)\)", "\n".join(needed))]
    assert ours
    assert max(ours) <= (9, 0, 0)
    named = {line for line in needed if not re.match(r"lib\S+\.so|rpmlib|rtld|/bin/sh|\(vmgahp-selinux", line)}
    # Not every rpm writes down the Python of modules.
    assert named - {"python(abi) = 3.11"} == {"/usr/bin/python3.11", "python3.11-lxml"}
    needed = query(packages["vmgahp.el10"], "--requires")
    assert {"/usr/bin/python3.12", "python3-libvirt", "python3-lxml"} <= set(needed)
    assert [line for line in needed if ".so" in line] == []


def test_what_is_in_them(packages: dict[str, Path]) -> None:
    for release in ("el9", "el10"):
        files = query(packages["vmgahp." + release], "-l")
        assert {SERVER, "/usr/libexec/condor/vmgahp-image-plugin", "/usr/bin/vmgahp"} <= set(files)
        assert {"/usr/share/man/man1/vmgahp.1.gz", "/usr/share/doc/vmgahp/CHANGELOG.md"} <= set(files)
        assert {"/usr/share/licenses/vmgahp/LICENSE", "/usr/share/licenses/vmgahp/COPYING.pycdlib"} <= set(files)
        assert "/usr/share/doc/vmgahp/examples/vmgahp.conf.example" in files
        assert [path for path in files if path.startswith("/etc") or path.endswith(".pyc")] == []
        assert query(packages["vmgahp-selinux." + release], "-l")[-1].endswith("/targeted/vmgahp.pp")


def test_el_9s_is_installed_runs_and_goes(packages: dict[str, Path], tmp_path: Path) -> None:
    reason = why_not(pool=False)
    if reason or not PYTHON.exists():
        pytest.skip(reason or f"this system has no {PYTHON}")
    with Namespace(tmp_path / "exchange", root="/") as namespace:

        def install() -> None:
            rpm = ("rpm", "--force-debian", "--nodeps", "-U", "--replacepkgs")
            namespace.run(*rpm, f"{LAB}/{packages['vmgahp.el9'].name}", timeout=120)

        # python3.11-lxml, and the modules of HTCondor's package python3-condor, which are Python 3.9's and load in all.
        for name, there in (("lxml", "/usr/lib/python3/dist-packages"), ("classad2", ""), ("htcondor2", "")):
            spec = importlib.util.find_spec(name)
            assert spec
            assert spec.origin
            target = namespace.path(there or "/usr/lib64/python3.9/site-packages")
            shutil.copytree(Path(spec.origin).parent, target / name, dirs_exist_ok=True)
            libraries = Path(spec.origin).parents[1] / "htcondor.libs"
            if not there and libraries.exists():
                shutil.copytree(libraries, target / libraries.name, dirs_exist_ok=True)
        shutil.copy(packages["vmgahp.el9"], namespace.exchange)
        install()
        [version] = query(packages["vmgahp.el9"], "--qf", "%{VERSION}\n")
        for command in (["vmgahp", "version"], [SERVER, "-version"]):
            said = namespace.run(*command).stdout.split()
            assert said[1].replace(".dev", "~dev") == version
        from_where = "import classad2, libvirt, lxml, prompt_toolkit, pycdlib, rich, vmgahp; print(vmgahp.__file__)"
        python = "/usr/lib64/vmgahp/bin/python3"
        assert namespace.run(python, "-I", "-c", from_where).stdout == f"{SITE9}/vmgahp/__init__.py\n"
        assert namespace.run(str(PYTHON), "-I", "-c", "import vmgahp", check=False).returncode, "others do not see it"

        (namespace.exchange / "condor_config").write_text(
            "VM_MEMORY = 2 * 128\nVM_TYPE = kvm\nVM_ALLOW_EMULATION = True\nEXECUTE = /var/tmp\n"
        )
        condor = ("env", f"CONDOR_CONFIG={LAB}/condor_config", "VMGAHP_USER_UID=54321", "VMGAHP_USER_GID=54321")
        namespace.start_libvirt()
        said = namespace.run(*condor, SERVER, "-f", "-M", "0", "vmtype", "kvm").stdout
        assert 'VM_Type = "kvm"' in said
        assert "VM_Memory = 256" in said, "HTCondor's engine has worked it out"

        compiled = "find /usr/lib64/vmgahp -name '*.pyc' | wc -l"
        assert int(namespace.run("sh", "-c", compiled).stdout) > 100
        stale = f"{SITE9}/gone/__pycache__"
        namespace.run("mkdir", "-p", stale)
        install()
        assert not namespace.path(stale).parent.exists(), "what an earlier version left is gone"
        assert namespace.run("rpm", "--force-debian", "-V", "--nodeps", "vmgahp").stdout == ""
        namespace.run("rpm", "--force-debian", "-e", "vmgahp", timeout=120)
        for path in (
            "/usr/lib64/vmgahp",
            SERVER,
            "/usr/bin/vmgahp",
            "/usr/share/doc/vmgahp",
            "/usr/share/licenses/vmgahp",
        ):
            assert not os.path.lexists(namespace.path(path)), path


def test_el_10s_serves_a_pool(packages: dict[str, Path], tmp_path: Path) -> None:
    """Debian's Python is the stand-in for 3.12: the package has nothing compiled. Its modules are the system's own."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    reference = ""

    def install(pool: Pool) -> None:
        nonlocal reference
        reference = pool.run("sha256sum", REFERENCE_SERVER).stdout
        unpacked = pool.namespace.exchange / "rpm"
        unpacked.mkdir()
        with subprocess.Popen(["rpm2cpio", packages["vmgahp.el10"]], stdout=subprocess.PIPE) as archive:
            subprocess.run(["cpio", "-id", "--quiet"], cwd=unpacked, stdin=archive.stdout, check=True)
        # cpio keeps modes of files, and makes directories on the way for nobody but root.
        pool.run("sh", "-c", f"cd {LAB}/rpm && find . -type d -exec chmod 755 {{}} + && cp -a . / && rm -rf {LAB}/rpm")
        minor = pool.run("python3", "-c", "import sys; print(sys.version_info.minor)").stdout.strip()
        pool.run("ln", "-s", "python3", "/usr/bin/python3.12")
        pool.run("ln", "-s", "python3.12", f"/usr/lib/vmgahp/lib/python3.{minor}")

    pool = Pool(tmp_path / "exchange", server=SERVER)
    try:
        pool.start(prepare=install)
        pool.wait_until("the startd to offer VMs", lambda: pool.machine().get("HasVM"), 90)
        assert pool.machine()["VM_Type"] == "kvm"
        assert "VM_TYPES" in pool.machine(), "HTCondor's own server has no such attribute"
        said = pool.run("vmgahp", "doctor", "--json", check=False).stdout
        assert f"{SERVER} is this daemon" in said
        assert pool.run("sha256sum", REFERENCE_SERVER).stdout == reference
    finally:
        pool.stop()
