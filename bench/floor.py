"""The least that a server in Python does: the floor of the bench's table, and no server for a job.

It speaks just enough of the protocol to be measured, on a bare interpreter (-I -S) and libvirt's C module, and
leaves out all that makes a server: it looks at nothing, proves nothing, guards nothing and logs nothing. Its first
argument is the directory of `libvirtmod`, its second a file with a domain's XML to fill in.
"""

import os
import sys

TYPE_CHECKING = False  # to import `typing` costs more than the rest of this
if TYPE_CHECKING:
    from typing import Any

GREETING = b"$VMGahpVersion 0.0.1 May 1 2007 Condor\\ VMGAHP $"
URI = "qemu:///system"
GONE = b"STATUS=Stopped"


class Floor:
    """One conversation; the VMs of it."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.libvirt: Any = None
        self.connection: Any = None
        self.ad: dict[str, str] = {}
        self.domains: dict[bytes, object] = {}
        self.results: list[bytes] = []
        self.working_dir = ""

    def serve(self) -> None:
        os.write(1, GREETING + b"\n")
        left = b""
        while chunk := os.read(0, 65536):
            *lines, left = (left + chunk).split(b"\n")
            replies = b"".join([self.reply(line.rstrip(b"\r")) for line in lines])
            if replies:
                os.write(1, replies)
            if lines and lines[-1].startswith(b"QUIT"):
                break
        for domain in self.domains.values():
            self.libvirt.virDomainDestroy(domain)

    def reply(self, line: bytes) -> bytes:
        if line == b"VERSION":
            return b"S %s\n" % GREETING
        if line == b"RESULTS":
            found, self.results = self.results, []
            return b"S %d\n%s" % (len(found), b"".join(found))
        if line == b"CLASSAD":
            self.ad = {}
            return b"S\n"
        if line.startswith(b"CONDOR_VM_"):
            command, number, argument = line.split(b" ")
            self.results.append(b"%s 0 %s\n" % (number, self.result(command[10:], argument)))
            return b"S\nR\n"
        if line == b"ASYNC_MODE_ON":  # whoever says so is about to start a VM
            self.connect()
            return b"S\n"
        if line in (b"CLASSAD_END", b"QUIT"):
            return b"S\n"
        name, _, value = line.decode().partition(" = ")
        self.ad[name] = value.strip('"')
        return b""

    def result(self, command: bytes, argument: bytes) -> bytes:
        if command == b"START":
            return self.start()
        domain = self.domains.get(argument)
        if domain is None:
            return GONE
        if command == b"STATUS":
            _, most, now, _, taken = self.libvirt.virDomainGetInfo(domain)
            words = (b"Running", taken / 1e9, now, most)
            return b"STATUS=%s CPUUTILIZATION=0.0 CPUTIME=%f MEMORY=%d MAXMEMORY=%d" % words
        image = f"{self.working_dir}/image"
        if command == b"RESUME":
            self.libvirt.virDomainRestore(self.connection, image)
            name = self.libvirt.virDomainGetName(domain)
            self.domains[argument] = self.libvirt.virDomainLookupByName(self.connection, name)
        else:  # SUSPEND and CHECKPOINT
            self.libvirt.virDomainSave(domain, image)
        return b"NULL"

    def start(self) -> bytes:
        ad = self.ad
        if self.libvirt is None:  # nobody said so
            self.connect()
        self.working_dir = ad["VM_WORKING_DIR"]
        disk = os.path.join(self.working_dir, ad["VMPARAM_vm_Disk"].partition(":")[0])
        xml = self.template.format(name=f"floor_{ad['ProcId']}", memory=ad["JobVMMemory"], disk=disk)
        vm_id = b"%d" % (len(self.domains) + 1)
        self.domains[vm_id] = self.libvirt.virDomainCreateXML(self.connection, xml, 0)
        return vm_id

    def connect(self) -> None:
        import libvirtmod

        self.libvirt = libvirtmod
        libvirtmod.virInitialize()
        self.connection = libvirtmod.virConnectOpen(URI)

    def probe(self) -> None:
        self.connect()
        os.write(1, b'VM_Type = "kvm"\n' if self.connection else b"")


def main() -> None:
    with open(sys.argv[2]) as template:
        floor = Floor(template.read())
    sys.path.append(sys.argv[1])
    if "-t" in sys.argv:
        floor.probe()
    else:
        floor.serve()


if __name__ == "__main__":
    main()
