"""What is used of libvirt's C library, against libvirt-python, on the test driver, which is in the library."""

import ast
import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import libvirt
import libvirtmod
import pytest

from tests import REPOSITORY
from tests.peer import DEADLINE
from vmgahp.drivers.libvirt import binding

URI = "test:///default"
NOBODY = "00000000-1111-2222-3333-444444444444"
SOURCES = sorted((REPOSITORY / "src").rglob("*.py"))
CLASSES = [binding.virConnect, binding.virDomain, binding.virNetwork, binding.virStream]


@pytest.fixture
def opened() -> Iterator[binding.virConnect]:
    for module in (binding, libvirt):
        module.registerErrorHandler(lambda _context, _error: None, None)
    made = binding.open(URI)
    yield made
    if made._o is not None:
        made.close()


# The same as libvirt-python's


def test_the_constants() -> None:
    ours = {name: value for name, value in vars(binding).items() if name.startswith("VIR_")}
    ours |= {f"VIR_ERR_{name}": number for name, number in binding.CODES.items()}
    ours |= {f"VIR_FROM_{name}": number for name, number in binding.ORIGINS.items()}
    assert len(ours) > 150
    theirs = {name: getattr(libvirt, name) for name in ours if hasattr(libvirt, name)}
    assert {name: ours[name] for name in theirs} == theirs
    later = ours.keys() - theirs.keys()  # than the libvirt that libvirt-python was made for
    assert all(name.startswith("VIR_ERR_") for name in later), later
    newest = max(number for name, number in binding.CODES.items() if f"VIR_ERR_{name}" in theirs)
    assert all(binding.CODES[name.removeprefix("VIR_ERR_")] > newest for name in later)


