"""The RPMs: what they are made of, EL 9's run by this system's Python 3.11, EL 10's in a pool of Debian's.

Neither system is Enterprise Linux: EL's packages that these need have stand-ins, each named where it is put.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.lab.namespace import LAB, REFERENCE_SERVER, REPOSITORY, Namespace, require_namespace
from tests.lab.packages import build, kept_of, later_clone_of
from tests.lab.pool import Pool

pytestmark = pytest.mark.pool

SERVER = "/usr/libexec/condor/condor_vm-gahp"
PYTHON = Path("/usr/bin/python3.11")
CONFIGURED = "/etc/condor/config.d/60-vmgahp.config"
SITE9 = "/usr/lib64/vmgahp/lib/python3.11/site-packages"


def by_name(paths: list[Path]) -> dict[str, Path]:
    """The packages by the first and the last but one part of their names, such as `vmgahp-selinux.el9`."""
    binary = [path for path in paths if not path.name.endswith(".src.rpm")]
    assert len(binary) * 3 == len(paths) * 2, "two for each release, and their source"
    return {f"{path.name.rsplit('-', 2)[0]}.{path.name.split('.')[-3]}": path for path in binary}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("rpmbuild"):
        pytest.skip("there is no rpmbuild here (scripts/test --pool installs it)")
    return kept_of(tmp_path_factory)


@pytest.fixture(scope="module")
def packages(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return by_name(build("build-rpm", tmp_path_factory.mktemp("packages"), "--keep", str(kept)))


@pytest.fixture(scope="module")
def later(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """EL 9's of a commit more, in which the package has a module more."""
    clone = later_clone_of(tmp_path_factory)
    words = ("--el", "9", "--keep", str(kept), "--clone", str(clone))
    return by_name(build("build-rpm", tmp_path_factory.mktemp("packages"), *words))


