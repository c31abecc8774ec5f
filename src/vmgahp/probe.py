"""The prober (``-M 0``): what the startd publishes about the VMs that this machine can run."""

from vmgahp import config, errors
from vmgahp.drivers import base
from vmgahp.identity import Identity
from vmgahp.log import Log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    Attributes = dict[str, str | int | bool]

VERSION = "0.0.1"
"""Of the GAHP protocol, as the startd publishes it in VM_GAHP_VERSION."""


def probe(vm_type: str, settings: config.Settings, driver: base.Driver) -> "Attributes":
    """The machine attributes, in the order in which they are printed.

    Raises `errors.MachineFault` where no VM could run; then nothing may be printed, because whatever the
    startd reads makes the machine VM-capable (``VMUniverseMgr`` in HTCondor's ``src/condor_startd.V6``).
    """
    memory = settings.integer("VM_MEMORY")
    if memory <= 0:
        raise errors.MachineFault(
            f"VM_MEMORY is {memory or 'not set'}: no memory is set aside for VMs.",
            "set VM_MEMORY to the MiB that all VMs of this machine may use together.",
        )
    attributes: Attributes = {"VM_GAHP_VERSION": VERSION, "VM_Type": vm_type, "VM_Memory": memory}
    found = driver.probe()
    types = driver.networking()
    attributes["VM_Networking"] = bool(types)
    if types:
        attributes["VM_Networking_Types"] = ",".join(types)
    if settings.boolean("VM_HARDWARE_VT"):
        attributes["VM_HardwareVT"] = True
    return attributes | found


def render(attributes: "Attributes") -> str:
    """Attributes as the lines of a ClassAd."""
    lines = []
    for name, value in attributes.items():
        if isinstance(value, bool):
            text = "TRUE" if value else "FALSE"
        elif isinstance(value, int):
            text = str(value)
        else:
            text = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        lines.append(f"{name} = {text}\n")
    return "".join(lines)


def run(vm_type: str, environ: "Mapping[str, str]", *, to_stderr: bool) -> int:
    """Probe and print; the exit status is 0 only for a machine that can run VMs."""
    import sys

    log = Log()
    try:
        settings = config.load(environ)
        log.open(settings, to_stderr=to_stderr)
        driver = base.find(vm_type)(vm_type, settings, Identity.from_environ(environ), log.always)
        text = render(probe(vm_type, settings, driver))
        driver.close()
    except errors.Fault as fault:
        reason = f"this machine is not VM-capable: {fault.render()}"
        log.always(reason)
        log.tell_stderr(reason)
        return 1
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0