def called(method: ast.AST) -> set[str]:
    """The C functions that a method of ours names."""
    texts = {node.value for node in ast.walk(method) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    return {name for name in texts | names if name.startswith("vir") and name.isidentifier()} - vars(binding).keys()


@pytest.mark.parametrize("ours", CLASSES, ids=lambda kind: kind.__name__)
def test_each_method_calls_what_theirs_calls(ours: type) -> None:
    [kind] = ast.parse(inspect.getsource(ours)).body
    assert isinstance(kind, ast.ClassDef)
    for method in kind.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
            if not hasattr(getattr(libvirt, ours.__name__), method.name):
                continue  # of a later libvirt
            theirs = getattr(getattr(libvirt, ours.__name__), method.name)
            source = inspect.getsource(theirs)
            missing = [name for name in called(method) if f"libvirtmod.{name}(" not in source]
            assert not missing, f"{ours.__name__}.{method.name}"
            most = len(inspect.signature(theirs).parameters)
            assert len(inspect.signature(getattr(ours, method.name)).parameters) <= most, method.name


def test_nobody_imports_libvirt_python_itself() -> None:
    imports = re.compile(r"^ *(?:import|from) +(libvirt|libvirtmod)\b", re.MULTILINE)
    found = {path.name: set(imports.findall(path.read_text())) for path in SOURCES}
    assert {name: modules for name, modules in found.items() if modules} == {"binding.py": {"libvirtmod"}}


# Errors


def refused(module: ModuleType, ask: Callable[[Any], object]) -> tuple[object, ...]:
    connection = module.open(URI)
    with pytest.raises(module.libvirtError) as raised:
        ask(connection)
    error = raised.value
    return str(error), error.get_error_code(), error.get_error_domain(), error.get_error_message(), error.err


def used_after_close(connection: Any) -> None:
    connection.close()
    connection.getType()


@pytest.mark.parametrize(
    "ask",
    [
        lambda connection: connection.lookupByUUIDString(NOBODY),
        lambda connection: connection.lookupByUUIDString("no UUID"),
        lambda connection: connection.setKeepAlive(5, 3),
        lambda connection: connection.createXML("<domain/>", 0),
        lambda connection: connection.listAllDomains()[0].undefineFlags(1 << 20),
        lambda connection: connection.networkLookupByName("nowhere"),
        used_after_close,
    ],
)
def test_an_error_says_what_theirs_says(opened: binding.virConnect, ask: Callable[[Any], object]) -> None:
    assert refused(binding, ask) == refused(libvirt, ask)


def test_an_error_is_of_the_thread_whose_call_failed(opened: binding.virConnect) -> None:
    failed, both = threading.Barrier(2), dict[str, binding.libvirtError]()

    def fail(name: str, ask: Callable[[], object]) -> None:
        answer = ask()
        failed.wait(DEADLINE)
        assert answer is None
        both[name] = binding.libvirtError(name)

    asks = {
        "domain": lambda: libvirtmod.virDomainLookupByUUIDString(opened._o, NOBODY),
        "network": lambda: libvirtmod.virNetworkLookupByName(opened._o, "nowhere"),
    }
    threads = [threading.Thread(target=fail, args=row) for row in asks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    codes = {name: error.get_error_code() for name, error in both.items()}
    assert codes == {"domain": libvirt.VIR_ERR_NO_DOMAIN, "network": libvirt.VIR_ERR_NO_NETWORK}


def test_what_an_older_libvirt_lacks_is_an_attribute_error(
    opened: binding.virConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(libvirtmod, "virDomainSaveParams", raising=False)
    with pytest.raises(AttributeError, match="virDomainSaveParams"):
        opened.listAllDomains()[0].saveParams({})


# Objects and events


def test_a_connection_is_closed_with_its_last_reference(opened: binding.virConnect) -> None:
    domain = opened.listAllDomains()[0]
    assert opened.close() > 0
    assert domain.name() == "test", "it lives as long as the connection that it holds"
    with pytest.raises(binding.libvirtError):
        opened.close()
    alone = binding.open(URI)
    assert alone.close() == 0


def test_a_domain_that_is_gone_is_an_error_and_no_more(opened: binding.virConnect) -> None:
    domain = opened.createXML(
        "<domain type='test'><name>gone</name><memory>1024</memory><os><type>hvm</type></os></domain>"
    )
    domain.destroy()
    with pytest.raises(binding.libvirtError) as raised:
        domain.info()
    assert raised.value.get_error_code() == binding.VIR_ERR_NO_DOMAIN
    assert domain.name() == "gone"


SCENE = """
import sys, threading
from vmgahp.drivers.libvirt import binding
binding.registerErrorHandler(lambda _context, _error: None, None)
binding.virEventRegisterDefaultImpl()
def run():
    while True:
        binding.virEventRunDefaultImpl()
threading.Thread(target=run, daemon=True).start()
seen, stopped = [], threading.Event()
def heard(connection, domain, event, detail, opaque):
    seen.append((connection is opened, domain.name(), event, detail, opaque))
    stopped.set()
opened = binding.open("test:///default")
number = opened.domainEventRegisterAny(None, binding.VIR_DOMAIN_EVENT_ID_LIFECYCLE, heard, "of mine")
domain = opened.listAllDomains()[0]
domain.destroy()
assert stopped.wait(20)
opened.domainEventDeregisterAny(number)
stopped.clear()
domain.createWithFlags()
assert domain.isActive()
other = binding.open("test:///default")
stats = other.domainListGetStats(other.listAllDomains(), binding.VIR_DOMAIN_STATS_STATE)
assert stats[0][0].name() == "test", stats
assert "state.state" in stats[0][1], stats
print(seen, "libvirt" in sys.modules)
if sys.argv[1] == "close":
    opened.close()
elif sys.argv[1] == "leave":
    del opened
    domain.info()
"""


@pytest.mark.parametrize("end", ["close", "leave", "nothing"])
def test_events_are_heard_until_they_are_not_wanted_and_any_end_is_clean(end: str) -> None:
    """In a process of its own, which has libvirt's event loop and ends with objects left over."""
    made = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SCENE, end], capture_output=True, text=True, timeout=DEADLINE
    )
    stopped = (True, "test", binding.VIR_DOMAIN_EVENT_STOPPED, binding.VIR_DOMAIN_EVENT_STOPPED_DESTROYED, "of mine")
    assert (made.stdout, made.stderr, made.returncode) == (f"{[stopped]} False\n", "", 0)


def test_a_picture_comes_through_a_stream(opened: binding.virConnect) -> None:
    stream = opened.newStream()
    assert opened.listAllDomains()[0].screenshot(stream, 0).startswith("image/")
    picture = b""
    while chunk := stream.recv(1 << 16):
        picture += chunk
    stream.finish()
    assert picture