def query(package: Path, *words: str) -> list[str]:
    done = subprocess.run(["rpm", "-qp", *words, str(package)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_rpmlint_finds_nothing(packages: dict[str, Path]) -> None:
    """Nothing for which packaging/rpm/rpmlint.toml has no reason; the source packages are two of one name."""
    for release in ("el9", "el10"):
        [source] = packages["vmgahp." + release].parent.glob(f"*.{release}.src.rpm")
        found = [packages[name] for name in packages if name.endswith("." + release)]
        command = ["rpmlint", "-c", str(REPOSITORY / "packaging/rpm/rpmlint.toml"), *map(str, [source, *found])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, re.findall(r": [EW]: .*", done.stdout)) == (0, []), done.stdout
        assert " 3 packages" in done.stdout


def test_a_build_leaves_no_trace_but_its_commit(packages: dict[str, Path], later: dict[str, Path]) -> None:
    """So that the same commit gives the same package: what is compiled is the same, elsewhere and later."""

    def digests(package: Path) -> dict[str, str]:
        listed = (line.split() for line in query(package, "--dump"))
        return {path: digest for path, _, _, digest, *_ in listed if f"{SITE9}/" in path and ".dist-info" not in path}

    one, other = digests(packages["vmgahp.el9"]), digests(later["vmgahp.el9"])
    assert len([path for path in one if path.endswith(".so")]) >= 3
    differ = {path.removeprefix(f"{SITE9}/") for path in one | other if one.get(path) != other.get(path)}
    assert {"vmgahp/__init__.py", "vmgahp/later.py"} <= differ
    assert {path for path in differ if not path.startswith("vmgahp/")} == set()
    for package in (*packages.values(), *later.values()):
        [when, host, *_] = query(package, "--qf", "%{BUILDTIME}\n%{BUILDHOST}\n")
        assert host == "localhost"
        assert set(query(package, "--qf", "[%{FILEMTIMES}\n]")) == {when}
        assert "vmgahp-rpm." not in "".join(query(package, "--xml")), "the directory that it was made in"


def test_what_is_compiled_needs_nothing_newer_than_el_9_has(packages: dict[str, Path]) -> None:
    """glibc 2.34 and libvirt 9, by the versions of symbols; and nothing that no package of EL's provides."""
    needed = query(packages["vmgahp.el9"], "--requires")
    versions = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", "\n".join(needed))]
    assert (2, 17) < max(versions) <= (2, 34)
    ours = [tuple(map(int, found.split("."))) for found in re.findall(r"LIBVIRT_([0-9.]+)\)", "\n".join(needed))]
    assert max(ours) <= (9, 0, 0)
    named = {line for line in needed if not re.match(r"lib\S+\.so|rpmlib|rtld|/bin/sh|\(vmgahp-selinux", line)}
    # Not every rpm writes down the Python of modules.
    assert named - {"python(abi) = 3.11"} == {"/usr/bin/python3.11", "python3.11-lxml", "python3.11-pyyaml"}
    needed = query(packages["vmgahp.el10"], "--requires")
    assert {"/usr/bin/python3.12", "python3-libvirt", "python3-lxml", "python3-pyyaml"} <= set(needed)
    assert [line for line in needed if ".so" in line] == []


def test_source_packages_alone(kept: Path, packages: dict[str, Path], tmp_path: Path) -> None:
    made = build("build-rpm", tmp_path, "--keep", str(kept), "--source")
    assert {path.name for path in made} == {path.name for path in packages["vmgahp.el9"].parent.glob("*.src.rpm")}


def test_what_is_in_them(packages: dict[str, Path]) -> None:
    for release in ("el9", "el10"):
        files = query(packages["vmgahp." + release], "-l")
        assert {SERVER, "/usr/libexec/condor/vmgahp-image-plugin", "/usr/bin/vmgahp"} <= set(files)
        assert {"/usr/share/man/man1/vmgahp.1.gz", "/usr/share/doc/vmgahp/CHANGELOG.md"} <= set(files)
        assert "/usr/share/vmgahp/execute.config" in files
        assert {"/usr/share/licenses/vmgahp/LICENSE", "/usr/share/licenses/vmgahp/COPYING.pycdlib"} <= set(files)
        assert "/usr/share/doc/vmgahp/examples/vmgahp.conf.example" in files
        assert [path for path in files if path.startswith("/etc") or path.endswith(".pyc")] == []
        assert query(packages["vmgahp-selinux." + release], "-l")[-1].endswith("/targeted/vmgahp.pp")


def test_el_9s_is_installed_runs_is_upgraded_and_goes(packages, later, tmp_path):
    require_namespace(pool=False)
    if not PYTHON.exists():
        pytest.skip(f"this system has no {PYTHON}")
    with Namespace(tmp_path / "exchange", root="/") as namespace:

        def rpm(*words: str, fails: str = "") -> None:
            done = namespace.run("rpm", "--force-debian", "--nodeps", *words, check=False, timeout=120)
            assert bool(done.returncode) == bool(fails), done.stdout + done.stderr
            assert fails in done.stderr

        def is_installed(package: Path) -> bool:
            """And nothing of it is changed or missing, and nothing is left of another."""
            [version] = query(package, "--qf", "%{VERSION}\n")
            for command in (["vmgahp", "version"], [SERVER, "-version"]):
                assert namespace.run(*command).stdout.split()[1].replace(".dev", "~dev") == version
            rpm("-V", "vmgahp")
            modules = namespace.run("find", f"{SITE9}/vmgahp", "-name", "later.*").stdout.split()
            return len(modules) == (2 if package == new else 0)

        old, new = packages["vmgahp.el9"], later["vmgahp.el9"]
        brought = {one: f"{LAB}/{Path(shutil.copy(one, namespace.exchange)).name}" for one in (old, new)}

        # python3.11-lxml and -pyyaml, and the modules of python3-condor, which are Python 3.9's and load in all.
        own = "/usr/lib/python3/dist-packages"
        for name, there in (("lxml", own), ("yaml", own), ("classad2", ""), ("htcondor2", "")):
            spec = importlib.util.find_spec(name)
            target = namespace.path(there or "/usr/lib64/python3.9/site-packages")
            shutil.copytree(Path(spec.origin).parent, target / name, dirs_exist_ok=True)
            libraries = Path(spec.origin).parents[1] / "htcondor.libs"
            if not there and libraries.exists():
                shutil.copytree(libraries, target / libraries.name, dirs_exist_ok=True)
        rpm("-i", brought[old])
        assert is_installed(old)
        imported = "import classad2, libvirt, lxml, prompt_toolkit, pycdlib, rich, yaml, vmgahp; print(vmgahp.__file__)"
        python = "/usr/lib64/vmgahp/bin/python3"
        assert namespace.run(python, "-I", "-c", imported).stdout == f"{SITE9}/vmgahp/__init__.py\n"
        assert namespace.run(str(PYTHON), "-I", "-c", "import vmgahp", check=False).returncode, "others do not see it"

        (namespace.exchange / "condor_config").write_text(
            "VM_MEMORY = 2 * 128\nVM_TYPE = kvm\nVM_ALLOW_EMULATION = True\nEXECUTE = /var/tmp\n"
        )
        condor = ("env", f"CONDOR_CONFIG={LAB}/condor_config", "VMGAHP_USER_UID=54321", "VMGAHP_USER_GID=54321")
        namespace.start_libvirt()
        said = namespace.run(*condor, SERVER, "-f", "-M", "0", "vmtype", "kvm").stdout
        assert 'VM_Type = "kvm"' in said
        assert "VM_Memory = 256" in said, "HTCondor's engine has worked it out"

        assert int(namespace.run("sh", "-c", "find /usr/lib64/vmgahp -name '*.pyc' | wc -l").stdout) > 100
        stale = f"{SITE9}/gone/__pycache__"
        namespace.run("mkdir", "-p", stale)
        # What an administrator has had written, and has edited: the package itself has no configuration.
        setup = ("vmgahp", "setup", "--type", "kvm", "--memory", "256", "--network", "none", "--yes", "-o", CONFIGURED)
        namespace.run("mkdir", "-p", os.path.dirname(CONFIGURED))
        namespace.run(*condor, *setup)
        with open(namespace.path(CONFIGURED), "a") as file:
            file.write("VM_STOP_TIMEOUT = 61\n")
        configured = namespace.path(CONFIGURED).read_text()

        rpm("-U", brought[new])
        assert is_installed(new)
        assert not namespace.path(stale).parent.exists(), "what an earlier version left is gone"
        rpm("-U", brought[new], fails="is already installed")
        namespace.run("rm", "/usr/bin/vmgahp")
        rpm("-U", "--replacepkgs", brought[new])
        assert is_installed(new)
        rpm("-U", brought[old], fails="is already installed")
        assert is_installed(new)
        rpm("-U", "--oldpackage", brought[old])
        assert is_installed(old)
        rpm("-e", "vmgahp")
        beside = namespace.path(CONFIGURED)
        assert [path.name for path in beside.parent.glob(f"{beside.name}*")] == [beside.name], "no .rpmnew, no .rpmsave"
        assert beside.read_text() == configured
        ours = (f"/usr/{place}/vmgahp" for place in ("lib64", "bin", "share/doc", "share/licenses"))
        assert [path for path in (SERVER, *ours) if os.path.lexists(namespace.path(path))] == []


def test_el_10s_serves_a_pool(packages: dict[str, Path], tmp_path: Path) -> None:
    """Debian's Python is the stand-in for 3.12: the package has nothing compiled. Its modules are the system's own."""
    require_namespace()
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

    with Pool(tmp_path / "exchange", server=SERVER).running(prepare=install) as pool:
        machine = pool.offering()
        assert machine["VM_Type"] == "kvm"
        assert "VM_TYPES" in machine, "HTCondor's own server has no such attribute"
        assert f"{SERVER} is this daemon" in pool.run("vmgahp", "doctor", "--json", check=False).stdout
        assert pool.run("sha256sum", REFERENCE_SERVER).stdout == reference
