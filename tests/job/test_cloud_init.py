"""What cloud-init is told: read from the job's files, checked, and made into a drive that is always the same."""

import email
import gzip
import os
from pathlib import Path

import pytest

from tests.images.support import read
from tests.job import support
from tests.jobs import ad, own, owner
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.errors import JobFault
from vmgahp.job import cloud_init, vm_spec
from vmgahp.job.attributes import NAMES
from vmgahp.job.run import guest_file
from vmgahp.job.spec import Devices, Disk, JobSpec
from vmgahp.job.vmware import VmwareSpec

MACHINE = Settings({"VM_MEMORY": "1024"})


class Directory:
    """A scratch directory with a job's files in it."""

    def __init__(self, scratch: Path) -> None:
        self.path = scratch
        self.user = owner(scratch)
        self.put("disk.img", b"")
        self.put("user-data", b"#cloud-config\n")

    def put(self, name: str, content: bytes) -> None:
        (self.path / name).write_bytes(content)
        own(self.path, self.path / name)

    def attributes(self, options: dict[str, str]) -> dict[str, str]:
        names = {name: f"VMPARAM_vm_{name}" if name in NAMES else name for name in options}
        return {"VM_WORKING_DIR": f'"{self.path}"', **{names[name]: text for name, text in options.items()}}

    def spec(self, **options: str) -> JobSpec:
        return support.found(MACHINE, self.user, **self.attributes(options))

    def refused(self, *parts: str, settings: Settings = MACHINE, **options: str) -> None:
        attributes = self.attributes(options)
        support.refusal(errors.MISMATCHED, *parts, settings=settings, files=self.user, **attributes)

    def write(self, **options: str) -> dict[str, bytes]:
        """What is on the drive."""
        cloud_init.write(self.spec(**options).devices.user_data, str(self.path), self.user)
        return read(self.path / cloud_init.SEED_FILE)


@pytest.fixture
def directory(scratch: Path) -> Directory:
    return Directory(scratch)


def test_a_drive_has_what_the_job_says_alone(directory: Directory) -> None:
    spec = directory.spec()
    assert (spec.devices, len(spec.disks)) == (Devices(), 1)
    assert directory.spec(Run='"true"', Run_Boot='"ready"').devices.user_data is None
    made = directory.write(Run='"true"')
    assert made["user-data"] == AGENT
    assert made["meta-data"].startswith(b"instance-id: ")


def test_the_files_of_the_job_are_on_the_drive_and_meta_data_always(directory: Directory) -> None:
    directory.put("ud", b"#cloud-config\n")
    directory.put("md", b"instance-id: seven\nlocal-hostname: box\n")
    directory.put("net", b"version: 2\n")
    assert directory.write(User_Data='"ud"', Meta_Data='"md"', Network_Config='"net"') == {
        "user-data": b"#cloud-config\n",
        "meta-data": b"instance-id: seven\nlocal-hostname: box\n",
        "network-config": b"version: 2\n",
    }
    directory.put("user-data", b"#!/bin/sh\n")
    made = directory.write(User_Data='"user-data"')["meta-data"].decode()
    assert made == 'instance-id: "alice_example.org_17.0"\nlocal-hostname: "alice-example-org-17-0"\n'
    made = directory.write(User_Data='"user-data"', GlobalJobId='"ap.example#17.0#170000"')["meta-data"].decode()
    assert made.startswith('instance-id: "ap.example#17.0#170000"\n')
    assert "user-data" in directory.write(User_Data='"/home/alice/vm/user-data"')


@pytest.mark.parametrize(
    "content",
    [
        *(b"#cloud-config\n", b"#Cloud-Config\r\n", b"\n  #cloud-config\n", b"## template: jinja\n#cloud-config\n"),
        *(b"#!/bin/sh\n", b"#include\nhttps://example.org/x\n", b"#include-once\n", b"#cloud-config-archive\n"),
        *(b"#cloud-boothook\n", b"#part-handler\n", b"\x1f\x8b\x08\x00"),
        *(b'Content-Type: multipart/mixed; boundary="x"\n', b"MIME-Version: 1.0\n"),
        *(b"#ps1_sysnative\n", b"rem cmd\n", b"<powershell>\n"),
        # What it may know.
        b"#cloud-config\na: !vault x\nruncmd: [date, [echo, 'a: b'],]\nbootcmd: date\n",
        b"#cloud-config\nb: 1\n" * 20_000,
        b"## template: jinja\n#cloud-config\n{% x %}",
    ],
)
def test_what_cloud_init_knows_is_taken(directory: Directory, content: bytes) -> None:
    directory.put("user-data", content)
    assert directory.write(User_Data='"user-data"')["user-data"] == content


NO_YAML = (b"instance-id: [x\n", b"a: *b\n", b"\xff\xfe\xff", b"[" * 500_000, b"!!python/x y")


