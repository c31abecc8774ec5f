"""A whole guest in one boot sector, made without an assembler.

The guest needs no operating system, starts in a tenth of a second under TCG, and proves what a batch
job wants proved: the console (COM1) says that it came up, that it keeps counting, and that it is
done; sector 1 of its own disk holds the last count, so that a disk which comes back can be told from
the one that was sent; and it powers itself off by ACPI. A count that continues after a suspend or a
checkpoint, rather than from 1 again, shows that memory came back and not merely a new boot.

It knows nothing of shutdown requests: pressing its ACPI power button has no effect.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

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


class _Code:
    """Machine code with labels: just enough of an assembler for one sector."""

    def __init__(self) -> None:
        self.code = bytearray()
        self.labels: dict[str, int] = {}
        self.fixups: list[tuple[int, str, str]] = []

    def emit(self, hexadecimal: str) -> None:
        """Append instruction bytes, written in hexadecimal."""
        self.code += bytes.fromhex(hexadecimal)

    def word(self, value: int) -> None:
        self.code += value.to_bytes(2, "little")

    def label(self, name: str) -> None:
        self.labels[name] = len(self.code)

    def text(self, name: str, text: str) -> None:
        """A zero-terminated line of text under a label."""
        self.label(name)
        self.code += text.encode("ascii") + b"\r\n\0"

    def refer(self, hexadecimal: str, name: str, kind: str) -> None:
        """An instruction that ends with a label: `rel8` and `rel16` jump or call, `abs16` is an address."""
        self.emit(hexadecimal)
        self.fixups.append((len(self.code), name, kind))
        self.code += bytes(1 if kind == "rel8" else 2)

    def link(self) -> bytes:
        for at, name, kind in self.fixups:
            target = self.labels[name]
            if kind == "abs16":
                self.code[at : at + 2] = (ORIGIN + target).to_bytes(2, "little")
            else:
                size = 1 if kind == "rel8" else 2
                self.code[at : at + size] = (target - at - size).to_bytes(size, "little", signed=True)
        return bytes(self.code)

    def sector(self) -> bytes:
        """The code as a boot sector."""
        code = self.link()
        if len(code) > SECTOR - 2:
            raise AssertionError("the guest no longer fits its sector")
        return code.ljust(SECTOR - 2, b"\0") + b"\x55\xaa"

    def begin(self) -> None:
        """Segments to zero and a stack below the code."""
        self.emit("FA 31C0 8ED8 8EC0 8ED0 BC")  # cli; xor ax,ax; mov ds,ax; mov es,ax; mov ss,ax; mov sp,
        self.word(ORIGIN)
        self.emit("FB FC")  # sti; cld

    def power_off(self) -> None:
        self.emit("BA")  # mov dx,ACPI_PM1A_CONTROL
        self.word(ACPI_PM1A_CONTROL)
        self.emit("B8")  # mov ax,ACPI_SLEEP_NOW
        self.word(ACPI_SLEEP_NOW)
        self.emit("EF")  # out dx,ax

    def print_routine(self) -> None:
        """print: the zero-terminated text at SI to COM1, each byte once the UART can take it."""
        self.label("print")
        self.emit("AC 84C0")  # lodsb; test al,al
        self.refer("74", "printed", "rel8")  # jz printed
        self.emit("88C4 BA")  # mov ah,al; mov dx,COM1+5, the line status
        self.word(COM1 + 5)
        self.label("full")
        self.emit("EC A820")  # in al,dx; test al,0x20 (transmitter holding register empty)
        self.refer("74", "full", "rel8")  # jz full
        self.emit("88E0 BA")  # mov al,ah; mov dx,COM1
        self.word(COM1)
        self.emit("EE")  # out dx,al
        self.refer("EB", "print", "rel8")  # jmp print
        self.label("printed")
        self.emit("C3")  # ret


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
    c = _Code()
    c.begin()
    # The BIOS passes the boot drive in DL.
    c.refer("8816", "drive", "abs16")  # mov [drive],dl
    # An empty record: whatever lies there would end up in sector 1.
    c.emit("BF")  # mov di,RECORD
    c.word(RECORD)
    c.emit("B90001 F3AB")  # mov cx,256; rep stosw
    c.emit("31ED")  # xor bp,bp: BP is the count
    c.refer("BE", "banner", "abs16")  # mov si,banner
    c.refer("E8", "print", "rel16")  # call print
    c.emit("8B1E")  # mov bx,[BIOS_TICKS]: BX is when the last count was
    c.word(BIOS_TICKS)

    c.label("wait")
    c.emit("90" if busy else "F4")  # nop, or hlt until the next interrupt
    c.emit("A1")  # mov ax,[BIOS_TICKS]
    c.word(BIOS_TICKS)
    c.emit("89C2 29DA 83FA")  # mov dx,ax; sub dx,bx; cmp dx,
    c.emit(f"{ticks:02X}")
    c.refer("72", "wait", "rel8")  # jb wait
    c.emit("89C3 45")  # mov bx,ax; inc bp

    # The count in decimal to the record: digits come out last first, so they go over the stack.
    c.emit("89E8 B90A00 31FF")  # mov ax,bp; mov cx,10; xor di,di: DI is the number of digits
    c.label("divide")
    c.emit("31D2 F7F1 52 47 85C0")  # xor dx,dx; div cx; push dx; inc di; test ax,ax
    c.refer("75", "divide", "rel8")  # jnz divide
    c.emit("89F9 BF")  # mov cx,di; mov di,RECORD
    c.word(RECORD)
    c.label("digit")
    c.emit("58 0430 AA")  # pop ax; add al,'0'; stosb
    c.refer("E2", "digit", "rel8")  # loop digit
    c.emit("B80D0A AB 31C0 AA")  # mov ax,0x0A0D (CR LF); stosw; xor ax,ax; stosb
    # To the disk first, so that a count which was seen on the console is in sector 1.
    c.refer("BE", "packet", "abs16")  # mov si,packet
    c.refer("8A16", "drive", "abs16")  # mov dl,[drive]
    c.emit("B80043 CD13")  # mov ax,0x4300; int 0x13: extended write without verify
    c.refer("73", "written", "rel8")  # jnc written
    c.refer("BE", "write_failed", "abs16")  # mov si,write_failed
    c.refer("E8", "print", "rel16")  # call print
    c.label("written")
    c.emit("BE")  # mov si,RECORD
    c.word(RECORD)
    c.refer("E8", "print", "rel16")  # call print
    if seconds is not None:
        c.emit("81FD")  # cmp bp,seconds
        c.word(seconds)
        c.refer("72", "wait", "rel8")  # jb wait
        c.refer("BE", "done", "abs16")  # mov si,done
        c.refer("E8", "print", "rel16")  # call print
        if last_words:
            c.refer("BE", "last_words", "abs16")  # mov si,last_words
            c.refer("E8", "print", "rel16")  # call print
        if power_off:
            c.power_off()
        c.label("halt")
        c.emit("F4")  # hlt
        c.refer("EB", "halt", "rel8")  # jmp halt
    else:
        c.refer("EB", "wait", "rel8")  # jmp wait

    c.print_routine()
    c.label("drive")
    c.emit("80")
    # The disk address packet of the extended write: 16 bytes, one sector, from 0000:RECORD, to LBA 1.
    c.label("packet")
    c.emit("1000 0100")
    c.word(RECORD)
    c.emit("0000 0100000000000000")
    c.text("banner", BANNER)
    c.text("done", DONE)
    c.text("write_failed", WRITE_FAILED)
    c.text("last_words", last_words)

    return c.sector()


def copying_sector(drive: int, sector: int, to_drive: int) -> bytes:
    """A guest that prints a sector of another drive, which must be text, and writes it to a third drive's sector 1.

    Drives are numbered as the BIOS has them: disks from 0x80 in the order of the domain, and with SeaBIOS CD-ROMs
    from 0xE0, whose sectors have 2048 bytes. Then it powers off.
    """
    c = _Code()
    c.begin()
    c.refer("BE", "banner", "abs16")  # mov si,banner
    c.refer("E8", "print", "rel16")  # call print
    for name, function, number in (("read", 0x42, drive), ("write", 0x43, to_drive)):
        c.refer("BE", name, "abs16")  # mov si,name
        c.emit(f"B2{number:02X} B800{function:02X} CD13")  # mov dl,number; mov ax,function << 8; int 0x13
        c.refer("BE", "failed", "abs16")  # mov si,failed
        c.refer("72", "say", "rel8")  # jc say
    c.emit("BE")  # mov si,RECORD
    c.word(RECORD)
    c.refer("E8", "print", "rel16")  # call print
    c.refer("BE", "done", "abs16")  # mov si,done
    c.label("say")
    c.refer("E8", "print", "rel16")  # call print
    c.power_off()
    c.label("halt")
    c.emit("F4")  # hlt
    c.refer("EB", "halt", "rel8")  # jmp halt
    c.print_routine()
    for name, place in (("read", sector), ("write", 1)):
        c.label(name)
        c.emit("1000 0100")
        c.word(RECORD)
        c.emit("0000")
        c.code += place.to_bytes(8, "little")
    c.text("banner", BANNER)
    c.text("done", DONE)
    c.text("failed", WRITE_FAILED)
    return c.sector()


def growing_sector(mib: int, after: int = 1) -> bytes:
    """A guest that has so many MiB of its disk occupied, by a sector of each 4 KiB, from the MiB `after` on; then it
    halts for good."""
    c = _Code()
    c.begin()
    # The BIOS passes the boot drive in DL.
    c.refer("8816", "drive", "abs16")  # mov [drive],dl
    c.refer("BE", "banner", "abs16")  # mov si,banner
    c.refer("E8", "print", "rel16")  # call print
    c.label("grow")
    c.refer("BE", "packet", "abs16")  # mov si,packet
    c.refer("8A16", "drive", "abs16")  # mov dl,[drive]
    c.emit("B80043 CD13")  # mov ax,0x4300; int 0x13: extended write without verify
    c.refer("BE", "failed", "abs16")  # mov si,failed
    c.refer("72", "say", "rel8")  # jc say
    c.refer("668306", "sector", "abs16")  # add dword [sector],
    c.emit("08")
    c.refer("66813E", "sector", "abs16")  # cmp dword [sector],
    c.code += ((after + mib) << 11).to_bytes(4, "little")
    c.refer("72", "grow", "rel8")  # jb grow
    c.refer("BE", "done", "abs16")  # mov si,done
    c.label("say")
    c.refer("E8", "print", "rel16")  # call print
    c.label("halt")
    c.emit("F4")  # hlt
    c.refer("EB", "halt", "rel8")  # jmp halt
    c.print_routine()
    c.label("drive")
    c.emit("80")
    # The disk address packet: one sector, from 1000:0000.
    c.label("packet")
    c.emit("1000 0100 0000 0010")
    c.label("sector")
    c.code += (after << 11).to_bytes(8, "little")
    c.text("banner", BANNER)
    c.text("done", DONE)
    c.text("failed", WRITE_FAILED)
    return c.sector()


def panicking_sector() -> bytes:
    """A guest that says by the panic device of a PC, QEMU's pvpanic, that its kernel has panicked, and spins on."""
    c = _Code()
    c.begin()
    c.refer("BE", "banner", "abs16")  # mov si,banner
    c.refer("E8", "print", "rel16")  # call print
    c.emit("BA")  # mov dx,PVPANIC
    c.word(PVPANIC)
    c.emit("B001 EE")  # mov al,1; out dx,al
    c.label("spin")
    c.refer("EB", "spin", "rel8")  # jmp spin
    c.print_routine()
    c.text("banner", BANNER)
    return c.sector()


