"""The administrator's catalog of images, and what jobs may ask to be made for them; who is blamed for what."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests import jobs
from tests.images.support import AS_ROOT, offering, one, place, resolved, settings, write
from tests.jobs import Files
from vmgahp import errors
from vmgahp.config import Settings
from vmgahp.drivers.libvirt.start import disks
from vmgahp.errors import JobFault, MachineFault
from vmgahp.findings import OFF, OK
from vmgahp.host.job_user import Identity
from vmgahp.images import catalog
from vmgahp.images.catalog import CatalogEntry, Image
from vmgahp.job.disks import Disk, refuse_made
from vmgahp.job.look import backing_of
from vmgahp.job.spec import JobSpec

__all__ = ["place"]

QCOW2 = b"QFI\xfb\0\0\0\3".ljust(512, b"\0")
LAYERED = QCOW2[:8] + b"\0\0\0\0\0\0\1\0" + QCOW2[16:]
PLAIN = Settings({"VM_MEMORY": "1024"})


def survey(made: Settings, below=lambda _image: None):  # type: ignore[no-untyped-def]
    names, found = catalog.survey(made, below)
    return names, {finding.check: finding for finding in found}


def entries(made: Settings) -> dict[str, CatalogEntry]:
    return catalog.read(made).entries


# --- the file


def test_every_key_is_read_and_a_dot_needs_no_quotes(place: Path) -> None:
    write(place / "a.qcow2", QCOW2)
    made = offering(
        place,
        '[a]\npath = "a.qcow2"\nformat = "QCOW2"\ndescription = "one"\nmin_memory = 512\n'
        f'[cd]\npath = "{place}/../cd.iso"\nformat = "iso"\n',
    )
    assert entries(made) == {
        "a": CatalogEntry("a", f"{place}/a.qcow2", "qcow2", "disk", "one", 512),
        "cd": CatalogEntry("cd", f"{place.parent}/cd.iso", "raw", "cdrom"),
    }
    assert catalog.read(Settings({})) is None
    assert survey(Settings({})) == ([], {})
    table = 'path = "a"\nformat = "raw"\n'
    heads = ("[ubuntu-24.04]", "[ubuntu-24.10]", '["x.y"]', "[z]")
    made = offering(place, "".join(f"{head}\n{table}" for head in heads))
    assert set(entries(made)) == {"ubuntu-24.04", "ubuntu-24.10", "x.y", "z"}


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('format = "raw"', "has no path"),
        ('path = "a"', "has no format"),
        ('path = "a"\nformat = "guess"', "has the format 'guess'"),
        ('path = "a"\nfromat = "raw"', "'fromat'"),
        ('path = 1\nformat = "raw"', "not a string"),
        ('path = "a"\nformat = "raw"\nmin_memory = "512"', "not a number"),
        ('path = "a"\nformat = "raw"\nmin_memory = -1', "min_memory"),
        ("", "has no path"),
    ],
)
def test_one_wrong_entry_leaves_the_others(place: Path, table: str, problem: str) -> None:
    write(place / "good.raw", b"good")
    names, found = survey(offering(place, f'[wrong]\n{table}\n[good]\npath = "good.raw"\nformat = "raw"\n'))
    assert names == ["good"]
    assert (found["image wrong"].verdict, found["images"].verdict) == (OFF, OK)
    assert problem in found["image wrong"].seen
    assert found["image wrong"].hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a\n", "not a catalog"),
        ('path = "a"\n', "outside of any table"),
        ("#" * (catalog.LARGEST + 1), "more than"),
        ("[x]\n" + "a = " + "[" * 100000, "not a catalog"),
        ("".join(f"[i{number}]\n" for number in range(catalog.MOST_IMAGES + 1)), "more than"),
    ],
)
def test_what_is_no_catalog_is_named_and_nothing_more(place: Path, text: str | bytes, problem: str) -> None:
    write(place / "catalog.toml", text)
    names, found = survey(settings(place))
    assert names == []
    assert found["images"].verdict == OFF, "no machine goes offline for it"
    assert problem in found["images"].seen
    refusal(settings(place))


@pytest.mark.parametrize("name", ["a b", "-a", "a/b", "ä", "a,b", "a:b", "x" * 65])
def test_a_name_that_no_job_could_write_is_refused(place: Path, name: str) -> None:
    write(place / "a", b"content")
    made = offering(place, f'["{name}"]\npath = "a"\nformat = "raw"\n')
    assert "is not a name" in trouble(made, f"image {name[:64]}")


# --- whose the files are


def trouble(made: Settings, check: str = "image a") -> str:
    names, found = survey(made)
    assert names == []
    return found[check].seen


def _make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("check", "change", "problem"),
    [
        ("images", lambda image: image.with_name("catalog.toml").chmod(0o666), "written to by others"),
        ("image a", lambda image: image.chmod(0o664), "written to by others"),
        pytest.param("image a", lambda image: os.chown(image, 54321, 54321), "belongs to user id 54321", marks=AS_ROOT),
        ("image a", Path.unlink, "No such file"),
        ("image a", _make_directory, "not a regular file"),
        ("image a", lambda image: image.chmod(0o640), "because of the mode of {image}"),
        ("image a", lambda image: image.parent.chmod(0o750), "because of the mode of {image.parent}"),
    ],
    ids=["writable-catalog", "writable", "somebody-elses", "missing", "directory", "unreadable", "closed-directory"],
)
def test_no_untrusted_image_is_offered(place: Path, check: str, change: Callable[[Path], None], problem: str) -> None:
    made = one(place)
    change(place / "a")
    assert problem.format(image=place / "a") in trouble(made, check)


@AS_ROOT
def test_a_link_in_somebody_elses_directory_is_not_followed(place: Path, scratch: Path) -> None:
    write(place / "base", b"content")
    (scratch / "link").symlink_to(place / "base")
    assert "belongs to user id" in trouble(offering(place, f'[a]\npath = "{scratch}/link"\nformat = "raw"\n'))


def test_a_directory_that_others_may_write_to_is_not_passed(place: Path) -> None:
    inner = place / "inner"
    inner.mkdir()
    inner.chmod(0o777)
    write(inner / "a", b"content")
    assert "others may write" in trouble(offering(place, '[a]\npath = "inner/a"\nformat = "raw"\n'))


@pytest.mark.parametrize(
    ("image_format", "content", "problem"),
    [
        *(("qcow2", b"no header", "is not"), ("raw", QCOW2, "looks like qcow2"), ("iso", QCOW2, "looks like qcow2")),
        *(("vmdk", QCOW2, "looks like qcow2"), ("raw", b"", "is empty")),
    ],
)
def test_an_image_of_another_format_is_none(place: Path, image_format: str, content: bytes, problem: str) -> None:
    assert problem in trouble(one(place, image_format, content))


@pytest.mark.parametrize(
    ("header", "asked"), [(QCOW2, False), (LAYERED, True), (QCOW2[:72] + b"\0\0\0\0\0\0\0\4" + QCOW2[80:], True)]
)
def test_layers_are_asked_about_where_there_can_be_some(place: Path, header: bytes, asked: bool) -> None:
    asked_about = []
    assert survey(one(place, "qcow2", header), asked_about.append)[0] == ["a"]
    assert asked_about == ([Image("a", f"{place}/a", "qcow2")] if asked else [])


def test_an_image_whose_layers_are_bad_is_not_offered(place: Path) -> None:
    below = Mock(side_effect=MachineFault("its backing file is gone", "fix it"))
    names, found = survey(one(place, "qcow2", LAYERED), below)
    assert (names, found["images"].verdict) == ([], OFF)
    assert found["image a"].seen == "its backing file is gone"


@pytest.mark.qemu
def test_a_layer_of_an_image_must_be_the_administrators_too(place: Path) -> None:
    base = write(place / "base", b"x" * 512)
    top = place / "top"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base), "-F", "raw", str(top)], check=True)
    image, who = Image("a", str(top), "qcow2"), Identity(os.getuid(), os.getgid())
    [layer] = backing_of(image, who)
    assert (layer.path, layer.format, layer.known_as) == (str(base), "raw", "catalog:a+1")
    base.chmod(0o666)
    with pytest.raises(JobFault, match="written to by others"):
        backing_of(image, who)


def test_a_check_that_was_late_keeps_no_machine_out() -> None:
    names, [finding] = catalog.judge(MachineFault("it had not ended"))
    assert (names, finding.verdict) == ([], OFF)
    assert catalog.judge(None) == ([], [])
    assert catalog.judge((["a", "b"], [])) == (["a", "b"], [])


# --- what a job says


def refusal(made: Settings, disks: str = "catalog:a:vda:w", **attributes: str) -> JobFault:
    with pytest.raises(JobFault) as caught:
        resolved(made, disks, **attributes)
    return caught.value


def test_what_becomes_of_a_disk_of_the_catalog(place: Path) -> None:
    [disk] = resolved(one(place, "qcow2", QCOW2))
    layer = ("/scratch/vda-a.qcow2", "vda", "", True, "qcow2", True, "disk")
    assert disk == Disk(*layer, image=Image("a", f"{place}/a", "qcow2"))
    assert disk.is_made
    [disk] = resolved(one(place), "Catalog:a:sdb:R")
    assert (disk.path, disk.format, disk.writable, disk.transferred) == (f"{place}/a", "raw", False, False)
    assert not disk.is_made
    [disk] = resolved(one(place, "iso"), "catalog:a:sdb:w")
    assert (disk.kind, disk.writable, disk.path) == ("cdrom", False, f"{place}/a")
    disks = resolved(one(place), "catalog:a:vda:w,catalog:a:vdb:w")
    assert [disk.path for disk in disks] == ["/scratch/vda-a.qcow2", "/scratch/vdb-a.qcow2"]


@pytest.mark.parametrize("entry", ["catalog:vda:w", "catalog:vda:w:qcow2", "./catalog:vda:w", "/x/catalog:vda:w:raw"])
def test_a_file_may_be_called_catalog(entry: str) -> None:
    [disk] = resolved(PLAIN, entry, Files(scratch=("catalog",)))
    assert (disk.path, disk.image) == ("/scratch/catalog", None)


@pytest.mark.parametrize(
    ("disks", "problem"),
    [
        ("catalog:a:vda:w:qcow2", "the catalog knows the format"),
        ("catalog::vda:w", "is not of the form catalog:name:device:permission"),
        ("catalog:a:floppy:w", "'floppy' is not a device"),
        ("catalog:a:vda:x", "'x' is not a permission"),
        ("catalog:a:vda:ws", "shares an image"),
        ("catalog:a:vda:w,catalog:a:vda:r", "used twice"),
    ],
)
def test_what_makes_no_sense_is_refused(place: Path, disks: str, problem: str) -> None:
    fault = refusal(one(place), disks)
    assert fault.code == errors.INVALID_DISK_PARAM
    assert problem in fault.problem.replace('"', "'")


def test_an_image_that_this_machine_does_not_have_or_the_job_too_little_for(place: Path) -> None:
    table = 'path = "a"\nformat = "raw"\n'
    made = offering(place, f"[debian-12]\n{table}[rocky-9]\n{table}")
    fault = refusal(made, "catalog:debian12:vda:w")
    assert fault.code == errors.INVALID_DISK_PARAM
    assert "it has debian-12, rocky-9" in fault.problem
    assert "Is it debian-12 that is meant?" in fault.problem
    assert "meant" not in refusal(made, "catalog:windows:vda:w").problem
    fault = refusal(PLAIN, "catalog:debian-12:vda:w")
    assert "VM_CATALOG" in fault.problem
    assert 'requirements = stringListMember("debian-12", VM_Images)' in fault.hint
    made = offering(place, '[a]\npath = "a"\nformat = "raw"\nmin_memory = 600\n')
    write(place / "a", b"content")
    fault = refusal(made)
    assert fault.code == errors.NO_MEMORY_PARAM
    assert "set vm_memory = 600" in fault.hint
    assert resolved(made, JobVMMemory="600")


def test_a_broken_image_or_catalog_takes_no_machine_offline(place: Path) -> None:
    with pytest.raises(JobFault, match="may not read that image"):
        resolved(one(place), files=Files(shared=()))
    made = one(place)
    (place / "a").chmod(0o666)
    assert "written to by others" in refusal(made).problem
    assert "cannot be used on this machine" in refusal(offering(place, "[a]\n")).problem


# --- VM types that make nothing


@pytest.mark.parametrize(
    "line",
    [
        *('VMPARAM_vm_Disk = "catalog:a:vda:w"', 'VMPARAM_vm_Disk = "a.img:vda:w, CATALOG:a:vdb:r"'),
        *('VMPARAM_vm_Data_Disk = "vdb:1G"', 'VM_ATTR_Data_Files = "a"', 'VM_xen_ATTR_data_disk = "a"'),
    ],
)
def test_other_types_refuse_by_name(line: str) -> None:
    with pytest.raises(JobFault) as caught:
        refuse_made(jobs.of_lines('JobVMType = "xen"', line))
    assert line.partition(" ")[0] in caught.value.problem
    assert "xen" in caught.value.problem


@pytest.mark.parametrize("line", ['VMPARAM_vm_Disk = "catalog:vda:w"', "VMPARAM_vm_Data_Disk = undefined"])
def test_other_types_take_what_is_nothing_of_it(line: str) -> None:
    refuse_made(jobs.of_lines('JobVMType = "xen"', line))


def test_other_drivers_and_containers_make_no_disks(scratch: Path, place: Path) -> None:
    from vmgahp.job import vm_spec
    from vmgahp.job.vmware import VmwareSpec

    ad = jobs.ad(VMPARAM_vm_Disk='"catalog:a:vda:w"')
    with pytest.raises(JobFault, match="no images of a catalog"):
        VmwareSpec.parse(ad, PLAIN)
    with pytest.raises(JobFault, match="no images of a catalog"):
        vm_spec.parse(ad, PLAIN)
    # Its script would not know of it: what the job asks for is never left out in silence.
    made = Settings({"VM_MEMORY": "1024", "LIBVIRT_XML_SCRIPT": "/bin/true"})
    ad = jobs.ad(VMPARAM_vm_Disk="undefined", VMPARAM_vm_Data_Disk='"vdb:1G"')
    spec = JobSpec.parse(ad, made, diskless=True)
    with pytest.raises(JobFault, match="VMPARAM_vm_Data_Disk"):
        disks.require_possible(spec, "lxc", made)


@pytest.mark.parametrize(("domain_type", "script"), [("lxc", ""), ("kvm", "/bin/true")])
def test_domains_that_this_package_does_not_describe_to_qemu(place: Path, domain_type: str, script: str) -> None:
    made = one(place)
    spec = JobSpec.parse(jobs.ad(VMPARAM_vm_Disk='"catalog:a:vda:w"'), made)
    disks.require_possible(spec, "kvm", made)
    values = {"VM_CATALOG": str(place / "catalog.toml")} | ({"LIBVIRT_XML_SCRIPT": script} if script else {})
    with pytest.raises(JobFault, match="cannot give it:"):
        disks.require_possible(spec, domain_type, Settings(values))


@pytest.mark.parametrize("option", ['VMPARAM_vm_Data_Files = "in.csv"', 'VMPARAM_vm_User_Data = "user-data"'])
def test_a_machine_without_pycdlib_is_not_the_jobs_but_no_fault(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """A START that fails with a word of the machine's would take it out of service for everybody."""
    name, _, value = option.partition(" = ")
    spec = JobSpec.parse(jobs.ad(**{name: value}), PLAIN)
    disks.require_possible(spec, "kvm", PLAIN)
    monkeypatch.setattr("vmgahp.images.iso.can_write", lambda: False)
    with pytest.raises(JobFault, match="pycdlib") as raised:
        disks.require_possible(spec, "kvm", PLAIN)
    assert "VM_kvm_ATTR_iso" in raised.value.hint


def test_a_line_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2 has more than 5000 bytes"):
        catalog.parse("/etc/images.toml", b"[a]\n" + b"a." * 20_000 + b"a = 1\n")


def test_images_of_which_a_guest_has_booted_are_named(tmp_path: Path) -> None:
    for name in (
        "debian-12-512-1-0123456789abcdef",
        "gone-512-1-0123456789abcdef",
        "tools-512-1-of-others",
        ".unfinished-x",
        ".seen-debian-12-512-1-0123456789abcdef",
    ):
        (tmp_path / name).mkdir()
    assert sorted(image for image, _ in catalog.templates(Settings({"VM_WARM_DIR": str(tmp_path)}))) == [
        "debian-12",
        "gone",
    ]
    told = catalog.published(["debian-12", "tools"], Settings({"VM_WARM_DIR": str(tmp_path)}))
    assert told == {"VM_Images": "debian-12,tools", "VM_Images_Warm": "debian-12"}
    assert catalog.published(["tools"], Settings({"VM_WARM_DIR": "/nonexistent"})) == {
        "VM_Images": "tools",
        "VM_Images_Warm": "",
    }
