"""Attacks by a job's own libvirt XML, and by the kernel that it boots."""

import os

from tests.attacks.ground import CANARIES, SOCKET
from tests.attacks.site import Site
from tests.attacks.support import BOTH, Mode, Must, Who, attack, each
from tests.faults.host import until

DISK = (
    "<disk type='file'><driver name='qemu' type='raw'/><source file='guest.img'/>"
    "<target dev='hda' bus='ide'/>{more}</disk>"
)
DOMAIN = "<domain type='kvm'><memory unit='MiB'>16</memory><vcpu>1</vcpu>{rest}<devices>{devices}</devices></domain>"

DEVICES = (
    "<hostdev mode='subsystem' type='pci'><source><address domain='0' bus='0' slot='2'/></source></hostdev>",
    "<hostdev mode='capabilities' type='storage'><source><block>/dev/sda</block></source></hostdev>",
    "<filesystem type='mount'><source dir='/'/><target dir='root'/></filesystem>",
    "<filesystem type='mount' accessmode='passthrough'><source dir='/etc'/><target dir='etc'/></filesystem>",
    "<shmem name='x'><model type='ivshmem-plain'/></shmem>",
    "<redirdev bus='usb' type='tcp'><source mode='connect' host='127.0.0.1' service='{port}'/></redirdev>",
    "<serial type='file'><source path='{canary}'/></serial>",
    "<serial type='pty'><log file='{canary}' append='off'/></serial>",
    "<serial type='unix'><source mode='connect' path='{socket}'/></serial>",
    "<serial type='tcp'><source mode='connect' host='127.0.0.1' service='{port}'/></serial>",
    "<serial type='udp'><source mode='connect' host='127.0.0.1' service='{port}'/></serial>",
    "<serial type='dev'><source path='/dev/tty0'/></serial>",
    "<serial type='pipe'><source path='{canary}'/></serial>",
    "<parallel type='file'><source path='{canary}'/></parallel>",
    "<console type='file'><source path='{canary}'/></console>",
    "<channel type='unix'><source mode='connect' path='{socket}'/><target type='virtio' name='x'/></channel>",
    "<channel type='spiceport'><source channel='x'/><log file='{canary}'/><target type='virtio' name='x'/></channel>",
    "<graphics type='vnc' listen='0.0.0.0' passwd='x'/>",
    "<graphics type='vnc' socket='/run/execute/x'/>",
    "<graphics type='spice' port='{port}' listen='0.0.0.0'/>",
    "<rng model='virtio'><backend model='random'>{canary}</backend></rng>",
    "<rng model='virtio'><backend model='egd' type='unix'><source mode='connect' path='{socket}'/></backend></rng>",
    "<tpm model='tpm-tis'><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>",
    "<input type='evdev'><source dev='/dev/input/event0'/></input>",
    "<interface type='direct'><source dev='lo' mode='bridge'/></interface>",
    "<interface type='ethernet'><script path='/bin/sh'/><target dev='x'/></interface>",
    "<interface type='vhostuser'><source type='unix' path='{socket}' mode='client'/></interface>",
    "<interface type='bridge'><source bridge='virbr0'/></interface>",
    "<interface type='server'><source address='127.0.0.1' port='{port}'/></interface>",
    "<interface type='client'><source address='127.0.0.1' port='{port}'/></interface>",
    "<interface type='mcast'><source address='230.0.0.1' port='{port}'/></interface>",
    "<interface type='user'><backend type='passt' logFile='{canary}'/></interface>",
    "<interface type='user'><rom file='{canary}'/></interface>",
    "<smartcard mode='host'/>",
    "<vsock model='virtio'><cid auto='yes'/></vsock>",
    "<crypto model='virtio'><backend model='builtin'/></crypto>",
    "<audio id='1' type='file' path='{canary}'/>",
    "<memory model='nvdimm'><source><path>{canary}</path></source><target><size>1</size></target></memory>",
    "<watchdog model='i6300esb' action='dump'/>",
    "<lease><lockspace>x</lockspace><key>x</key><target path='{canary}'/></lease>",
    "<disk type='file'><source file='{canary}'/><target dev='hdb'/></disk>",
    "<disk type='block'><source dev='/dev/loop0'/><target dev='hdb'/></disk>",
    "<disk type='dir'><source dir='/etc'/><target dev='hdb'/></disk>",
    "<disk type='network'><source protocol='nbd' name='x'><host name='127.0.0.1' port='{port}'/></source>"
    "<target dev='hdb'/></disk>",
    "<disk type='vhostuser'><source type='unix' path='{socket}'/><target dev='hdb' bus='virtio'/></disk>",
    "<disk type='nvme'><source type='pci' namespace='1'/><target dev='hdb'/></disk>",
    "<disk type='volume'><source pool='default' volume='x'/><target dev='hdb'/></disk>",
    "<disk type='file' rawio='yes'><source file='guest.img'/><target dev='hdb'/></disk>",
    "<disk type='file'><source file='guest.img' fdgroup='d0'/><target dev='hdb'/></disk>",
    "<disk type='file'><source file='guest.img'><seclabel model='dac' relabel='yes'/></source>"
    "<target dev='hdb'/></disk>",
)
"""Devices of the host, and ways to its files and services."""

