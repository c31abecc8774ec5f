"""A check that KVM works on this machine, by a guest that is run.

An open ``/dev/kvm`` proves nothing: under some outer hypervisors it opens, a boot sector runs,
but a guest in 64-bit mode runs a thousand times slower than the hardware and slower than plain
emulation, so that a Linux kernel never boots. So `check` runs a guest: a vCPU in 64-bit mode that
counts a register down and halts, with the ioctls of the kernel's ``Documentation/virt/kvm/api.rst`` and
without QEMU. It runs in a process of its own, because a vCPU that hangs can only be killed.

On x86_64 the guest is run and timed. On other architectures the check ends with the steps common to all:
the device opens, has the expected version of the interface, and makes a VM and a vCPU.

This file is also the program of that process, run by its path with ``-I -S``, where no other module of ours is found.
"""

from __future__ import annotations

import os

DEVICE = "/dev/kvm"

TURNS = 1_000_000
"""The number of turns of the guest's loop."""

FAST_ENOUGH = 0.05
"""The seconds within which the loop must end. Hardware needs about 0.001; defective KVM that was measured needs
more than 1; the factor of fifty is for a machine that is busy or old."""

TRIES = 3
HOPELESS = 10 * FAST_ENOUGH
"""The seconds after which a slow loop is not run again. Otherwise a slow one is, and the best time counts, because
another process may have used the CPU; but that does not explain so long a time."""

DEADLINE = 10.0
"""The timeout of the whole check in seconds: only a very busy machine needs more than one, or a vCPU that hangs."""

BUDGET = 2 * FAST_ENOUGH
"""The seconds of CPU time after which a guest that has not ended is given up: hardware would have ended the loop a
hundred times, however busy the machine is."""

RAN = "ran"
SPENT = "spent"
FAILED = "failed"
"""The first words of the lines that the guest's process prints; `SPENT` stands for a guest that used up its budget."""


def check(deadline: float = DEADLINE, *, device: str = DEVICE) -> str:
    """Return the reason why KVM does not work here, as a sentence without its full stop; empty if it works.

    `deadline` is in seconds; the whole check ends with it, or, if a vCPU resists SIGKILL, a second later.
    A good machine takes some 20 ms, one whose guests crawl a little more than `BUDGET`. Raises nothing, but the fault
    of a START that has no time left.
    """
    return _unopenable(device) or _verdict(device, *_run_guest(device, deadline), deadline)


def _unopenable(device: str) -> str:
    """Return the reason why the device cannot be opened, empty if it can; this needs no process."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        why = "the kernel's module for KVM is not loaded, or the processor does not virtualize"
        return f"{device} does not exist: {why}"
    except PermissionError:
        return f"{device} may not be opened by user id {os.geteuid()}: root or the group of {device} may"
    except OSError as error:
        return f"{device} cannot be opened: {error.strerror}"
    return ""


def _verdict(device: str, lines: list[str], killed: bool, deadline: float) -> str:
    """Return the reason why KVM does not work, from the lines that the guest's process printed; empty if it works."""
    times = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == FAILED:
            return f"{device} opens, but {rest}"
        if word == RAN:
            times.append(float(rest))
    if times and min(times) < FAST_ENOUGH:
        return ""
    if times:
        return (
            f"{device} opens, but a guest in 64-bit mode is too slow: {TURNS:,} turns of a loop took "
            f"{min(times):.3f} s, where hardware needs about 0.001 s and {FAST_ENOUGH} s is the limit"
        )
    spent = any(line.startswith(SPENT) for line in lines)
    if spent or killed:
        within = f"{BUDGET:g} s of the processor's time" if spent else f"{deadline:.3g} s"
        return (
            f"{device} opens, but a guest in 64-bit mode did not end {TURNS:,} turns of a loop "
            f"within {within}, where hardware needs about 0.001 s"
        )
    return f"{device} opens, but the process that tries a guest died without a word"


def _run_guest(device: str, deadline: float) -> tuple[list[str], bool]:
    """Run this file as a process; return the whole lines that it printed, and whether the deadline killed it."""
    import signal
    import sys

    from vmgahp.host.run import run  # which the process with the guest does without

    if not sys.executable:
        return [f"{FAILED} there is no Python interpreter to try a guest with"], False
    command = [sys.executable, "-I", "-S", "-B", __file__, device, str(deadline), str(BUDGET)]
    try:
        done = run(command, deadline=deadline, environ={})
    except OSError as error:
        return [f"{FAILED} a process to try a guest with cannot be started: {error.strerror}"], False
    lines = [line for line in done.out.decode(errors="replace").split("\n")[:-1] if line]
    return [*lines, SPENT] if done.status == -signal.SIGPROF else lines, done.status is None


# The rest runs in the process of the guest. Numbers and layouts are those of linux/kvm.h and, for
# x86, asm/kvm.h.

IOCTLS = {
    "KVM_GET_API_VERSION": 0xAE00,
    "KVM_CREATE_VM": 0xAE01,
    "KVM_CHECK_EXTENSION": 0xAE03,
    "KVM_GET_VCPU_MMAP_SIZE": 0xAE04,
    "KVM_CREATE_VCPU": 0xAE41,
    "KVM_SET_USER_MEMORY_REGION": 0x4020AE46,
    "KVM_SET_TSS_ADDR": 0xAE47,
    "KVM_RUN": 0xAE80,
    "KVM_GET_REGS": 0x8090AE81,
    "KVM_SET_REGS": 0x4090AE82,
    "KVM_GET_SREGS": 0x8138AE83,
    "KVM_SET_SREGS": 0x4138AE84,
}

API_VERSION = 12
"""The only version of the interface since Linux 2.6.22."""
KVM_CAP_ARM_VM_IPA_SIZE = 165
KVM_EXIT_HLT = 5
KVM_EXIT_INTR = 10

