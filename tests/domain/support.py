"""Makers of job specifications and hosts for the tests of domain XML."""

from pathlib import Path
from xml.etree import ElementTree as etree

import pytest
from lxml import etree as lxml

from vmgahp.domain.build import Host
from vmgahp.job.spec import Disk, JobSpec
from vmgahp.job.vm_spec import VmSpec

UUID = "c7a5fdbd-edaf-9455-926a-d65c16db1809"


def disk(path: str = "/scratch/disk.img", device: str = "vda", **changes: object) -> Disk:
    plain = Disk(path, device, partition="", writable=True, format="raw", transferred=True, kind="disk")
    return plain._replace(**changes)  # type: ignore[arg-type]


def spec(**changes: object) -> JobSpec:
    plain = VmSpec(
        name="alice_lab_7.3", vm_type="kvm", working_dir="/scratch", memory_mib=64, vcpus=1, nics=(), checkpoint=False,
        no_output_vm=False,
    )  # fmt: skip
    vm = plain._replace(**{name: changes.pop(name) for name in plain._fields if name in changes})  # type: ignore[arg-type]
    return JobSpec(vm, disks=(disk(),), vnc=False)._replace(**changes)  # type: ignore[arg-type]


def host(**changes: object) -> Host:
    plain = Host(uuid=UUID, domain_type="kvm", cpu_mode="host-passthrough")
    return plain._replace(**changes)  # type: ignore[arg-type]


def assert_golden(made: str, golden: Path, request: pytest.FixtureRequest) -> None:
    """Compare XML with its golden file, which ``--update-golden`` writes anew."""
    if request.config.getoption("--update-golden"):
        golden.write_text(made + "\n")
    assert made + "\n" == golden.read_text()


def assert_of_libvirts_schema(made: str) -> None:
    schema = Path("/usr/share/libvirt/schemas/domain.rng")
    if not schema.exists():
        pytest.skip(f"libvirt's schema is not installed: {schema}")
    lxml.RelaxNG(lxml.parse(schema)).assertValid(lxml.fromstring(made))


TPM_SOCKET = "/run/vmgahp/vmgahp-1-2-1/tpm"


SCRIPTED = """<domain type='qemu'><name>x</name><memory unit='MiB'>{memory}</memory><vcpu>{vcpus}</vcpu>
    <os><type>hvm</type></os><devices>{devices}</devices></domain>"""


def with_value(domain: etree.Element, place: str, value: str) -> etree.Element:
    """The domain with another text, or attribute (``path@name``), of the first element at a place."""
    path, _, name = place.partition("@")
    element = domain.find(path)
    if name:
        element.set(name, value)
    else:
        element.text = value
    return domain
