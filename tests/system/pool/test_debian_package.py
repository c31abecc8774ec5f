"""The Debian package on a machine with HTCondor's own packages: installed, used by the startd, upgraded, removed."""

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.lab.namespace import LAB, REFERENCE_SERVER, REPOSITORY, Namespace, require_namespace
from tests.lab.packages import build, git, kept_of, later_clone_of
from tests.lab.pool import Pool

pytestmark = pytest.mark.pool

SERVER = "/usr/libexec/condor/condor_vm-gahp"
EXAMPLES = "/usr/share/doc/vmgahp/examples"


def files(namespace: Namespace) -> set[str]:
    """All files that dpkg or Python may have put somewhere, but not what dpkg keeps books in."""
    found = namespace.run("find", "/etc", "/opt", "/usr", "/var/lib", "-xdev").stdout.split("\n")
    own = ("/var/lib/dpkg/", "/var/lib/condor/", "/var/lib/libvirt/", "/etc/libvirt/")
    return {path for path in found if not path.startswith(own)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_namespace()
    if not shutil.which("dh_python3"):
        pytest.skip("there is no debhelper here (scripts/test --pool installs it)")
    return kept_of(tmp_path_factory)


@pytest.fixture(scope="module")
def package(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    [built] = build("build-deb", tmp_path_factory.mktemp("package"), "--keep", str(kept))
    return built


@pytest.fixture(scope="module")
def later(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("--keep", str(kept), "--clone", str(later_clone_of(tmp_path_factory)))
    [built] = build("build-deb", tmp_path_factory.mktemp("package"), *words)
    return built


def test_lintian_finds_nothing(package: Path) -> None:
    if not shutil.which("lintian"):
        pytest.skip("there is no lintian here (scripts/test --pool installs it)")
    command = ["lintian", "--allow-root", "--pedantic", "--display-info", "--display-experimental", str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if not line.startswith("N:")] == []
    assert done.returncode == 0, done.stderr


def test_what_is_in_it(package: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "-R", str(package), str(tmp_path)], check=True)
    control = (tmp_path / "DEBIAN/control").read_text()
    assert "localhost" not in control
    assert not (tmp_path / "DEBIAN/conffiles").exists()
    shown = tmp_path / "usr/share/doc/vmgahp"
    changes = gzip.decompress((shown / "changelog.gz").read_bytes()).decode()
    assert changes == (REPOSITORY / "CHANGELOG.md").read_text()
    [version] = [line.partition(" ")[2] for line in control.splitlines() if line.startswith("Version: ")]
    assert version.startswith(re.findall(r"^## (\S+)", changes, re.MULTILINE)[0])
    assert gzip.decompress((shown / "changelog.Debian.gz").read_bytes()).decode().startswith(f"vmgahp ({version}) ")
    [readme] = shown.glob("README.md*")
    text = (gzip.decompress(readme.read_bytes()) if readme.suffix == ".gz" else readme.read_bytes()).decode()
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []
    for place in ("bash-completion/completions/vmgahp", "zsh/vendor-completions/_vmgahp", "vmgahp/execute.config"):
        assert (tmp_path / "usr/share" / place).stat().st_size
    assert (tmp_path / "usr/share/fish/vendor_completions.d/vmgahp.fish").stat().st_size


def test_the_same_commit_gives_the_same_bytes(later: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("again")
    clone = place / "elsewhere" / "of another name"
    clone.parent.mkdir()
    git(place, "clone", "-q", str(later_clone_of(tmp_path_factory)), str(clone))
    [again] = build("build-deb", place, "--clone", str(clone))
    assert again.name == later.name
    assert again.read_bytes() == later.read_bytes()


def test_apt_upgrades_goes_back_and_leaves_nothing(package: Path, later: Path, tmp_path: Path) -> None:
    with Namespace(tmp_path / "exchange") as machine:
        before = files(machine)
        old, new = (f"{LAB}/{Path(shutil.copy(one, machine.exchange)).name}" for one in (package, later))

        def apt(*words: str, fails: bool = False) -> str:
            done = machine.run("apt-get", "-y", *words, check=False, timeout=120)
            assert bool(done.returncode) == fails, done.stdout + done.stderr
            return done.stdout

        def is_installed(one: Path) -> bool:
            said = {
                machine.run(name, word).stdout.split()[1]
                for name, word in (("vmgahp", "version"), (SERVER, "-version"))
            }
            version = one.name.split("_")[1]
            assert machine.run("dpkg-query", "-W", "-f", "${Version}", "vmgahp").stdout == version
            return said == {version.replace("~", ".").removesuffix("-1")}

        def modules() -> set[str]:
            found = machine.run("find", "/usr/lib/python3/dist-packages/vmgahp", "-name", "later.*").stdout.split()
            return {Path(path).name for path in found}

        apt("install", old)
        assert is_installed(package)
        assert modules() == set()
        given = ("--type", "kvm", "--memory", "1024", "--network", "none", "--dry-run")
        assert f"+VM_GAHP_SERVER = {SERVER}\n" in machine.run("vmgahp", "setup", *given).stdout
        apt("install", new)
        assert is_installed(later)
        version = machine.run("python3", "-c", "import sys; print(sys.implementation.cache_tag)").stdout.strip()
        assert modules() == {"later.py", f"later.{version}.pyc"}
        assert "newest version" in apt("install", new)
        machine.run("rm", "/usr/bin/vmgahp")
        apt("install", "--reinstall", new)
        assert is_installed(later)

        apt("install", old, fails=True)
        assert is_installed(later)
        apt("install", "--allow-downgrades", old)
        assert is_installed(package)
        assert modules() == set()

        apt("purge", "vmgahp")
        left = files(machine) - before
        assert {path for path in left if "vmgahp" in path or "vm-gahp" in path} == set()


def test_beside_htcondors_own_packages(package: Path, tmp_path: Path) -> None:
    assert package.name.startswith("vmgahp_")
    assert package.name.endswith("_all.deb")
    before: set[str] = set()
    reference = ""

    def install(pool: Pool) -> None:
        nonlocal before, reference
        before = files(pool.namespace)
        reference = pool.run("sha256sum", REFERENCE_SERVER).stdout
        shutil.copy(package, pool.namespace.exchange)
        pool.run("dpkg", "-i", f"{LAB}/{package.name}", timeout=120)

    with Pool(tmp_path / "exchange", server=SERVER).running(prepare=install) as pool:
        machine = pool.offering()
        assert machine["VM_Type"] == "kvm"
        assert "VM_TYPES" in machine, "HTCondor's own server has no such attribute"
        said = pool.run("vmgahp", "doctor", "--verbose", check=False).stdout
        assert f"{SERVER} is this daemon" in " ".join(said.split())
        listed = pool.run("sh", "-c", f"cd {EXAMPLES} && ls").stdout.split()
        assert {"vmgahp.conf.example", "policy", "scripts"} <= set(listed)
        for page in ("vmgahp", "vmgahp-doctor", "vmgahp-setup", "condor_vm-gahp", "vmgahp-image-plugin"):
            pool.run("test", "-s", f"/usr/share/man/man1/{page}.1.gz")

        # HTCondor's own server is as it was, and nothing of the configuration came with the package.
        assert pool.run("sha256sum", REFERENCE_SERVER).stdout == reference
        assert pool.run("dpkg-divert", "--list", "*vmgahp*").stdout == ""
        assert pool.run("sh", "-c", "dpkg -L vmgahp | grep ^/etc/ || true").stdout == ""

        pool.run("condor_off", "-master", check=False)
        pool.run("dpkg", "--purge", "vmgahp", timeout=120)
        left = files(pool.namespace) - before
        assert {path for path in left if "vmgahp" in path or "vm-gahp" in path} == set()