@pytest.mark.parametrize(
    ("option", "content", "why"),
    [
        ("User_Data", b"", "empty"),
        ("User_Data", b"users:\n  - alice\n", "first line"),
        ("User_Data", b"# cloud-config\n", "first line"),
        ("User_Data", b"\xef\xbb\xbf#cloud-config\n", "byte order mark"),
        ("User_Data", b"#cloud-config\n" + b"#" * cloud_init.LARGEST, "more than"),
        ("Network_Config", b"version: 2\n\tethernets: {}\n", "line 2"),
        ("Network_Config", b"", "no names with values"),
        *(("Meta_Data", content, "YAML") for content in NO_YAML),
    ],
)
def test_what_cloud_init_would_drop_is_refused(directory: Directory, option: str, content: bytes, why: str) -> None:
    directory.put("file", content)
    directory.refused(f"VMPARAM_vm_{option}", why, **{"User_Data": '"user-data"', option: '"file"'})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"#cloud-config\nruncmd:\n\t- [date]\n", "line 3"),
        (b"#cloud-config\nruncmd:\n - sed 's/^a: b$/a: c/' f\n", "line 3"),
        (b"#cloud-config\nwrite_files:\n- content: |\n    a\nouch!\n\n  path: /x\n", "line"),
        (b"#cloud-config\nssh_pwauth:\ttrue\n", "line 2"),
        (b"#cloud-config\nruncmd:\n - date\n - echo a: b\n", "line 4"),
        (b"#cloud-config\nbootcmd: [[date], {echo a: b}]\n", "run none of them"),
        (b"#Cloud-Config\n- date\n", "no names with values"),
    ],
)
def test_a_cloud_config_that_cloud_init_would_drop_is_refused(directory: Directory, content: bytes, why: str) -> None:
    directory.put("user-data", content)
    directory.refused("VMPARAM_vm_User_Data", why, User_Data='"user-data"')
    directory.write(User_Data='"user-data"', User_Data_Format='"any"')