REST = (
    "<seclabel type='none'/>",
    "<seclabel type='static' model='dac'><label>root:root</label></seclabel>",
    "<qemu:commandline xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><qemu:arg value='-S'/>"
    "</qemu:commandline>",
    "<q:override xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'/>",
    "<os><type>hvm</type><loader readonly='yes' type='pflash'>{canary}</loader></os>",
    "<os><type>hvm</type><nvram template='{canary}'>{canary}</nvram></os>",
    "<os><type>hvm</type><kernel>{canary}</kernel></os>",
    "<os><type>hvm</type><kernel>link</kernel></os>",
    "<os><type>hvm</type><kernel>../../../canary/root</kernel></os>",
    "<os><type>hvm</type><kernel>guest.img</kernel><initrd>link</initrd></os>",
    "<os><type>hvm</type><dtb>{canary}</dtb></os>",
    "<os><type>hvm</type><acpi><table type='slic'>{canary}</table></acpi></os>",
    "<os><type>exe</type><init>/bin/sh</init></os>",
    "<os><type machine='x,accel=kvm'>hvm</type></os>",
    "<sysinfo type='fwcfg'><entry name='opt/x' file='{canary}'/></sysinfo>",
    "<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>",
    "<launchSecurity type='sev'/>",
    "<resource><partition>/system</partition></resource>",
    "<cputune><emulatorpin cpuset='0'/></cputune>",
    "<bootloader>/bin/sh</bootloader>",
    "<on_crash>coredump-destroy</on_crash>",
    "<metadata><x xmlns='urn:x'/></metadata>",
    "<uuid>../../x</uuid>",
    "<name>../../x</name>",
    "<genid>x</genid>",
)
"""What else is not a job's to say."""

HOST_MADE = (
    "",
    "<emulator>/bin/sh</emulator>",
    "<emulator>{canary}</emulator>",
    "<channel type='spicevmc'><target type='virtio' name='x'/></channel>",
    "<channel type='unix'><source mode='bind' path='/run/libvirt/qemu/channel/target/x'/>"
    "<target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel>",
    "<graphics type='spice' port='{port}' autoport='yes' listen='127.0.0.1'/>",
    "<graphics type='vnc' port='{port}' autoport='yes'/>",
    "<serial type='pty'><source path='/dev/pts/0'/></serial>",
    "<console type='pty' tty='/dev/pts/0'/>",
    "<redirdev bus='usb' type='spicevmc'/>",
    "<sound model='ich9'/>",
)
"""Devices, and what is of devices, that another machine had made of its own VM: dropped, whatever they say."""

HOST_MADE_REST = (
    "<metadata><x xmlns='urn:x'>{canary}</x></metadata>",
    "<resource><partition>/machine</partition></resource>",
    "<genid>6a6c0028-0d98-47b8-bfae-296197d26489</genid>",
    "<seclabel type='dynamic' model='dac' relabel='yes'><label>+0:+0</label><imagelabel>+0:+0</imagelabel></seclabel>",
    "<seclabel type='dynamic' model='apparmor' relabel='yes'><label>unconfined</label></seclabel>",
)
"""The same, of what else it had made."""

BACKING = (
    "<backingStore type='file' index='2'><format type='raw'/><source file='{canary}'/><backingStore/></backingStore>"
)

FILES = (
    "",
    "no XML",
    "<domain>" * 50_000,
    "<!DOCTYPE domain [<!ENTITY e SYSTEM 'file://{canary}'>]><domain><name>&e;</name></domain>",
    "<!DOCTYPE domain SYSTEM 'http://127.0.0.1:{port}/x.dtd'><domain/>",
    "<!DOCTYPE d [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;&a;&a;&a;&a;'><!ENTITY c '&b;&b;&b;&b;&b;']>"
    "<domain>&c;</domain>",
    "<?xml-stylesheet href='file://{canary}'?><domain/>",
    "<domain xmlns:xi='http://www.w3.org/2001/XInclude'><xi:include href='{canary}' parse='text'/></domain>",
    "<domain " + " ".join(f"a{number}='x'" for number in range(20_000)) + "/>",
    "<domain>" + "<a/>" * 200_000 + "</domain>",
)
"""Files that are no description."""

RACES = 8


