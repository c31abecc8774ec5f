"""A whole guest in one boot sector, made without an assembler.

The guest needs no operating system, starts in a tenth of a second under TCG, and proves what a batch
job wants proved: the console (COM1) says that it came up, that it keeps counting, and that it is
done; sector 1 of its own disk holds the last count, so that a disk which comes back can be told from
the one that was sent; and it powers itself off by ACPI. A count that continues after a suspend or a
checkpoint, rather than from 1 again, shows that memory came back and not merely a new boot.

It knows nothing of shutdown requests: pressing its ACPI power button has no effect.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

SECTOR = 512
ORIGIN = 0x7C00
"""Where the BIOS loads a boot sector."""
RECORD = 0x7E00
"""Where the guest keeps the sector that it prints and writes: its count in decimal, CR, LF, NUL."""

COM1 = 0x3F8
BIOS_TICKS = 0x046C
"""The BIOS data area's tick counter, 18.2 a second."""
TICKS_PER_COUNT = 18
ACPI_PM1A_CONTROL = 0x604
"""Where SeaBIOS puts it, on QEMU's pc and q35 alike."""
ACPI_SLEEP_NOW = 0x2000
"""SLP_EN with sleep type 0, which is S5 (soft off) there."""

PVPANIC = 0x505
"""The port of pvpanic on the ISA bus; its bit 0 is a panic (QEMU's docs/specs/pvpanic)."""

BANNER = "vmgahp guest up"
DONE = "vmgahp guest done"
WRITE_FAILED = "vmgahp guest cannot write its disk"


class Code:
    """Machine code with labels: just enough of an assembler for one sector."""

    def __init__(self, drive: bool = True) -> None:
        """Begin with segments of zero and a stack below the code; `drive` keeps the boot drive, which is in DL."""
        self.code = bytearray()
        self.labels: dict[str, int] = {}
        self.fixups: list[tuple[int, str, str]] = []
        # cli; xor ax,ax; mov ds,ax; mov es,ax; mov ss,ax; mov sp,
        self.emit("FA 31C0 8ED8 8EC0 8ED0 BC", ORIGIN)
        self.emit("FB FC")  # sti; cld
        if drive:
            self.refer("8816", "drive", "abs16")  # mov [drive],dl

    def emit(self, hexadecimal: str, word: int | None = None) -> None:
        """Append instruction bytes, written in hexadecimal, and a word."""
        self.code += bytes.fromhex(hexadecimal)
        if word is not None:
            self.code += word.to_bytes(2, "little")

    def label(self, name: str) -> None:
        self.labels[name] = len(self.code)

    def refer(self, hexadecimal: str, name: str, kind: str = "rel8") -> None:
        """An instruction that ends with a label: `rel8` and `rel16` jump or call, `abs16` is an address."""
        self.emit(hexadecimal)
        self.fixups.append((len(self.code), name, kind))
        self.code += bytes(1 if kind == "rel8" else 2)

    def say(self, name: str = "") -> None:
        """Print the text of a label, or the one at SI."""
        if name:
            self.refer("BE", name, "abs16")  # mov si,name
        self.refer("E8", "print", "rel16")  # call print

    def print_record(self) -> None:
        self.emit("BE", RECORD)  # mov si,RECORD
        self.say()

    def write_sector(self) -> None:
        """Do what `packet` says, to the boot drive."""
        self.refer("BE", "packet", "abs16")  # mov si,packet
        self.refer("8A16", "drive", "abs16")  # mov dl,[drive]
        self.emit("B80043 CD13")  # mov ax,0x4300; int 0x13: extended write without verify

    def power_off(self) -> None:
        self.emit("BA", ACPI_PM1A_CONTROL)  # mov dx,ACPI_PM1A_CONTROL
        self.emit("B8", ACPI_SLEEP_NOW)  # mov ax,ACPI_SLEEP_NOW
        self.emit("EF")  # out dx,ax

    def halt(self) -> None:
        self.label("halt")
        self.emit("F4")  # hlt
        self.refer("EB", "halt")  # jmp halt

    def print_routine(self) -> None:
        """print: the zero-terminated text at SI to COM1, each byte once the UART can take it."""
        self.label("print")
        self.emit("AC 84C0")  # lodsb; test al,al
        self.refer("74", "printed")  # jz printed
        self.emit("88C4 BA", COM1 + 5)  # mov ah,al; mov dx,COM1+5, the line status
        self.label("full")
        self.emit("EC A820")  # in al,dx; test al,0x20 (transmitter holding register empty)
        self.refer("74", "full")  # jz full
        self.emit("88E0 BA", COM1)  # mov al,ah; mov dx,COM1
        self.emit("EE")  # out dx,al
        self.refer("EB", "print")  # jmp print
        self.label("printed")
        self.emit("C3")  # ret

    def packet(self, sector: int, name: str = "packet", offset: int = RECORD, segment: int = 0) -> None:
        """The disk address packet of an extended read or write: 16 bytes, one sector."""
        self.label(name)
        self.emit("1000 0100", offset)
        self.emit("", segment)
        self.label("sector")
        self.code += sector.to_bytes(8, "little")

    def drive(self) -> None:
        self.label("drive")
        self.emit("80")

    def sector(self, **texts: str) -> bytes:
        """The code as a boot sector, with zero-terminated lines of text under their labels."""
        for name, text in texts.items():
            self.label(name)
            self.code += text.encode("ascii") + b"\r\n\0"
        for at, name, kind in self.fixups:
            target = self.labels[name]
            if kind == "abs16":
                self.code[at : at + 2] = (ORIGIN + target).to_bytes(2, "little")
            else:
                size = 1 if kind == "rel8" else 2
                self.code[at : at + size] = (target - at - size).to_bytes(size, "little", signed=True)
        if len(self.code) > SECTOR - 2:
            raise AssertionError("the guest no longer fits its sector")
        return bytes(self.code).ljust(SECTOR - 2, b"\0") + b"\x55\xaa"


