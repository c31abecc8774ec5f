"""The domain XML: golden files, libvirt's own schema, and values that would like to be elements.

`pytest --update-golden` writes the golden files anew; read the difference before you commit it.
"""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from tests.domain.support import TPM_SOCKET, assert_golden, assert_of_libvirts_schema, disk, host, spec
from vmgahp import errors
from vmgahp.domain import build as domain_xml
from vmgahp.images.catalog import Image
from vmgahp.images.formats import BackingFile
from vmgahp.job.attributes import Share
from vmgahp.job.run import Run
from vmgahp.job.spec import Devices, Disk, JobSpec, Nic, Topology

GOLDEN = Path(__file__).parent / "golden"

ODD_DISKS = (
    disk("/scratch/root.qcow2", "vda", format="qcow2"),
    disk("/scratch/install.iso", "sdb", kind="cdrom", writable=False),
    disk("/scratch/data.img", "sdc"),
    disk("/scratch/boot.img", "fda", kind="floppy"),
)

SHARE = Share("share", "/scratch/share", "9p")

CASES: dict[str, tuple[JobSpec, domain_xml.Host]] = {
    "plain": (spec(), host()),
    "emulated": (spec(), host(domain_type="qemu", cpu_mode="")),
    "emulated-with-a-bounded-cache": (spec(vcpus=2), host(domain_type="qemu", tb_cache_mib=64)),
    "as-the-jobs-user": (spec(), host(dac_label="+54321:+64055", console_socket="/run/vmgahp/vmgahp-1-2-0/console")),
    "disks": (
        spec(
            vcpus=4,
            disks=(
                disk(
                    "/scratch/root.qcow2",
                    "vda",
                    format="qcow2",
                    backing=(BackingFile("/shared/base.qcow2", "qcow2"), BackingFile("/shared/old.img", "raw")),
                ),
                disk("/shared/data.img", "sdb", writable=False, transferred=False),
                disk("/scratch/old.vmdk", "hdc", format="vmdk"),
                disk("/scratch/xen.vhd", "xvdd", format="vpc"),
                disk("/scratch/install.iso", "sde", kind="cdrom"),
                disk("/scratch/seed.iso", "vdf", kind="cdrom", writable=False),
                disk("/scratch/boot.img", "fda", kind="floppy"),
            ),
        ),
        host(),
    ),
    "nat": (spec(nics=(Nic("nat", "52:54:00:12:34:56"),)), host(nat_network="jobs")),
    "bridge": (spec(nics=(Nic("bridge"),)), host(bridge="br0")),
    "user": (spec(nics=(Nic("user"),)), host()),
    "passt": (spec(nics=(Nic("user", "52:54:00:12:34:56"),)), host(passt=True)),
    "passt-with-a-way-in": (
        spec(nics=(Nic("user"), Nic("user"))),
        host(passt=True, ssh_address="127.0.0.1", ssh_ports=((22, 22001), (8080, 22002))),
    ),
    "nics": (
        spec(
            nics=(
                Nic("nat", "52:54:00:12:34:56"),
                Nic("bridge", model="e1000"),
                Nic("user", link_up=False),
                Nic("user", "52:54:00:12:34:57", "rtl8139", link_up=False),
            )
        ),
        host(bridge="br0", passt=True),
    ),
    "shared-disks": (
        spec(
            disks=(
                disk(),
                disk("/shared/scribble.img", "vdb", transferred=False, shared=True),
                disk("/shared/book.img", "sdc", transferred=False, shared=True, writable=False),
                disk("/shared/page.img", "sdd", transferred=False, shared=True),
            )
        ),
        host(),
    ),
    "made-disks": (
        spec(
            disks=(
                disk(
                    "/scratch/vda-debian-12.qcow2",
                    format="qcow2",
                    image=Image("debian-12", "/srv/images/debian-12.qcow2", "qcow2"),
                    backing=(BackingFile("/srv/images/debian-12.qcow2", "qcow2"),),
                ),
                disk(
                    "/srv/images/tools.iso",
                    "sda",
                    kind="cdrom",
                    writable=False,
                    transferred=False,
                    image=Image("tools", "/srv/images/tools.iso", "raw"),
                ),
                disk("/scratch/vdb-data.qcow2", "vdb", format="qcow2", size=1 << 30),
                disk("/scratch/vm_data_files.iso", "sdb", kind="cdrom", writable=False, files=("in.csv",)),
            )
        ),
        host(),
    ),
    "topology": (spec(vcpus=8, devices=Devices(topology=Topology(1, 4, 2))), host()),
    "clock-in-local-time": (spec(devices=Devices(clock="localtime")), host()),
    "topology-of-the-default-cpu": (spec(vcpus=2, devices=Devices(topology=Topology(2, 1, 1))), host(cpu_mode="")),
    "uefi": (spec(disks=ODD_DISKS, devices=Devices(firmware="uefi")), host()),
    "uefi-secure": (spec(devices=Devices(firmware="uefi-secure", tpm=True)), host(tpm_socket=TPM_SOCKET)),
    "tpm": (spec(devices=Devices(tpm=True)), host(tpm_socket=TPM_SOCKET)),
    "exit-port": (spec(devices=Devices(exit_port=True)), host(exit_socket="/run/vmgahp/vmgahp-1-2-3/exit")),
    "panic": (spec(), host(panic="isa")),
    "devices": (spec(), host(devices=("0000:3b:00.0", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"))),
    "agent": (spec(devices=Devices(exit_port=True)), host(agent=True, exit_socket="/run/vmgahp/vmgahp-1-2-3/exit")),
    "share": (spec(devices=Devices(shares=(SHARE,))), host(dac_label="+54321:+64055")),
    "shares": (
        spec(
            devices=Devices(
                shares=(
                    SHARE._replace(kind="virtiofs"),
                    Share("ref", "/srv/ref", "9p", writable=False, setting="VM_SHARE_DIR_REF"),
                    Share("data", "/srv/data", "virtiofs", writable=False, setting="VM_SHARE_DIR_DATA"),
                )
            )
        ),
        host(share_sockets=("/run/vmgahp/x/fs", "", "/run/vmgahp/y/fs")),
    ),
    "aarch64": (
        spec(memory_mib=256, disks=ODD_DISKS[:3], vnc=True, devices=Devices(arch="aarch64", tpm=True)),
        host(domain_type="qemu", cpu_mode="maximum", arch="aarch64", tpm_socket=TPM_SOCKET),
    ),
    "x86-elsewhere": (
        spec(devices=Devices(arch="x86_64")),
        host(domain_type="qemu", cpu_mode="maximum", arch="x86_64"),
    ),
    "program": (
        spec(devices=Devices(run=Run("true", (), None, False, 0, 600, "ready", (), "out", "err", "alice_17.0", 0))),
        host(run_sockets=(("org.vmgahp.run", "/run/vmgahp/x/run"), ("org.vmgahp.out", "/run/vmgahp/x/out"))),
    ),
    "vnc": (spec(vnc=True), host(vnc_password="secret12")),
    "quotes": (spec(disks=(disk("/scratch/'/><hostdev mode='subsystem'/>&quot;]]>.img"),)), host(bridge="br0")),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    assert_golden(domain_xml.build(*CASES[name]), GOLDEN / f"{name}.xml", request)


@pytest.mark.libvirt
@pytest.mark.parametrize("name", CASES)
def test_libvirts_schema_accepts_it(name: str) -> None:
    assert_of_libvirts_schema(domain_xml.build(*CASES[name]))


def test_the_golden_files_have_every_element_and_no_more() -> None:
    assert {path.stem for path in GOLDEN.glob("*.xml")} == set(CASES)
    source = Path(domain_xml.__file__).read_text()
    built = {path.read_text() for path in GOLDEN.rglob("*.xml")}
    elements = re.findall(r'(?:SubElement|add_text)\([^"\n)]*"([a-zA-Z-]+)"', source)
    assert len(elements) > 30
    for element in elements:
        assert any(f"<{element}" in text for text in built)


@given(st.text(min_size=1), st.text(min_size=1))
def test_no_text_of_the_job_becomes_markup(path: str, name: str) -> None:
    try:
        text = domain_xml.build(spec(name=name, disks=(disk(path),)), host())
    except errors.JobFault:
        return  # XML has no way to write it down
    domain = etree.fromstring(text)
    assert [element.tag for element in domain.find("devices")] == ["disk", "serial"]
    source = domain.find("devices/disk/source")
    # XML itself makes a space of a line end in an attribute only when it is not escaped: ours are.
    assert source.get("file") == path


UEFI = {"devices": Devices(firmware="uefi")}


@pytest.mark.parametrize(
    ("wanted", "job", "arch", "reason"),
    [
        (disk(device="hda"), UEFI, "", "q35"),
        (disk(device="hdd"), UEFI, "", "q35"),
        (disk(device="hda"), {}, "aarch64", "virt"),
        (disk(device="fda", kind="floppy"), {}, "aarch64", "virt"),
        (disk(device="hdb", shared=True), {}, "", "other writers"),
        (disk(device="hdb", writable=False), {}, "", "read-only as hdb, and an IDE disk"),
        (disk(device="sda", partition="2"), {}, "", "names the partition sda2, and only Xen has such disks"),
    ],
    ids=["hda of UEFI", "hdd of UEFI", "hda of aarch64", "fda of aarch64", "two writers", "read-only IDE", "partition"],
)
def test_a_disk_that_cannot_be_is_refused_by_name(wanted: Disk, job: dict[str, object], arch: str, reason: str) -> None:
    with pytest.raises(errors.JobFault) as raised:
        domain_xml.build(spec(disks=(wanted,), **job), host(arch=arch))
    assert raised.value.code == errors.INVALID_DISK_PARAM
    assert wanted.device in raised.value.problem
    assert reason in raised.value.problem
