"""The rows of domain XML: what they allow, and what they make of domains as libvirt 9.0 wrote them.

`golden/libvirt` has domains that were asked for and what libvirt made of them (``.asked``, ``.live``), and VMs that
were saved, what the next start asks for and what is restored (``.saved``, ``.ours``, ``.restored``).
``golden/allowed.txt`` is all that a job's own XML may say. `pytest --update-golden` writes ``.restored`` and the list
anew.
"""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as etree

import pytest

from tests.domain.support import assert_golden, spec
from vmgahp.domain import model, verify
from vmgahp.domain.restore import reconcile

GOLDEN = Path(__file__).parent / "golden"
LIVE = sorted(path.name.removesuffix(".live.xml") for path in (GOLDEN / "libvirt").glob("*.live.xml"))
SAVED = sorted(path.name.removesuffix(".saved.xml") for path in (GOLDEN / "libvirt").glob("*.saved.xml"))


def xml(name: str, what: str) -> str:
    return (GOLDEN / "libvirt" / f"{name}.{what}.xml").read_text()


# Amounts and devices


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("<memory>65536</memory>", 64 << 20), ("<memory unit=''>65536</memory>", 64 << 20)),
        *(("<memory unit='b'> 7 </memory>", 7), ("<memory unit='bytes'>7</memory>", 7)),
        *(("<memory unit='KB'>7</memory>", 7000), ("<memory unit='k'>7</memory>", 7 << 10)),
        *(("<memory unit='M'>7</memory>", 7 << 20), ("<memory unit='mib'>7</memory>", 7 << 20)),
        *(("<memory unit='GB'>7</memory>", 7 * 10**9), ("<memory unit='TiB'>7</memory>", 7 << 40)),
        *(("<memory unit='P'>7</memory>", 7 << 50), ("<memory unit='EiB'>7</memory>", 7 << 60)),
    ],
)
def test_memory_in_libvirts_units(text: str, size: int) -> None:
    assert model.memory(etree.fromstring(text)) == size
    assert model.memory(None) == 0


@pytest.mark.parametrize(
    "text",
    [
        *("<memory/>", "<memory>-1</memory>", "<memory>1.5</memory>", "<memory>1e3</memory>", "<memory>0x1</memory>"),
        *("<memory unit='XiB'>1</memory>", "<memory unit='KiBi'>1</memory>", "<memory unit=' '>1</memory>"),
        *("<memory>1234567890123456789</memory>", "<memory>\u0663</memory>"),
    ],
)
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ValueError, match="no amount of memory"):
        model.memory(etree.fromstring(text))


@pytest.mark.parametrize(
    ("device", "known"),
    [
        ("<disk type='file'><target dev='vda' bus='virtio'/></disk>", ("disk", "vda", "disk")),
        ("<interface type='user'><mac address='52:54:00:12:34:56'/></interface>", ("interface", "user")),
        ("<controller type='usb' index='0' model='x'/>", ("controller", "usb", "0")),
        ("<serial type='pty'/>", ("serial", "0")),
        ("<console type='pty'><target type='virtio' port='1'/></console>", ("console", "virtio", "")),
        ("<video><model type='vga'/></video>", ("video",)),
        ("<hostdev mode='subsystem' type='usb'/>", ("hostdev", "usb", "", "", "subsystem")),
        ("<teleporter type='x'/>", ("teleporter", "x", "", "", "")),
    ],
)
def test_by_what_a_device_is_known(device: str, known: tuple[str, ...]) -> None:
    assert model.known_by(etree.fromstring(device)) == known


# What a job may say


def _lines(row: model.Element, path: str) -> Iterator[str]:
    most = f" ({row.most} at most)" if row.most > 1 else ""
    yield path + most + ("" if row.text is None else f" = {row.text}")
    yield from (f"{path}/@{name} = {row.form(name)}" for name in sorted(row.attributes) if row.form(name))
    for tag in sorted(row.children):
        if tag != "address" and (below := row.child(tag)):
            yield from _lines(below, f"{path}/{tag}")


