"""HTCondor's ClassAd engine for a job's expressions, in a process of its own.

It is run as ``python -I -m vmgahp.job.engine UID GID PARENT``. A long line overflows the engine's stack, and some
regular expressions never end. So it takes on the job user's rights, and limits, before it reads the question, and
returns only values. It gets no secret attributes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vmgahp.errors import MISMATCHED, JobFault, MachineFault
from vmgahp.host.job_user import Identity
from vmgahp.host.run import run
from vmgahp.host.system_calls import restrict
from vmgahp.text import shown

Plain = str | int | float | bool
Found = Plain | None | Sequence[str]
"""The result for an expression: a value, None for undefined, or a list with the kind of any other: error, list, ad."""

RUN_MODULE = ("-I", "-m")
"""The options of Python by which it runs the module whose name follows."""

SECONDS, CPU_SECONDS = 60.0, 10
"""The timeout and the limit of CPU time, in seconds, for all expressions of an ad together."""
MOST_MEMORY = 1 << 30  # bytes of address space
LONGEST_RESULT = 16 << 20

NOBODY = 65534

_NEW_UTS = 0x04000000
"""CLONE_NEWUTS of sched.h: a host name of its own."""

_NO_ENGINE, _TOO_MUCH = 3, 4
"""The exit statuses if HTCondor's Python package is missing, and if anything fails as the job's user.

Python's own 1 is the machine's fault: only what precedes that ends with it."""


class Failed(Exception):
    """A missing answer of the engine; the text is the reason."""


class NoEngine(Failed):
    """A missing Python package of HTCondor on this machine."""


def evaluate(pairs: Sequence[tuple[str, str]], wanted: Sequence[str], user: Identity | None) -> dict[str, Found]:
    """Evaluate the `wanted` attributes of an ad. Raises `JobFault` and `MachineFault`."""
    try:
        found: dict[str, Found] = _ask({"ad": list(pairs), "wanted": list(wanted)}, user)
    except Failed as failed:
        hint = f"write plain values; such expressions are {', '.join(wanted[:3])}."
        raise JobFault(MISMATCHED, f"The expressions of the job ad cannot be evaluated: {failed}.", hint) from failed
    return found


def judge(expression: str, values: Callable[[], Mapping[str, Plain | None]], user: Identity | None) -> Plain | None:
    """Evaluate another's expression, with the ad as MY and TARGET. Raises ValueError and `MachineFault`."""
    try:
        (found,) = _ask({"judge": expression, "values": values()}, user)
    except (Failed, JobFault) as failed:
        if isinstance(failed, NoEngine) or isinstance(failed.__cause__, NoEngine):
            problem = f"{expression} cannot be evaluated: HTCondor's ClassAd module is not on this machine."
            hint = "install the Python package htcondor for the Python that runs this daemon."
            raise MachineFault(problem, hint) from failed
        if isinstance(failed, JobFault):
            raise
        problem = f"{expression} cannot be evaluated over the job ad: {failed}."
        raise JobFault(MISMATCHED, problem, "write shorter values.") from failed
    if found == ["bad"]:
        raise ValueError(expression)
    return None if isinstance(found, list) else found


def _ask(question: dict[str, Any], user: Identity | None) -> Any:
    if user is None and os.geteuid() == 0:
        user = Identity(NOBODY, NOBODY)
    whose = (user and user.becoming()) or ()
    try:
        done = run(
            [sys.executable, *RUN_MODULE, "vmgahp.job.engine", *map(str, whose)],
            deadline=SECONDS,
            stdin=json.dumps(question).encode(),
            becomes=user,
            longest=LONGEST_RESULT,
        )
    except OSError as error:
        raise MachineFault(f"A process for HTCondor's ClassAd engine cannot be started: {error}.") from error
    if done.status == _NO_ENGINE:
        raise NoEngine("HTCondor's ClassAd module is not on this machine")
    if done.status is None:
        raise Failed(f"that took more than {SECONDS:g} s")
    if done.status == 1:
        last = done.complaints[-1] if done.complaints else "it says nothing"
        problem = f"{sys.executable} cannot run HTCondor's ClassAd engine ({shown(last.strip())})."
        raise MachineFault(problem, "see what is wrong with that Python, or with the package htcondor.")
    if done.status != 0:
        raise Failed("HTCondor's ClassAd engine needs too much time or memory for them, or fails")
    return json.loads(done.out)