def boot_sector(
    seconds: int | None = 3,
    power_off: bool = True,
    busy: bool = False,
    last_words: str = "",
    ticks: int = TICKS_PER_COUNT,
) -> bytes:
    """The guest's boot sector: 512 bytes of 16-bit code for the BIOS.

    It counts about once a second, or every so many `ticks` of the BIOS, up to `seconds` or for ever (None), and then
    powers off, or with `power_off` false halts for good; `last_words` are a line that it prints before that. Between
    two counts it sleeps, or with `busy` spins, which gives CPUUTILIZATION something to see.
    """
    if seconds is not None and not 1 <= seconds <= 0xFFFF:
        raise ValueError("the guest counts in 16 bits: seconds must be 1 to 65535, or None for ever")
    c = Code()
    # An empty record: whatever lies there would end up in sector 1.
    c.emit("BF", RECORD)  # mov di,RECORD
    c.emit("B90001 F3AB")  # mov cx,256; rep stosw
    c.emit("31ED")  # xor bp,bp: BP is the count
    c.say("banner")
    c.emit("8B1E", BIOS_TICKS)  # mov bx,[BIOS_TICKS]: BX is when the last count was

    c.label("wait")
    c.emit("90" if busy else "F4")  # nop, or hlt until the next interrupt
    c.emit("A1", BIOS_TICKS)  # mov ax,[BIOS_TICKS]
    c.emit(f"89C2 29DA 83FA {ticks:02X}")  # mov dx,ax; sub dx,bx; cmp dx,ticks
    c.refer("72", "wait")  # jb wait
    c.emit("89C3 45")  # mov bx,ax; inc bp

    # The count in decimal to the record: digits come out last first, so they go over the stack.
    c.emit("89E8 B90A00 31FF")  # mov ax,bp; mov cx,10; xor di,di: DI is the number of digits
    c.label("divide")
    c.emit("31D2 F7F1 52 47 85C0")  # xor dx,dx; div cx; push dx; inc di; test ax,ax
    c.refer("75", "divide")  # jnz divide
    c.emit("89F9 BF", RECORD)  # mov cx,di; mov di,RECORD
    c.label("digit")
    c.emit("58 0430 AA")  # pop ax; add al,'0'; stosb
    c.refer("E2", "digit")  # loop digit
    c.emit("B80D0A AB 31C0 AA")  # mov ax,0x0A0D (CR LF); stosw; xor ax,ax; stosb
    # To the disk first, so that a count which was seen on the console is in sector 1.
    c.write_sector()
    c.refer("73", "written")  # jnc written
    c.say("write_failed")
    c.label("written")
    c.print_record()
    if seconds is not None:
        c.emit("81FD", seconds)  # cmp bp,seconds
        c.refer("72", "wait")  # jb wait
        c.say("done")
        if last_words:
            c.say("last_words")
        if power_off:
            c.power_off()
        c.halt()
    else:
        c.refer("EB", "wait")  # jmp wait
    c.print_routine()
    c.drive()
    c.packet(sector=1)
    return c.sector(banner=BANNER, done=DONE, write_failed=WRITE_FAILED, last_words=last_words)


