"""An OVF descriptor as VMware's simulator reads it and as we do: the same machine.

The simulator is a second reader of the items alone: it takes every number for memory as MiB whatever its unit says,
knows IDE and SCSI controllers only, and heeds neither firmware nor the order of booting. What is generated here says
memory in MiB, and the rest is for test_ovf.py to judge.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import htcondor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.drivers.vsphere.simulator import Server
from tests.lab import vcsim
from tests.lab.vcsim import Vcsim
from vmgahp.cli import main
from vmgahp.job.vm_spec import LEAST_MEMORY_MIB

pytestmark = pytest.mark.vsphere

HEAD = """\
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
  xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
  xmlns:vssd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData">
"""
SYSTEM = "<System><vssd:ElementName>x</vssd:ElementName><vssd:InstanceID>0</vssd:InstanceID></System>"
UNITS = ("MegaBytes", "byte * 2^20", "byte*2^20", "MB", "")
CARDS = {"E1000": "VirtualE1000", "E1000e": "VirtualE1000e", "VmxNet3": "VirtualVmxnet3", "PCNet32": "VirtualPCNet32"}
OURS = {"VirtualE1000": "e1000", "VirtualE1000e": "e1000e", "VirtualVmxnet3": "e1000", "VirtualPCNet32": "e1000"}
"""What the card of the simulator is in a job, which says that it is changed where the guest needs another driver."""


class Machine(NamedTuple):
    """What a descriptor is made of."""

    memory: tuple[int, ...]
    """MiB, in each configuration."""
    unit: str
    cpus: int
    drives: tuple[tuple[int, int], ...]
    """Controller, and resource type: 17 for disks, 15 for CDs."""
    cards: tuple[str, ...]

    def descriptor(self) -> str:
        """With a SCSI controller 0 and an IDE controller 1, and the drives of each in any order."""
        files = "".join(f'<File ovf:id="f{number}" ovf:href="{self.file(number)}"/>' for number in self.numbers)
        disks = "".join(
            f'<Disk ovf:diskId="d{number}" ovf:fileRef="f{number}" ovf:capacity="9"/>'
            for number in self.numbers
            if self.drives[number][1] == 17
        )
        offered = "".join(f'<Configuration ovf:id="c{number}"/>' for number in range(len(self.memory)))
        options = f"<DeploymentOptionSection><Info/>{offered}</DeploymentOptionSection>" if len(self.memory) > 1 else ""
        items = [self.item(3, "c", VirtualQuantity=self.cpus)]
        for number, mib in enumerate(self.memory):
            units = {"AllocationUnits": self.unit} if self.unit else {}
            item = self.item(4, f"m{number}", VirtualQuantity=mib, **units)
            items.append(item.replace("<Item>", f'<Item ovf:configuration="c{number}">') if options else item)
        items += [self.item(6, "s", ResourceSubType="lsilogic"), self.item(5, "i")]
        for number, (controller, kind) in enumerate(self.drives):
            resource = f"ovf:/disk/d{number}" if kind == 17 else f"ovf:/file/f{number}"
            place = sum(other == controller for other, _ in self.drives[:number])
            parent = "i" if controller else "s"
            items.append(self.item(kind, f"x{number}", Parent=parent, AddressOnParent=place, HostResource=resource))
        for number, card in enumerate(self.cards):
            items.append(self.item(10, f"n{number}", ResourceSubType=card, Connection="VM Network"))
        return (
            f"{HEAD}<References>{files}</References><DiskSection><Info/>{disks}</DiskSection>"
            f'{options}<VirtualSystem ovf:id="vm"><Info/><VirtualHardwareSection><Info/>'
            f"{SYSTEM}{''.join(items)}</VirtualHardwareSection></VirtualSystem></Envelope>"
        )

    @property
    def numbers(self) -> range:
        return range(len(self.drives))

    def file(self, number: int) -> str:
        return f"{number}.{'vmdk' if self.drives[number][1] == 17 else 'iso'}"

    @staticmethod
    def item(kind: int, instance: str, **values: object) -> str:
        said = {"ElementName": instance, "InstanceID": instance, "ResourceType": kind, **values}
        return (
            "<Item>"
            + "".join(f"<rasd:{name}>{value}</rasd:{name}>" for name, value in sorted(said.items()))
            + "</Item>"
        )


drives = st.one_of(st.tuples(st.just(0), st.just(17)), st.tuples(st.just(1), st.sampled_from((15, 17))))
machines = st.builds(
    Machine,
    st.lists(st.integers(32, 1 << 20), min_size=1, max_size=3).map(tuple),
    st.sampled_from(UNITS),
    st.integers(1, 64),
    st.lists(drives, min_size=1, max_size=6).map(tuple),
    st.lists(st.sampled_from(tuple(CARDS)), max_size=4).map(tuple),
).filter(lambda made: any(kind == 17 for _, kind in made.drives))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        vcsim.build()
    except vcsim.Missing as missing:
        pytest.skip(f"no vSphere simulator: {missing}")
    with Vcsim(tmp_path_factory.mktemp("vcsim")) as sim:
        yield Server(sim)


def imported(server: Server, descriptor: str, configuration: str) -> object:
    """What the server would make of a descriptor."""
    from pyVmomi import vim

    (datacenter,) = server.get(server.content.rootFolder, "childEntity")
    (host,) = server.get(server.get(datacenter, "hostFolder"), "childEntity")
    pool, (store,) = server.get(host, "resourcePool"), server.get(host, "datastore")
    wanted = vim.OvfManager.CreateImportSpecParams(
        entityName="vm", deploymentOption=configuration, locale="", diskProvisioning="thin"
    )
    made = server.content.ovfManager.CreateImportSpec(descriptor, pool, store, wanted)
    assert not made.error
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machine=machines, data=st.data())
def test_the_simulator_reads_the_same_machine(
    server: Server, tmp_path: Path, machine: Machine, data: st.DataObject
) -> None:
    place = tmp_path / "package"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for number in machine.numbers:
        (place / machine.file(number)).write_bytes(b"KDMV")  # the magic number of a VMDK
    (place / "vm.ovf").write_text(machine.descriptor())
    several = len(machine.memory) > 1
    chosen = f"c{data.draw(st.integers(0, len(machine.memory) - 1))}" if several else ""
    words = ["--configuration", chosen] if several else []
    # The disks need not be images of any content: they stay where they are.
    words += ["--shared", "--force", "-o", str(place / "vm.sub")]
    assert main(["vmgahp", "submit", "ovf", str(place / "vm.ovf"), *words]) == 0

    read = htcondor2.Submit((place / "vm.sub").read_text())
    theirs = imported(server, machine.descriptor(), chosen)
    config = theirs.importSpec.configSpec
    least = max(config.memoryMB, LEAST_MEMORY_MIB)  # what a job has, which the report tells as changed
    assert (int(read["vm_memory"]), int(read["vm_vcpus"])) == (least, config.numCPUs)
    ours = [Path(entry.split(":")[0]).name for entry in read["vm_disk"].split(",")]
    assert sorted(ours) == sorted(file.path for file in theirs.fileItem)
    assert [name.endswith(".iso") for name in ours] == sorted(name.endswith(".iso") for name in ours)  # disks first
    devices = [type(change.device).__name__.rpartition(".")[2] for change in config.deviceChange]
    cards = [device for device in devices if device in OURS]
    nics = [entry.split(":")[1] for entry in read.get("MY.VMPARAM_vm_NICs", "").strip('"').split(", ") if entry]
    assert nics == [OURS[card] for card in cards] == [OURS[CARDS[card]] for card in machine.cards]
