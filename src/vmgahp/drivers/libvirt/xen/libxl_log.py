"""libxl's log, which has the reason of a failure if libvirt's message has none."""

import os
import re

from vmgahp import errors
from vmgahp.errors import HypervisorFault, JobFault, MachineFault

PATH = "/var/log/libvirt/libxl/libxl-driver.log"

MOST = 64 << 10
"""The most bytes that are read of the new lines, from the end."""

_STAMP = re.compile(r"^\d{4}-\d\d-\d\d [\d:.+ ]+(?:libxl: |xc: )?")

_KERNEL = re.compile(
    r"no loader found|xc_dom_(?:parse|find_loader|boot_image)|kernel image|panic: xc_dom_core|not a Xen-compatible"
    r"|bootloader (?:failed|process)|bootloader_callback|domain_build_kernel"
)
"""The messages about a kernel that libxl cannot boot."""

_MEMORY = re.compile(r"[Nn]ot enough (?:free )?memory|[Cc]annot allocate memory|populate_physmap|failed to free memory")


class LibxlLog:
    """The log from now on. It has the lines of all guests of this machine, also of simultaneous starts."""

    def __init__(self, path: str = PATH) -> None:
        self._path = path
        self._begin = self._size()

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    def _new(self) -> list[str]:
        try:
            with open(self._path, "rb") as log:
                end = log.seek(0, 2)
                start = self._begin if self._begin <= end else 0  # it was rotated
                log.seek(max(start, end - MOST))
                text = log.read(MOST).decode("utf-8", "replace")
        except OSError:
            return []
        return [_STAMP.sub("", line).strip() for line in text.splitlines()]

    def last_words(self) -> str:
        """Return the first few errors since the beginning, in one line; empty if there is none, or no log."""
        lines = [line for line in self._new() if re.search(r"error|panic|fail", line, re.IGNORECASE)]
        return "; ".join(dict.fromkeys(lines[:4]))[:600]

    def judge(self, problem: str, *, own_kernel: bool) -> errors.Fault:
        """Return the fault for a failure of libxl, `problem` being the sentence about it.

        With `own_kernel` the job chose the kernel.
        """
        text = "\n".join(self._new())
        if _MEMORY.search(text) or "free memory for domain" in problem:
            return MachineFault(problem, "give VMs less memory (VM_MEMORY), or dom0 (dom0_mem of Xen).")
        if own_kernel and _KERNEL.search(text):
            return JobFault(
                errors.XEN_KERNEL_NOT_FOUND,
                problem,
                "see that xen_kernel is the image of a kernel for paravirtual guests, or that the disk has one.",
            )
        return HypervisorFault(problem, f"look into {self._path}.")