def copying_sector(drive: int, sector: int, to_drive: int) -> bytes:
    """A guest that prints a sector of another drive, which must be text, and writes it to a third drive's sector 1.

    Drives are numbered as the BIOS has them: disks from 0x80 in the order of the domain, and with SeaBIOS CD-ROMs
    from 0xE0, whose sectors have 2048 bytes. Then it powers off.
    """
    c = Code(drive=False)
    c.say("banner")
    for name, function, number in (("read", 0x42, drive), ("write", 0x43, to_drive)):
        c.refer("BE", name, "abs16")  # mov si,name
        c.emit(f"B2{number:02X} B800{function:02X} CD13")  # mov dl,number; mov ax,function << 8; int 0x13
        c.refer("BE", "failed", "abs16")  # mov si,failed
        c.refer("72", "say")  # jc say
    c.print_record()
    c.refer("BE", "done", "abs16")  # mov si,done
    c.label("say")
    c.say()
    c.power_off()
    c.halt()
    c.print_routine()
    c.packet(sector, "read")
    c.packet(1, "write")
    return c.sector(banner=BANNER, done=DONE, failed=WRITE_FAILED)


def growing_sector(mib: int) -> bytes:
    """A guest that has so many MiB of its disk occupied, by a sector of each 4 KiB, from 1 MiB on; then it halts."""
    c = Code()
    c.say("banner")
    c.label("grow")
    c.write_sector()
    c.refer("BE", "failed", "abs16")  # mov si,failed
    c.refer("72", "say")  # jc say
    c.refer("668306", "sector", "abs16")  # add dword [sector],
    c.emit("08")
    c.refer("66813E", "sector", "abs16")  # cmp dword [sector],
    c.code += ((1 + mib) << 11).to_bytes(4, "little")
    c.refer("72", "grow")  # jb grow
    c.refer("BE", "done", "abs16")  # mov si,done
    c.label("say")
    c.say()
    c.halt()
    c.print_routine()
    c.drive()
    c.packet(1 << 11, offset=0, segment=0x1000)
    return c.sector(banner=BANNER, done=DONE, failed=WRITE_FAILED)


def panicking_sector() -> bytes:
    """A guest that says by the panic device of a PC, QEMU's pvpanic, that its kernel has panicked, and spins on."""
    c = Code(drive=False)
    c.say("banner")
    c.emit("BA", PVPANIC)  # mov dx,PVPANIC
    c.emit("B001 EE")  # mov al,1; out dx,al
    c.label("spin")
    c.refer("EB", "spin")  # jmp spin
    c.print_routine()
    return c.sector(banner=BANNER)


def make_guest(
    path: str | Path, seconds: int | None = 3, size: int = 1 << 20, format: str = "raw", **more: Any
) -> Path:
    """Write a bootable disk of `size` bytes with the guest in its first sector; `more` is for `boot_sector`."""
    path = Path(path)
    raw = path if format == "raw" else path.with_name(path.name + ".raw")
    with open(raw, "wb") as disk:
        disk.write(boot_sector(seconds, **more))
        disk.truncate(size)
    if format != "raw":
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", format, raw, path], check=True)
        raw.unlink()
    return path


def read_count(path: str | Path) -> int:
    """The count that the guest left in sector 1 of its disk (raw or qcow2); 0 where it never ran."""
    path = Path(path)
    with open(path, "rb") as disk:
        start = disk.read(2 * SECTOR)
    if start.startswith(b"QFI\xfb"):
        command = ["qemu-img", "dd", "-U", "-f", "qcow2", "-O", "raw", "bs=512", "count=2"]
        sectors = path.with_name(path.name + ".sectors")
        try:
            subprocess.run([*command, f"if={path}", f"of={sectors}"], check=True)
            start = sectors.read_bytes()
        finally:
            sectors.unlink(missing_ok=True)
    return int(start[SECTOR:].split(b"\r\n", 1)[0].strip(b"\0") or b"0")


def counts(console: str | bytes) -> list[int]:
    """The numbers that the guest printed, in their order: whole lines only."""
    text = console.decode("ascii", "replace") if isinstance(console, bytes) else console
    return [int(number) for number in re.findall(r"^(\d+)\r?\n", text, re.MULTILINE)]
