"""A cloud-init image made from Debian's packages, which boots by BIOS and by UEFI.

mmdebstrap installs the packages into a directory and writes it as an archive; e2fsprogs makes the file system from
that, mtools that for UEFI, and GRUB's images are put where the firmware looks for them. All of it works on a plain
file: nothing is mounted, and no device is used.
"""

import argparse
import io
import os
import shlex
import shutil
import signal
import tarfile
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress

from vmgahp.commands.arguments import NotDone
from vmgahp.commands.image import SUITES, say
from vmgahp.commands.image.fetch import open_local
from vmgahp.host import trust
from vmgahp.host.guardian import SAFE_PATH
from vmgahp.host.run import INTERRUPTING, plain_environment, run, which
from vmgahp.images import qemu_img

PACKAGES = (
    *("linux-image-cloud-amd64", "initramfs-tools", "zstd", "systemd-sysv", "systemd-resolved", "udev", "dbus", "kmod"),
    *("cloud-init", "cloud-guest-utils", "fdisk", "e2fsprogs", "iproute2", "netbase", "procps", "passwd", "login"),
    *("sudo", "ca-certificates"),
)

PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "sfdisk": "fdisk",
    "mformat": "mtools",
    "mcopy": "mtools",
    "mmd": "mtools",
    "mke2fs": "e2fsprogs",
    "grub-mkimage": "grub-common",
    "qemu-img": "qemu-utils",
    "unshare": "util-linux",
    "tar": "tar",
}
"""The programs that are needed, each with its Debian package."""
FILES = {
    "/usr/lib/grub/i386-pc/diskboot.img": "grub-pc-bin",
    "/usr/lib/grub/x86_64-efi/linux.mod": "grub-efi-amd64-bin",
}

INSTALL, PACK, SHORT = 3600.0, 900.0, 120.0
"""The deadlines in seconds: for installing the packages, for making a file system, for other programs."""

_SECTOR = 512
_BIOS, _ESP, _ROOT = 2048, 4096, 36864
"""The first sectors of the partitions: GRUB for the BIOS, that of UEFI, and the file system."""

_MODULES = ("part_gpt", "ext2", "linux", "normal", "search_fs_uuid", "configfile", "echo", "test", "serial", "terminal")

_FILES_OF_OURS = {
    "etc/hostname": "debian\n",
    "etc/default/locale": "LANG=C.UTF-8\n",
    "etc/cloud/cloud.cfg.d/90_vmgahp.cfg": (
        "datasource_list: [NoCloud, None]\nsystem_info:\n  network:\n    renderers: [networkd]\n"
    ),
    # Without a network card, do not wait for a network.
    "etc/systemd/system/systemd-networkd-wait-online.service.d/vmgahp.conf": (
        "[Service]\n"
        "ExecCondition=/bin/sh -c 'for card in /sys/class/net/*/device; do [ ! -e $$card ] || exit 0; done; exit 1'\n"
        "ExecStart=\nExecStart=/lib/systemd/systemd-networkd-wait-online --any --timeout=60\n"
    ),
}
_ENABLE = "systemctl enable systemd-networkd.service systemd-resolved.service serial-getty@ttyS0.service"
_DISABLE = (
    "systemctl disable apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer dpkg-db-backup.timer"
)

# Only root can write and remove files of other users; it may be the root of a user namespace.
_UNPACK = """\
mkdir root && tar -x --numeric-owner --xattrs --xattrs-include=security.capability --exclude='./dev/*' \\
    -f root.tar -C root && rm -f root/etc/ssh/ssh_host_* &&
exec mke2fs -q -F -t ext4 -U "$1" -L vmgahp-root -E "offset=$2,lazy_itable_init=1" -d root disk.raw "$3"
"""