def filling_sector(mib: int) -> bytes:
    """A guest that fills all below the middle of its memory with numbers of no pattern and then halts for good.

    Its record in sector 1 of its disk says 1 when that is done. It stays silent then, and so does its clock.
    """
    c = _Code()
    c.begin()
    # The BIOS passes the boot drive in DL.
    c.refer("8816", "drive", "abs16")  # mov [drive],dl
    c.emit("FA")  # cli
    c.refer("0F0116", "table", "abs16")  # lgdt [table]
    # A segment that was loaded in protected mode keeps its limit of 4 GiB in real mode.
    c.emit("0F20C0 0C01 0F22C0")  # mov eax,cr0; or al,1; mov cr0,eax
    c.emit("BB0800 8EC3")  # mov bx,8; mov es,bx
    c.emit("24FE 0F22C0")  # and al,0xFE; mov cr0,eax
    c.emit("31DB 8EC3")  # xor bx,bx; mov es,bx
    c.emit("66BF 00001000")  # mov edi,0x100000
    c.label("fill")
    c.emit("6669C0 0D661900 6605 5FF36E3C")  # imul eax,eax,1664525; add eax,1013904223
    c.emit("2667668907 6683C704")  # mov es:[edi],eax; add edi,4
    c.emit("6681FF")  # cmp edi,
    c.code += (mib << 19).to_bytes(4, "little")
    c.refer("72", "fill", "rel8")  # jb fill
    c.emit("FB BF")  # sti; mov di,RECORD
    c.word(RECORD)
    c.emit("B90001 31C0 F3AB C606")  # mov cx,256; xor ax,ax; rep stosw; mov byte [RECORD],
    c.word(RECORD)
    c.emit("31")  # '1'
    c.refer("BE", "packet", "abs16")  # mov si,packet
    c.refer("8A16", "drive", "abs16")  # mov dl,[drive]
    c.emit("B80043 CD13 FA F4")  # mov ax,0x4300; int 0x13: extended write without verify; cli; hlt
    c.label("drive")
    c.emit("80")
    # The disk address packet of the extended write, and a table of one segment: data, from 0, of 4 GiB.
    c.label("packet")
    c.emit("1000 0100")
    c.word(RECORD)
    c.emit("0000 0100000000000000")
    c.label("table")
    c.refer("0F00", "segments", "abs16")
    c.emit("0000")
    c.label("segments")
    c.emit("0000000000000000 FFFF00000092CF00")
    return c.sector()


def make_guest(
    path: str | Path,
    seconds: int | None = 3,
    size: int = 1 << 20,
    format: str = "raw",
    power_off: bool = True,
    busy: bool = False,
    last_words: str = "",
    ticks: int = TICKS_PER_COUNT,
) -> Path:
    """Write a bootable disk of `size` bytes with the guest in its first sector."""
    path = Path(path)
    raw = path if format == "raw" else path.with_name(path.name + ".raw")
    with open(raw, "wb") as disk:
        disk.write(boot_sector(seconds, power_off, busy, last_words, ticks))
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
    record = start[SECTOR:].split(b"\r\n", 1)[0].strip(b"\0")
    return int(record or b"0")


def counts(console: str | bytes) -> list[int]:
    """The numbers that the guest printed, in their order: whole lines only."""
    text = console.decode("ascii", "replace") if isinstance(console, bytes) else console
    return [int(number) for number in re.findall(r"^(\d+)\r?\n", text, re.MULTILINE)]
