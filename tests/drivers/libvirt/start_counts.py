"""A START in a process of its own, and what it took of what does not jitter; run by `test_start_counts`.

Its arguments are the job's scratch directory and the lines of its ad; the answer is an object of JSON.
"""

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType

import libvirtmod

from vmgahp import config
from vmgahp.drivers.libvirt.driver import LibvirtDriver
from vmgahp.host.job_user import Identity
from vmgahp.job.ad import JobAd

counted: Counter[str] = Counter()
entered: set[str] = set()


def count(place: object, name: str) -> None:
    """Count the calls of a function."""
    function: Callable[..., object] = getattr(place, name)

    def call(*arguments: object) -> object:
        counted[name] += 1
        return function(*arguments)

    setattr(place, name, call)


def enter(frame: FrameType, event: str, _value: object) -> None:
    """Note the module of a function of ours that is called."""
    if event == "call" and (name := frame.f_globals.get("__name__", "")).startswith("vmgahp."):
        entered.add(name)


def main(scratch: str, *lines: str) -> None:
    modules = sorted(sys.modules)
    status = os.stat(scratch)
    user = Identity(status.st_uid, status.st_gid)
    with user.at_hand():
        driver = LibvirtDriver("qemu", config.load(dict(os.environ)), user, lambda line: None)
        count(os, "fork")
        for name in dir(libvirtmod):
            if name.startswith("vir"):
                count(libvirtmod, name)
        job = JobAd([pair for line in lines if (pair := JobAd.parse_line(line))])
        threading.setprofile(enter)
        sys.setprofile(enter)
        machine = driver.start(job)
        sys.setprofile(None)
    found = {"counts": dict(counted), "modules": modules, "later": sorted({*sys.modules} - {*modules})}
    found["entered"] = sorted(entered)
    machine.destroy()
    driver.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