PAGE = 4096
CODE = b"\x48\xff\xc9\x75\xfb\xf4"
"""The guest's code: ``dec rcx``; ``jnz`` back to it; ``hlt``."""
CODE_AT = 0x4000
GUEST_MEMORY = 0x8000
"""The bytes of guest memory: page 1 to 3 are the page tables, page 4 is the code."""


def _guest(device: str, budget: float) -> None:
    """Make the guest, run it and print the lines that `_verdict` reads. Raises OSError with the step's name.

    SIGPROF ends the process when the guest has used up its CPU time, `budget` in seconds.
    """
    import _signal as signal  # type: ignore[import-not-found]  # the enums of signal take longer than the guest
    from array import array
    from fcntl import ioctl
    from mmap import mmap
    from struct import pack, pack_into, unpack_from
    from time import perf_counter

    def call(name: str, descriptor: int, argument: int | bytearray = 0) -> int:
        try:
            return ioctl(descriptor, IOCTLS[name], argument)
        except OSError as error:
            raise OSError(error.errno, f"{name} failed: {error.strerror}") from error

    kvm = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    version = call("KVM_GET_API_VERSION", kvm)
    if version != API_VERSION:
        raise OSError(0, f"it speaks version {version} of KVM's interface and not {API_VERSION}")
    machine = os.uname().machine
    vm_type = 0
    if machine == "aarch64":
        # The bits of a guest's physical address; some processors do not offer the default, 40.
        vm_type = call("KVM_CHECK_EXTENSION", kvm, KVM_CAP_ARM_VM_IPA_SIZE)
    vm = call("KVM_CREATE_VM", kvm, vm_type)
    if machine != "x86_64":
        call("KVM_CREATE_VCPU", vm)
        print(RAN, 0.0, flush=True)  # noqa: T201 - the parent reads it
        return
    # Needed on Intel's processors before the first vCPU: three pages that no memory of the guest covers.
    call("KVM_SET_TSS_ADDR", vm, 0x10000000)

    memory = array("B", bytes(GUEST_MEMORY + PAGE))
    address = memory.buffer_info()[0]
    skip = -address % PAGE
    for at, value in (
        (0x1000, 0x2003),  # page map level 4: present, writable
        (0x2000, 0x3003),  # page directory pointers
        (0x3000, 0x0083),  # page directory: one page of 2 MiB at 0
    ):
        pack_into("=Q", memory, skip + at, value)
    memory[skip + CODE_AT : skip + CODE_AT + len(CODE)] = array("B", CODE)
    region = bytearray(pack("=IIQQQ", 0, 0, 0, GUEST_MEMORY, address + skip))
    call("KVM_SET_USER_MEMORY_REGION", vm, region)

    vcpu = call("KVM_CREATE_VCPU", vm)
    run = mmap(vcpu, call("KVM_GET_VCPU_MMAP_SIZE", kvm))
    sregs = bytearray(312)
    call("KVM_GET_SREGS", vcpu, sregs)
    # struct kvm_segment: base, limit, selector; type, present, dpl, db, s, l, g, avl, unusable, padding
    segment = "=QIH10B"
    pack_into(segment, sregs, 0, 0, 0xFFFFFFFF, 0x08, 11, 1, 0, 0, 1, 1, 1, 0, 0, 0)  # cs: 64-bit code
    for at in range(24, 144, 24):  # ds, es, fs, gs, ss: data
        pack_into(segment, sregs, at, 0, 0xFFFFFFFF, 0x10, 3, 1, 0, 1, 1, 0, 1, 0, 0, 0)
    pack_into("=Q", sregs, 224, 0x80050033)  # cr0: paging, alignment mask, write protect, …, protected mode
    pack_into("=Q", sregs, 240, 0x1000)  # cr3: the page tables
    pack_into("=Q", sregs, 248, 0x20)  # cr4: physical address extension
    pack_into("=Q", sregs, 264, 0x500)  # efer: long mode, enabled and active
    call("KVM_SET_SREGS", vcpu, sregs)

    signal.setitimer(signal.ITIMER_PROF, budget)
    for _ in range(TRIES):
        # struct kvm_regs: rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8 … r15, rip, rflags
        regs = bytearray(pack("=18Q", 0, 0, TURNS, *[0] * 13, CODE_AT, 0x2))
        call("KVM_SET_REGS", vcpu, regs)
        began = perf_counter()
        while True:
            call("KVM_RUN", vcpu)
            (reason,) = unpack_from("=I", run, 8)
            if reason != KVM_EXIT_INTR:
                break
        seconds = perf_counter() - began
        if reason != KVM_EXIT_HLT:
            raise OSError(0, f"a guest in 64-bit mode left KVM_RUN with exit reason {reason} and not by hlt")
        call("KVM_GET_REGS", vcpu, regs)
        (left,) = unpack_from("=Q", regs, 16)
        if left != 0:
            raise OSError(0, f"a guest in 64-bit mode counted wrongly: {left} turns were left at its end")
        print(RAN, f"{seconds:.6f}", flush=True)  # noqa: T201 - the parent reads it
        if seconds < FAST_ENOUGH or seconds > HOPELESS:
            break


def _main(arguments: list[str]) -> None:
    import _signal as signal

    device, deadline, budget = arguments
    signal.alarm(int(float(deadline)) + 2)
    try:
        _guest(device, float(budget))
    except Exception as error:  # noqa: BLE001 - any error is a reason why KVM does not work
        print(FAILED, getattr(error, "strerror", "") or repr(error), flush=True)  # noqa: T201 - as above


if __name__ == "__main__":
    import sys

    _main(sys.argv[1:])