def build(options: argparse.Namespace) -> None:
    """Build the image, and put it in place atomically. Raises `NotDone`, OSError."""
    output = os.path.abspath(options.output or f"{options.name}.qcow2")
    if os.path.lexists(output) and not options.force:
        raise NotDone(f"{output} is there already; give --force, or another file by -o.")
    above = os.path.dirname(output)
    if os.geteuid() == 0 and (trouble := trust.trouble_with_directory(above)):
        where = f"{output} is reached by {trouble}"
        raise NotDone(f"{where}: what root writes there could be led elsewhere. Say another place by -o.")
    _require_programs()
    directory = tempfile.mkdtemp(dir=above, prefix=".vmgahp-image-")
    directories = [directory]
    try:
        # For mmdebstrap, which without root enters it as another user than the caller.
        directories.append(tempfile.mkdtemp(prefix="vmgahp-image-"))
        os.chmod(directories[1], 0o711)  # noqa: S103 - it may pass through, but not list it
        _Build(options, directory, directories[1]).make()
        finished = os.path.join(directory, "image.qcow2")
        os.chmod(finished, 0o644)
        with open(finished, "rb") as file:
            os.fsync(file.fileno())
        if options.force:
            os.replace(finished, output)
        else:
            os.link(finished, output)
    except FileExistsError as error:
        raise NotDone(f"{output} came to be there meanwhile; it stays as it is.") from error
    except OSError as error:
        raise NotDone(f"{error.filename or output}: {error.strerror}.") from error
    finally:
        # These are gigabytes: an interrupt must wait until the clean-up after a failure has finished.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTING)
        for made in directories:
            _discard(made)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    say(f"{output} is made")


def _require_programs() -> None:
    missing = {package for program, package in PROGRAMS.items() if which(program) is None}
    missing |= {package for path, package in FILES.items() if not os.path.exists(path)}
    if os.geteuid() != 0 and which("newuidmap") is None:
        missing.add("uidmap")
    if missing:
        raise NotDone(f"this needs Debian packages that are not installed: apt-get install {' '.join(sorted(missing))}")


def _as_some_root(words: Sequence[str]) -> list[str]:
    """Return a command that runs as root, or as root of a user namespace with no rights over files of other users."""
    return [*words] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--map-auto", *words]


def _discard(directory: str) -> None:
    if os.geteuid() != 0:
        with suppress(OSError):
            run(_as_some_root(["rm", "-rf", "--one-file-system", "--", directory]), deadline=PACK)
    shutil.rmtree(directory, ignore_errors=True)


