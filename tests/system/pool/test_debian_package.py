"""The Debian package on a machine with HTCondor's own packages: installed, used by the startd, and removed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.lab.namespace import LAB, REFERENCE_SERVER, REPOSITORY, Namespace, why_not
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
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    if not shutil.which("dh_python3"):
        pytest.skip("there is no debhelper here (scripts/test --pool installs it)")
    directory = tmp_path_factory.mktemp("package")
    command = [str(REPOSITORY / "scripts/build-deb"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


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

    pool = Pool(tmp_path / "exchange", server=SERVER)
    try:
        pool.start(prepare=install)
        pool.wait_until("the startd to offer VMs", lambda: pool.machine().get("HasVM"), 90)
        assert pool.machine()["VM_Type"] == "kvm"
        assert "VM_TYPES" in pool.machine(), "HTCondor's own server has no such attribute"
        said = pool.run("vmgahp", "doctor", check=False).stdout
        assert f"{SERVER} is this daemon" in " ".join(said.split())
        listed = pool.run("sh", "-c", f"cd {EXAMPLES} && ls").stdout.split()
        assert {"60-vmgahp.config", "vmgahp.conf.example", "policy", "scripts"} <= set(listed)
        for page in ("vmgahp", "condor_vm-gahp", "vmgahp-image-plugin"):
            pool.run("test", "-s", f"/usr/share/man/man1/{page}.1.gz")

        # HTCondor's own server is as it was, and nothing of the configuration came with the package.
        assert pool.run("sha256sum", REFERENCE_SERVER).stdout == reference
        assert pool.run("dpkg-divert", "--list", "*vmgahp*").stdout == ""
        assert pool.run("sh", "-c", "dpkg -L vmgahp | grep ^/etc/ || true").stdout == ""

        pool.run("condor_off", "-master", check=False)
        pool.run("dpkg", "--purge", "vmgahp", timeout=120)
        left = files(pool.namespace) - before
        assert {path for path in left if "vmgahp" in path or "vm-gahp" in path} == set()
    finally:
        pool.stop()


def test_the_example_is_a_configuration_that_htcondor_reads(package: Path, tmp_path: Path) -> None:
    with Namespace(tmp_path / "exchange") as namespace:
        shutil.copy(package, namespace.exchange)
        namespace.run("dpkg", "-i", f"{LAB}/{package.name}", timeout=120)
        said = " ".join(namespace.run("vmgahp", "doctor", check=False).stdout.split())
        assert f"set VM_GAHP_SERVER = {SERVER};" in said
        namespace.run("cp", f"{EXAMPLES}/60-vmgahp.config", "/etc/condor/config.d/")
        assert namespace.run("condor_config_val", "VM_GAHP_SERVER").stdout == f"{SERVER}\n"
        said = namespace.run("vmgahp", "config", "--changed")
        assert said.stderr == "", "nothing is wrong with it"
        assert "VM_MEMORY = 1024\n # from: /etc/condor/config.d/60-vmgahp.config, line " in said.stdout
        (version,) = [line for line in namespace.run(SERVER, "-version").stdout.split("\n") if line]
        assert version.startswith(f"vmgahp {package.name.split('_')[1]} ")