def start(site: Site, text: str, *, may_run: bool = False, must_run: bool = False) -> None:
    """START with a description."""
    for old, new in (("{canary}", f"{CANARIES}/root"), ("{port}", str(site.ground.port)), ("{socket}", SOCKET)):
        text = text.replace(old, new)
    site.plant("domain.xml", text.encode())
    again(site, text, may_run=may_run or must_run, must_run=must_run)


def again(site: Site, what: str, *, may_run: bool = True, must_run: bool = False) -> None:
    with site.naming(what):
        site.start('VMPARAM_Libvirt_XML = "domain.xml"', VMPARAM_vm_Disk=None, JobVMCheckpoint="false")
        if must_run and not site.vm:
            site.breach("it does not run")
        if site.vm and not may_run:
            site.breach("it runs")
        site.stop()
        site.look_at_the_machine()


def described(rest: str = "", devices: str = "") -> str:
    return DOMAIN.format(rest=rest, devices=DISK.format(more="") + devices)


@attack(Who.USER, Must.HOLD, Mode.LIBVIRT, times=len(DEVICES), daily=True)
def devices(site: Site) -> None:
    """Ask for a device of the host: its files, services, hardware, networks."""
    site.guest()
    for one in DEVICES:
        start(site, described(devices=one))


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=len(REST))
def all_else(site: Site) -> None:
    """Have another element: labels, QEMU's arguments, firmware, kernels, memory, names."""
    site.guest()
    site.link("link", CANARIES / "root")
    for one in REST:
        start(site, described(rest=one), may_run=one.startswith(("<uuid", "<name", "<genid", "<metadata")))


@attack(Who.USER, Must.RUN, *BOTH, times=len(HOST_MADE + HOST_MADE_REST) + 1)
def host_made(site: Site) -> None:
    """Have things of another machine, which name what is here."""
    site.guest()
    for one in HOST_MADE:
        start(site, described(devices=one), must_run=True)
    for one in HOST_MADE_REST:
        start(site, described(rest=one), must_run=True)
    start(site, described().replace("</disk>", BACKING + "</disk>"), must_run=True)


@attack(Who.USER, Must.HOLD, Mode.LIBVIRT, times=len(FILES))
def files(site: Site) -> None:
    """Send no description: entities, document types, inclusions, too much of everything."""
    site.guest()
    for one in FILES:
        start(site, one)


@attack(Who.USER, Must.HOLD, Mode.LIBVIRT, times=5)
def elsewhere(site: Site) -> None:
    """Have as the description a link, a FIFO, a file of others, a directory, or one in /proc."""
    site.guest()
    site.link("link.xml", CANARIES / "other")
    site.node("directory.xml", os.mkdir)
    site.node("fifo.xml", os.mkfifo)
    for name in ("link.xml", "directory.xml", "fifo.xml", "/proc/self/environ", "../../../canary/root"):
        site.start(f'VMPARAM_Libvirt_XML = "{name}"', VMPARAM_vm_Disk=None)
        site.look_at_the_machine()


KERNEL = "<os><type>hvm</type><kernel>kernel</kernel></os>"


@attack(Who.USER, Must.SURVIVE, *BOTH, times=RACES)
def kernel_swapped(site: Site) -> None:
    """Exchange the kernel of the description and a link to a file of root's all the time during START."""
    site.guest()
    site.guest("kernel")
    site.link("evil", CANARIES / "root")
    with site.swapping("kernel", "evil"):
        for _ in range(RACES):
            start(site, described(rest=KERNEL), may_run=True)


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=1 + RACES)
def kernel_renamed(site: Site) -> None:
    """Rename the kernel when START has come to `prepare.done`, or have it gone and back all the time."""
    site.guest()
    kernel = site.guest("kernel")
    site.plant("domain.xml", described(rest=KERNEL).encode())
    daemon = site.daemon
    daemon.points.hold("prepare.done")
    request = site.ask_start('VMPARAM_Libvirt_XML = "domain.xml"', VMPARAM_vm_Disk=None, JobVMCheckpoint="false")
    until(lambda: daemon.take() or daemon.points.came.is_set() or bool(request.result), 45)
    kernel.rename(site.path("elsewhere"))
    daemon.points.release()
    site.started(request)
    site.stop()
    site.path("elsewhere").rename(kernel)
    site.node("empty", os.mkdir)
    with site.swapping("kernel", "empty"):
        for _ in range(RACES):
            again(site, "the kernel is gone and back")


@attack(Who.USER, Must.SURVIVE, Mode.LIBVIRT, times=RACES)
def description_swapped(site: Site) -> None:
    """Exchange the description and one with a device of the host all the time during START."""
    site.guest()
    site.plant("evil.xml", described(devices=DEVICES[0]).encode())
    site.plant("domain.xml", described().encode())
    with site.swapping("domain.xml", "evil.xml"):
        for _ in range(RACES):
            again(site, "")


test_nothing_comes_of_it = each(__name__)
