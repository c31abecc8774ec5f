"""Guests of the tests here, and what else they look at dom0's libvirt with."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import libvirt
from tests.lab import guest
from tests.lab.xen import XenHost, disk, guest_xml

START = 180
"""Seconds for what takes 10 on an idle machine: a guest's start up to its first counts."""


class Guest:
    """A guest of one test: its disk, its domain, its console."""

    def __init__(self, host: XenHost, connection: Any, name: str) -> None:
        self.host, self.connection, self.name = host, connection, name
        self.image = f"/root/{name}.img"
        host.run("truncate", "-s", "1M", self.image)

    def start(self, words: str = "", driver: str = "phy", flags: int = 0) -> Any:
        self.domain = self.connection.createXML(guest_xml(self.name, disk(self.image, driver), words), flags)
        return self.domain

    def look_up(self) -> Any:
        self.domain = self.connection.lookupByName(self.name)
        return self.domain

    def counts(self) -> list[int]:
        return guest.counts(self.host.console(self.name))

    def goes_on(self) -> list[int]:
        """Wait until it has counted further: all counts on its console."""
        before = len(self.counts())
        return self.host.wait_until(
            f"{self.name} to count on", lambda: counts if len(counts := self.counts()) > before else None, START
        )

    def is_gone(self) -> bool:
        try:
            self.connection.lookupByName(self.name)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise
            return True
        return False

    def destroy(self) -> None:
        if not self.is_gone():
            self.look_up().destroy()


class Events:
    """The lifecycle events of dom0's libvirt, as virsh prints them."""

    def __init__(self, host: XenHost, path: Path) -> None:
        self.path = path
        with open(path, "wb") as out:
            command = ("virsh", "-c", "xen:///system", "event", "--event", "lifecycle", "--loop")
            self.process = host.popen("stdbuf", "-oL", *command, stdin=subprocess.PIPE, stdout=out, stderr=out)

    def of(self, name: str) -> list[str]:
        begin = f"event 'lifecycle' for domain '{name}': "
        lines = self.path.read_text().splitlines()
        return [line.removeprefix(begin) for line in lines if line.startswith(begin)]


def refused(code: str) -> Any:
    """A block that ends with an error of libvirt's of this code; see `LibvirtRefusal`."""
    return LibvirtRefusal(getattr(libvirt, f"VIR_ERR_{code}"))


class LibvirtRefusal:
    def __init__(self, code: int) -> None:
        self.code = code
        self.said = ""

    def __enter__(self) -> LibvirtRefusal:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert isinstance(error, libvirt.libvirtError), f"libvirt did it, or failed otherwise: {error!r}"
        assert error.get_error_code() == self.code, str(error)
        self.said = str(error)
        return True