@pytest.mark.parametrize(
    ("meta", "good"),
    [
        (b"instance-id: x\n", True),
        (b'{"instance-id": "x", "local-hostname": "y"}', True),
        (b'{"instance-type": "m1.small", "instance-id": "x"}', True),
        (b'instance-type: {a: "b"}\n? instance-id\n: 7\n', True),
        (b'{"public-keys": {"instance-id": "of another"}}', False),
        (b"- instance-id: x\n", False),
        (b"local-hostname: y\n", False),
        (b"instance-id:\n", False),
        (b"# instance-id: x\n", False),
        (b"\n" * (1 << 20), False),  # it is not the daemon that is kept busy
        (b"", False),
        (b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", False),
    ],
)
def test_meta_data_name_the_instance(directory: Directory, meta: bytes, good: bool) -> None:
    directory.put("meta-data", meta)
    options = {"User_Data": '"user-data"', "Meta_Data": '"meta-data"'}
    if good:
        assert directory.write(**options)["meta-data"] == meta
    else:
        directory.refused("VMPARAM_vm_Meta_Data", "instance-id", **options)


@pytest.mark.parametrize("content", [b"#alpine-config\npackages: [a]\n", b"version: v1alpha1\nmachine:\n  type: a\n"])
def test_user_data_of_another_reader_pass_if_the_job_says_so(directory: Directory, content: bytes) -> None:
    directory.put("user-data", content)
    with pytest.raises(JobFault, match="cloud-init does not recognize its first line") as caught:
        directory.spec(User_Data='"user-data"')
    assert "User_Data_Format" in caught.value.hint
    assert directory.write(User_Data='"user-data"', User_Data_Format='"any"')["user-data"] == content
    directory.put("user-data", b"")
    directory.refused("the file is empty", User_Data='"user-data"', User_Data_Format='"any"')


def test_a_program_that_cloud_init_starts_needs_its_own_format(directory: Directory) -> None:
    options = {"User_Data": '"user-data"', "User_Data_Format": '"any"', "Run": '"date"'}
    directory.refused("VMPARAM_vm_User_Data_Format", "started by cloud-init", **options)
    directory.refused("there is no such format", User_Data='"user-data"', User_Data_Format='"talos"')


@pytest.mark.parametrize("option", ["Meta_Data", "Network_Config"])
def test_the_companions_are_of_no_use_alone(directory: Directory, option: str) -> None:
    directory.put("file", b"instance-id: x\n")
    directory.refused(f"VMPARAM_vm_{option}", "VMPARAM_vm_User_Data", **{option: '"file"'})


@pytest.mark.parametrize("name", ['"missing"', '"vm_cidata.iso"', '"dir/"', '".."', '"a\\nb"', '"link"'])
def test_a_link_and_a_name_of_no_file_are_refused(directory: Directory, name: str) -> None:
    directory.put("vm_cidata.iso", b"#cloud-config\n")
    (directory.path / "link").symlink_to("user-data")
    directory.refused("VMPARAM_vm_User_Data", User_Data=name)


@pytest.mark.parametrize("options", [{"User_Data": '"user-data"'}, {"Exit_Port": "true"}])
def test_a_machine_whose_vms_a_script_describes_refuses_it(directory: Directory, options: dict[str, str]) -> None:
    scripted = Settings({"VM_MEMORY": "1024", "LIBVIRT_XML_SCRIPT": "/bin/true"})
    directory.refused("LIBVIRT_XML_SCRIPT", settings=scripted, **options)


@pytest.mark.parametrize(
    ("disks", "device"),
    [
        *(("disk.img:vda:w", "vdb"), ("disk.img:vdb:w", "vda"), ("disk.img:xvda:w", "xvdb"), ("disk.img:sda:w", "sdb")),
        *(("disk.img:hda:w", "hdb"), ("disk.img:fda:w,disk.img:vda:w", "vdb"), ("disk.img:fda:w", "sda")),
        ("disk.img:hda:w,disk.img:hdb:w,disk.img:hdc:w,disk.img:hdd:w", "sda"),
    ],
)
def test_the_drive_is_of_the_kind_that_the_guest_boots_from(directory: Directory, disks: str, device: str) -> None:
    drive = directory.spec(User_Data='"user-data"', VMPARAM_vm_Disk=f'"{disks}"').disks[-1]
    assert drive == Disk(f"{directory.path}/vm_cidata.iso", device, "", False, "raw", True, "cdrom")


def test_the_drive_is_made_anew_byte_for_byte(directory: Directory) -> None:
    directory.write(User_Data='"user-data"')
    drive = directory.path / "vm_cidata.iso"
    first = drive.read_bytes()
    drive.unlink()
    os.utime(directory.path / "user-data", (10**9, 10**9))
    directory.write(User_Data='"user-data"')
    assert drive.read_bytes() == first
    seed = directory.spec(User_Data='"user-data"').devices.user_data
    (directory.path / "user-data").unlink()
    with pytest.raises(JobFault, match="User_Data"):
        cloud_init.write(seed, str(directory.path), directory.user)


@pytest.mark.parametrize("option", ["User_Data", "Meta_Data", "Network_Config", "Exit_Port"])
@pytest.mark.parametrize("form", ["VMPARAM_vm_{}", "VM_ATTR_{}", "VM_vmrun_ATTR_{}"])
def test_vm_types_that_do_nothing_with_it_refuse_it(form: str, option: str) -> None:
    value = "true" if option == "Exit_Port" else '"user-data"'
    job = ad(JobVMType='"vmrun"', **{form.format(option): value})
    with pytest.raises(JobFault) as raised:
        VmwareSpec.parse(job, MACHINE)
    assert form.format(option) in raised.value.problem
    with pytest.raises(JobFault):
        vm_spec.parse(job, MACHINE)


def test_a_port_that_is_not_wanted_is_wanted_nowhere() -> None:
    assert vm_spec.parse(ad(JobVMType='"script"', VMPARAM_vm_Exit_Port="false"), MACHINE).name


def parts(data: bytes) -> list[tuple[str, str | None, bytes]]:
    """What cloud-init finds in user data."""
    message = email.message_from_bytes(data)
    assert message.is_multipart()
    leaves = [part for part in message.walk() if not part.is_multipart()]
    return [(part.get_content_type(), part.get_filename(), part.get_payload(decode=True)) for part in leaves]


AGENT = guest_file("agent")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("data", [b"#cloud-config\nruncmd: [a]\n", b"#!/bin/sh\n\xff\n"])
def test_the_program_comes_behind_all_that_cloud_init_is_told(directory: Directory, data: bytes, packed: bool) -> None:
    directory.put("seed", gzip.compress(data) if packed else data)
    made = directory.write(Run='"true"', User_Data='"seed"')
    assert parts(made["user-data"]) == [("text/plain", None, data), ("text/x-shellscript", "zz-vmgahp-run", AGENT)]
    assert directory.write(Run='"true"', User_Data='"seed"') == made


MESSAGE = b"""Content-Type: multipart/mixed; boundary="X"
MIME-Version: 1.0

--X
Content-Type: text/cloud-config

#cloud-config
--X
Content-Type: text/x-shellscript; name="a"

#!/bin/sh
--X--
"""


@pytest.mark.parametrize("before", [b"", b"From nobody Sat Jan  1 00:00:00 2000\n"])
def test_a_message_is_a_part_as_it_stands(directory: Directory, before: bytes) -> None:
    directory.put("seed", before + MESSAGE)
    found = parts(directory.write(Run='"true"', User_Data='"seed"')["user-data"])
    kinds = [("text/cloud-config", None), ("text/x-shellscript", "a"), ("text/x-shellscript", "zz-vmgahp-run")]
    assert [(kind, name) for kind, name, _ in found] == kinds
    assert found[0][2] == b"#cloud-config"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"#ps1\n", "is for Windows"),
        (b"\x1f\x8bno", "cannot be unpacked"),
        (gzip.compress(b"#!/bin/sh\n" + bytes(cloud_init.LARGEST)), "more than 1048576 bytes"),
    ],
)
def test_user_data_beside_which_no_program_can_be_told(directory: Directory, data: bytes, problem: str) -> None:
    directory.put("seed", data)
    directory.refused(problem, Run='"true"', User_Data='"seed"')