def main(user: Sequence[str]) -> int:
    """Answer the question on standard input as `user`, of `Identity.becoming` or nothing, and exit."""
    take_address_as_name()
    try:
        import classad2
    except ImportError:
        return _NO_ENGINE
    for question in _REHEARSAL:  # loads all code: the job's user may not be allowed to read it
        _answer(classad2, json.loads(json.dumps(question)))
    whose = (int(user[0]), int(user[1]), int(user[2])) if user else None
    answers = os.dup(1)
    os.dup2(2, 1)  # the engine's messages go to standard error
    restrict(whose, memory=MOST_MEMORY, cpu_seconds=CPU_SECONDS, file_bytes=0)
    status = _TOO_MUCH
    try:
        answer = _answer(classad2, json.loads(sys.stdin.buffer.read()))
        with open(answers, "wb") as output:
            output.write(json.dumps(answer).encode())
        status = 0
    finally:
        os._exit(status)  # never 1, whatever limits the job's processes have set meanwhile


def take_address_as_name() -> None:
    """Give this process, if it is root, an address as its host name, which needs no resolver.

    HTCondor's module looks the name up while it is imported, and 20 times in a minute if no nameserver answers
    (``init_local_hostname_impl`` in its ``src/condor_utils/ipv6_hostname.cpp``). No setting turns that off.
    """
    import ctypes  # in the engine's own process alone

    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(_NEW_UTS) == 0:
        socket.sethostname("127.0.0.1")


_REHEARSAL = (
    {"ad": [("A", "strcat(B, 1)"), ("B", "nonsense(")], "wanted": ["A", "B"]},
    {"judge": "A =?= 1.5", "values": {"A": "\udc80", "B": None}},
)


def _answer(classad2: Any, question: dict[str, Any]) -> object:
    if "judge" in question:
        return [_judged(classad2, question["judge"], question["values"])]
    ad = _read(classad2, question["ad"])
    return {name: _plain(classad2, lambda name=name: ad.eval(name)) for name in question["wanted"]}


def _read(classad2: Any, pairs: Sequence[Sequence[str]]) -> Any:
    """Parse the ad; attributes that the engine cannot parse are left out, as in HTCondor's own server."""
    whole = classad2.ClassAd()
    for name, text in pairs:
        try:  # one by one: the engine silently drops all after a bad one
            one = classad2.parseOne(f"{name} = {text}")
            whole[name] = one.lookup(name)
        except Exception:  # noqa: BLE001, S112 - it raises several kinds of errors
            continue
    return whole


def _judged(classad2: Any, expression: str, values: Mapping[str, Plain | None]) -> Found:
    mine, target = classad2.ClassAd(), classad2.ClassAd()
    for name, value in values.items():
        clean = value.encode(errors="replace").decode() if isinstance(value, str) else value
        for ad in (mine, target):
            ad[name] = classad2.Value.Undefined if clean is None else clean
    try:
        tree = classad2.ExprTree(expression)
    except Exception:  # noqa: BLE001 - as in _read
        return ["bad"]
    return _plain(classad2, lambda: tree.eval(mine, target))


def _plain(classad2: Any, look: Any) -> Found:
    try:
        value = look()
    except Exception:  # noqa: BLE001 - as in _read
        return ["error"]
    # Undefined and error are members of an IntEnum, and would pass for the numbers 2 and 1.
    if isinstance(value, classad2.Value):
        return None if value == classad2.Value.Undefined else ["error"]
    if isinstance(value, str | int | float):
        return value
    return ["an ad" if isinstance(value, classad2.ClassAd) else "a list"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