def test_what_a_job_may_say_is_in_the_list_and_no_device_of_the_host(request: pytest.FixtureRequest) -> None:
    addresses = [device.children["address"] for device in model.DEVICES.values() if "address" in device.children]
    assert addresses == [addresses[0]] * len(addresses)
    lines = [*_lines(model.DOMAIN, "/domain"), *_lines(addresses[0], "/domain/devices/*/address")]
    assert_golden("\n".join(lines), GOLDEN / "allowed.txt", request)
    ours = {tag for tag, row in model.DEVICES.items() if not row.job}
    assert ours == {"hostdev", "filesystem", "shmem", "emulator", "nvram", "redirdev", "parallel"}


# What libvirt makes of a domain


def against(name: str, live: etree.Element) -> str:
    """Return the differences."""
    mebibytes, vcpus = model.memory(live.find("memory")) >> 20, int(live.findtext("vcpu") or 0)
    try:
        verify.against_script(
            etree.tostring(live, encoding="unicode"), xml(name, "asked"), spec(memory_mib=mebibytes, vcpus=vcpus)
        )
    except verify.Mismatch as mismatch:
        return str(mismatch)
    return ""


@pytest.mark.parametrize("name", LIVE)
def test_what_libvirt_made_is_what_was_asked_for(name: str) -> None:
    assert against(name, etree.fromstring(xml(name, "live"))) == ""


def said_of_the_host(name: str) -> Iterator[tuple[int, str, str, str]]:
    """Number of the device, path, attribute and value, of all that must be there as it was asked for."""
    for number, device in enumerate(etree.fromstring(xml(name, "asked")).iterfind("devices/*")):
        row = model.DEVICES.get(device.tag, model.OTHER)
        ends = [tag for tag, below in row.children.items() if model.Side.HOST in below.side]
        for attribute, value in device.items() if ends else ():
            if row.attributes.get(attribute, model.Attribute()).side & (model.Side.HOST | model.Side.IDENTITY):
                yield number, ".", attribute, value
        for part in device:
            if part.tag in ends:
                yield from ((number, part.tag, attribute, value) for attribute, value in part.items())


@pytest.mark.parametrize("name", LIVE)
def test_whatever_is_of_the_hosts_side_is_compared(name: str) -> None:
    seen = 0
    for number, path, attribute, value in said_of_the_host(name):
        live = etree.fromstring(xml(name, "live"))
        tag = etree.fromstring(xml(name, "asked")).findall("devices/*")[number].tag
        parts = [
            part
            for device in live.iterfind(f"devices/{tag}")
            for part in ([device] if path == "." else device.findall(path))
            if model.equal(part.get(attribute, ""), value)
        ]
        for part in parts:
            part.set(attribute, "another")
        assert parts, (tag, path, attribute)
        assert against(name, live), (tag, path, attribute)
        seen += 1
    assert seen > 3


@pytest.mark.parametrize("name", LIVE)
def test_every_device_is_asked_for_or_added(name: str) -> None:
    """A second one of each device that libvirt made is one too many, but for those that reach nothing."""
    harmless = {"controller", "input", "memballoon", "audio", "video", "watchdog", "emulator"}
    for device in etree.fromstring(xml(name, "live")).iterfind("devices/*"):
        live = etree.fromstring(xml(name, "live"))
        live.find("devices").append(device)
        assert bool(against(name, live)) or device.tag in harmless, device.tag


# What is restored


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_vm_is_restored_with_ours(name: str, request: pytest.FixtureRequest) -> None:
    made = reconcile(xml(name, "saved"), xml(name, "ours"))
    assert_golden(made, GOLDEN / "libvirt" / f"{name}.restored.xml", request)


@pytest.mark.parametrize("name", SAVED)
def test_nothing_of_the_saved_hosts_side_is_restored(name: str) -> None:
    """Whatever is in the saved XML beside the rows' guest's side is as if it were not there."""
    saved = etree.fromstring(xml(name, "saved"))
    for device in saved.iterfind("devices/*"):
        row = model.DEVICES[device.tag]
        for part in [part for part in device if part.tag not in row.children and part.tag != "address"]:
            device.remove(part)
        for path, below in model.elements(row):
            part = device.find(path) if path else device
            for attribute, known in below.attributes.items() if part is not None else ():
                if known.side is model.Side.HOST and path != "driver":  # an image's format is compared
                    part.set(attribute, "/etc/shadow")
    restored = reconcile(etree.tostring(saved, encoding="unicode"), xml(name, "ours"))
    assert etree.canonicalize(restored) == etree.canonicalize(xml(name, "restored").strip())