class _Build:
    """One image in the making, with a directory of its own, and one for mmdebstrap."""

    def __init__(self, options: argparse.Namespace, directory: str, temporary: str) -> None:
        self.image, self.directory, self.temporary = options, directory, temporary
        self.root = str(uuid.uuid4())
        """The UUID of the guest's file system."""

    def make(self) -> None:
        say(f"installing Debian's packages ({SUITES[self.image.name]}), which takes minutes")
        self._install()
        say("making the disk")
        self._partitions()
        self._file_system()
        self._bios()
        self._uefi()
        try:
            qemu_img.convert(self._at("disk.raw"), "raw", self._at("image.qcow2"), "qcow2", seconds=PACK)
        except qemu_img.Trouble as trouble:
            raise NotDone(f"qemu-img convert: {trouble}") from trouble

    def _at(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _run(self, words: Sequence[str], seconds: float, stdin: bytes = b"") -> None:
        proxies = ("http_proxy", "https_proxy", "no_proxy")  # through which the mirror is reached
        environ = plain_environment() | {"TMPDIR": self.temporary}
        environ |= {name: value for name, value in os.environ.items() if name.lower() in proxies}
        done = run(words, deadline=seconds, stdin=stdin, environ=environ, umask=0o022, directory=self.directory)
        if done.status is None:
            raise NotDone(f"{words[0]} had not ended after {seconds:g} s.")
        if done.status != 0:
            program = next(word for word in words if word in PROGRAMS and word != "unshare")
            raise NotDone(f"{program} ended with {done.status}: {' / '.join(done.complaints[-6:])[-2000:]}")

    def _install(self) -> None:
        self._write_ours()
        words = ["mmdebstrap", "--mode=auto", "--variant=minbase", "--format=tar", "--architectures=amd64", "--quiet"]
        words += ['--aptopt=Apt::Install-Recommends "false"']
        words += [f"--dpkgopt=path-exclude=/usr/share/{left_out}/*" for left_out in ("man", "locale", "doc", "info")]
        words += ["--dpkgopt=path-include=/usr/share/doc/*/copyright"]
        words += [f"--include={','.join((*PACKAGES, *self.image.packages))}", "--customize-hook=tar-in ours.tar /"]
        for command in (_ENABLE, f"{_DISABLE} || true", *self.image.commands):
            # mmdebstrap passes the text of a hook to a shell, with the path of the tree as the argument.
            run_it = f'exec chroot "$1" /usr/bin/env PATH={SAFE_PATH} /bin/sh -c {shlex.quote(command)}'
            words.append(f"--customize-hook={run_it}")
        words += [SUITES[self.image.name], "root.tar", *([self.image.mirror] if self.image.mirror else [])]
        if os.geteuid() == 0:
            # Its mounts vanish with its processes, however they end.
            words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *words]
        self._run(words, INSTALL)

    def _write_ours(self) -> None:
        with tarfile.open(self._at("ours.tar"), "w", format=tarfile.PAX_FORMAT) as archive:
            fstab = f"UUID={self.root} / ext4 errors=remount-ro,noatime 0 1\n"
            menu = (
                "set timeout=0\nserial --unit=0 --speed=115200\nterminal_output console serial\n"
                f"linux /vmlinuz root=UUID={self.root} ro console=tty0 console=ttyS0,115200\n"
                "initrd /initrd.img\nboot\n"
            )
            for name, text in (_FILES_OF_OURS | {"etc/fstab": fstab, "boot/grub/grub.cfg": menu}).items():
                about = tarfile.TarInfo(name)
                about.size, about.mode = len(text), 0o644
                archive.addfile(about, io.BytesIO(text.encode()))
            link = tarfile.TarInfo("etc/resolv.conf")
            link.type, link.linkname = tarfile.SYMTYPE, "../run/systemd/resolve/stub-resolv.conf"
            archive.addfile(link)
            for source, name in self.image.copy:
                with open_local(os.path.abspath(source)) as file:
                    about = archive.gettarinfo(arcname=name, fileobj=file)
                    about.uid = about.gid = 0
                    about.uname = about.gname = ""
                    archive.addfile(about, file)

    def _partitions(self) -> None:
        with open(self._at("disk.raw"), "xb") as file:
            file.truncate(self.image.size)
        table = (
            "label: gpt\n"
            f"start={_BIOS}, size={_ESP - _BIOS}, type=21686148-6449-6E6F-744E-656564454649\n"
            f"start={_ESP}, size={_ROOT - _ESP}, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B\n"
            f"start={_ROOT}, type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709\n"
        )
        self._run(["sfdisk", "--quiet", "--no-reread", "--no-tell-kernel", "disk.raw"], SHORT, table.encode())

    def _file_system(self) -> None:
        # The last MiB has the backup of the partition table.
        kib = (self.image.size - _ROOT * _SECTOR - (1 << 20)) >> 10
        words = ["/bin/sh", "-c", _UNPACK, "mke2fs", self.root, str(_ROOT * _SECTOR), f"{kib}k"]
        self._run(_as_some_root(words), PACK)

    def _grub(self, kind: str, to: str, modules: Sequence[str]) -> None:
        """Make GRUB's core image, which finds the guest's file system and continues with the files there."""
        with open(self._at("early.cfg"), "w") as file:
            file.write(f"search.fs_uuid {self.root} root\nset prefix=($root)/boot/grub\n")
        words = ["grub-mkimage", "-O", kind, "-c", "early.cfg", "-p", "/boot/grub", "-o", to, *_MODULES, *modules]
        self._run(words, SHORT)

    def _bios(self) -> None:
        self._grub("i386-pc", "core.img", ("biosdisk",))
        with open("/usr/lib/grub/i386-pc/boot.img", "rb") as file:
            boot = bytearray(file.read(_SECTOR))
        with open(self._at("core.img"), "rb") as file:
            core = bytearray(file.read())
        if len(core) > (_ESP - _BIOS) * _SECTOR:
            raise NotDone(f"GRUB's image for the BIOS has {len(core)} bytes, which is more than there is room for.")
        # The first sector has the address of the second, and that one of the rest (GRUB's include/grub/i386/pc/boot.h).
        boot[0x5C:0x64] = _BIOS.to_bytes(8, "little")
        core[0x1F4:0x1FC] = (_BIOS + 1).to_bytes(8, "little")
        with open(self._at("disk.raw"), "r+b") as disk:
            disk.write(boot[:440])  # the rest of the sector is the partition table for a BIOS
            disk.seek(_BIOS * _SECTOR)
            disk.write(core)

    def _uefi(self) -> None:
        self._grub("x86_64-efi", "bootx64.efi", ("fat", "all_video"))
        place = f"disk.raw@@{_ESP * _SECTOR}"
        # The geometry of a disk with 512 bytes in a sector; tracks are not used, but mtools requires some.
        self._run(["mformat", "-i", place, "-T", str(_ROOT - _ESP), "-h", "16", "-s", "32", "-v", "ESP", "::"], SHORT)
        self._run(["mmd", "-i", place, "::/EFI", "::/EFI/BOOT"], SHORT)
        self._run(["mcopy", "-i", place, "bootx64.efi", "::/EFI/BOOT/BOOTX64.EFI"], SHORT)
