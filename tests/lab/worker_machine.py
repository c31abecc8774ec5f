"""A pytest plugin (``-p tests.lab.worker_machine``): each worker of pytest-xdist has a machine with its own libvirtd.

Workers of an ordinary user, who can make no machine, share the user's libvirtd; so do tests that run without workers.
"""

import ctypes
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

MACHINE = Path(__file__).with_name("worker-machine")
OUTSIDE = "VMGAHP_NETWORK_OUTSIDE"
"""The variable with the descriptor of the network that the controller is in; `MACHINE` sets it."""
_NEWNET = 0x40000000
"""CLONE_NEWNET of setns(2), which Python has since 3.12."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Have each worker's Python started by `MACHINE`."""
    if os.geteuid() == 0:
        for spec in specs:
            spec.python = shlex.join(["bash", str(MACHINE), sys.executable])


def _enter(network: int) -> None:
    """Have this thread make its sockets in another network, and close the descriptor of that."""
    if ctypes.CDLL(None, use_errno=True).setns(network, _NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a worker cannot enter a network (setns)")
    os.close(network)


class Outside:
    """The controller's network, in which plugins of a worker connect to the controller's (pytest-rerunfailures)."""

    def __init__(self, network: int) -> None:
        self._network = network
        self._own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        """Leave this machine's network, before any other plugin is configured."""
        _enter(self._network)

    @pytest.hookimpl(trylast=True, specname="pytest_configure")
    def pytest_come_back(self) -> None:
        """Come back to it, after all others."""
        _enter(self._own)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register early enough to be the first and the last that is configured."""
    if network := os.environ.pop(OUTSIDE, ""):
        pluginmanager.register(Outside(int(network)))
