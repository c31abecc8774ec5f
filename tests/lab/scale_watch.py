"""Measures many servers on one machine, from their clients' side; runs inside the namespace, for `scale_measure`.

It needs the standard library and libvirt's module. A task in JSON comes on standard input; what was found goes to
standard output in one object of JSON: times in seconds, memory in KiB.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DEADLINE = 240
"""Seconds for one number of servers; then the alarm ends the measurement."""
PATIENCE = 90.0
"""Seconds for all servers to answer, and for the last VM to go."""
SETTLE = 3.0
"""Seconds of silence after all have started, before memory is counted."""
LOOK = 0.05
"""Seconds between two looks at what is left."""
STATUSES = 200
"""Questions, one after the other, over all servers."""

GUARDIAN = b"vmgahp-guardian"


class Client:
    """One server process and its pipes."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], errors: str) -> None:
        theirs_in, self.to = os.pipe2(os.O_CLOEXEC)
        self.source, theirs_out = os.pipe2(os.O_CLOEXEC)
        actions = [
            (os.POSIX_SPAWN_DUP2, theirs_in, 0),
            (os.POSIX_SPAWN_DUP2, theirs_out, 1),
            (os.POSIX_SPAWN_OPEN, 2, errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        ]
        self.pid = os.posix_spawn(argv[0], argv, environ, file_actions=actions)
        os.close(theirs_in)
        os.close(theirs_out)
        self.data = b""
        self.taken = 0.0
        """When the last whole answer came, by the monotonic clock."""

    def say(self, text: bytes) -> None:
        os.write(self.to, text)

    def close(self) -> None:
        os.close(self.to)
        os.close(self.source)
        os.waitpid(self.pid, 0)


def hear(clients: Iterable[Client], is_whole: Callable[[bytes], bool], seconds: float = PATIENCE) -> list[Client]:
    """Read until each has said something whole; those that have not within so many seconds."""
    waiting = {client.source: client for client in clients}
    poll = select.poll()
    for source, client in waiting.items():
        client.data = b""
        poll.register(source, select.POLLIN)
    end = time.monotonic() + seconds
    while waiting and (left := end - time.monotonic()) > 0:
        for source, _ in poll.poll(left * 1000):
            client = waiting[source]
            chunk = os.read(source, 65536)
            client.data += chunk
            client.taken = time.monotonic()
            if not chunk or is_whole(client.data):
                poll.unregister(source)
                del waiting[source]
    return list(waiting.values())


def lines(count: int) -> Callable[[bytes], bool]:
    """Whether so many lines are there."""
    return lambda data: data.count(b"\n") >= count


def spread(values: Sequence[float]) -> dict[str, float]:
    """The middle of some values, the one that 95 % do not exceed, and the largest."""
    found = sorted(values)
    return {"median": found[len(found) // 2], "p95": found[len(found) * 95 // 100], "max": found[-1]}


def all_at_once(clients: Sequence[Client], text: bytes, is_whole: Callable[[bytes], bool]) -> tuple[list[Client], Any]:
    """Say the same to all of them: who has not answered, and how long the others took."""
    began = time.monotonic()
    for client in clients:
        client.say(text)
    late = hear(clients, is_whole)
    return late, spread([client.taken - began for client in clients if client not in late] or [0.0])


# ---- what processes take ----------------------------------------------------------------------------


def processes() -> dict[int, bytes]:
    """Process id -> command line of whatever runs."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            words = _read(f"/proc/{entry}/cmdline")
            if words:  # a zombie has none
                found[int(entry)] = words
    return found


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it is gone
        return b""


def memory(pids: Iterable[int]) -> dict[str, int]:
    """What some processes take together, in KiB."""
    total = {"Rss": 0, "Pss": 0, "Anonymous": 0}
    for pid in pids:
        for line in _read(f"/proc/{pid}/smaps_rollup").decode().splitlines()[1:]:
            field, kib, _ = line.split()
            if field.rstrip(":") in total:
                total[field.rstrip(":")] += int(kib)
    return total


def on_processor(pids: Iterable[int]) -> float:
    """Seconds of CPU time that some processes have used: of each thread, whose clock is fine, and of ended children."""
    used = 0.0
    for pid in pids:
        schedstats = (_read(str(path)) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        used += sum(int(words.split()[0]) for words in schedstats if words) / 1e9
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        used += sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
    return used


def count(pids: Iterable[int], directory: str) -> int:
    """The entries of a directory of each, such as ``fd``."""
    found = 0
    for pid in pids:
        try:
            found += len(os.listdir(f"/proc/{pid}/{directory}"))
        except OSError:
            continue
    return found


def pid_of(name: str) -> list[int]:
    """The processes of a program."""
    return [pid for pid in processes() if _read(f"/proc/{pid}/comm").strip() == name.encode()]


def per_hour(pids: Sequence[int], seconds: float) -> float:
    """CPU seconds an hour that some processes use when nobody asks."""
    before, began = on_processor(pids), time.monotonic()
    time.sleep(seconds)
    return (on_processor(pids) - before) / (time.monotonic() - began) * 3600


# ---- the story --------------------------------------------------------------------------------------


def prepare(task: Mapping[str, Any], number: int) -> tuple[str, bytes]:
    """The scratch directory of a job, and its ad with what the task says of it."""
    scratch = Path(task["execute"], f"dir_{number}")
    scratch.mkdir()
    shutil.copyfile(task["image"], scratch / "guest.img")
    for path in (scratch, scratch / "guest.img"):
        os.chown(path, task["uid"], task["gid"])
    changes = {"VM_WORKING_DIR": f'"{scratch}"', "ClusterId": str(number), "JobVMType": f'"{task["vm_type"]}"'}
    changes |= task.get("job", {})
    kept = [line for line in task["ad"] if line.split(" ")[0] not in changes]
    ad = [*kept, *(f"{name} = {value}" for name, value in changes.items())]
    return str(scratch), "\r\n".join(["CLASSAD", *ad, "CLASSAD_END", ""]).encode()


def measure(task: Mapping[str, Any], libvirtd: Any) -> dict[str, Any]:
    """So many servers with a VM each, from their start to the end of the last guardian."""
    there = set(processes())
    number: int = task["servers"]
    jobs = [prepare(task, 1000 + index) for index in range(number)]
    found: dict[str, Any] = {"servers": number}

    began = time.monotonic()
    clients = [
        Client(task["argv"], {**task["environment"], "VMGAHP_WORKING_DIR": scratch}, task["errors"])
        for scratch, _ in jobs
    ]
    mute = hear(clients, lines(1))
    found["greeting"] = spread([client.taken - began for client in clients])
    for client, (_, ad) in zip(clients, jobs, strict=True):
        client.say(ad)
    mute += hear(clients, lines(2))
    time.sleep(SETTLE)
    servers = [client.pid for client in clients]
    found["idle"] = memory(pid for pid in processes() if pid not in there)

    used = on_processor(servers)
    late, found["start"] = all_at_once(clients, f"CONDOR_VM_START 1 {task['vm_type']}\r\n".encode(), lines(2))
    result, _ = all_at_once(clients, b"RESULTS\r\n", lines(2))
    started = [client for client in clients if client.data.split(b"\n")[-2].startswith(b"1 0 ")]
    found["started"] = len(started)
    found["refused"] = sorted({client.data.decode() for client in clients if client not in started})
    found["silent"] = len({client.pid for client in [*mute, *late, *result]})
    found["domains"] = libvirtd.numOfDomains() - task["domains"]

    time.sleep(SETTLE)
    found["CPU seconds a START"] = (on_processor(servers) - used) / number
    ours = {pid: words for pid, words in processes().items() if pid not in there}
    guardians = [pid for pid, words in ours.items() if GUARDIAN in words]
    found["live"] = memory(pid for pid in ours if pid not in guardians and b"qemu-system" not in ours[pid])
    found["guardians"] = memory(guardians)
    found["number of guardians"] = len(guardians)
    found["threads"] = count(servers, "task")
    found["descriptors"] = count(servers, "fd")
    daemons = pid_of("libvirtd")
    found["libvirtd"] = {**memory(daemons), "descriptors": count(daemons, "fd"), "threads": count(daemons, "task")}

    found["STATUS of one"] = spread([_status(clients[index % number]) for index in range(STATUSES)])
    _, asked = all_at_once(clients, b"CONDOR_VM_STATUS 9 1\r\n", lines(2))
    found["STATUS of all"] = asked
    all_at_once(clients, b"RESULTS\r\n", lines(2))
    if task["quiet"]:
        found["CPU seconds an hour"] = per_hour(servers, task["quiet"]) / number

    doomed = daemons if task["with libvirtd"] else []
    found["death"] = death(clients, set(ours) - set(servers), doomed, lambda: _is_over(task, libvirtd))
    found["left"] = left(there, Path(task["execute"]))
    shutil.rmtree(task["execute"])
    os.mkdir(task["execute"])
    return found


def _status(client: Client) -> float:
    """Seconds for a STATUS and its result."""
    began = time.monotonic()
    client.say(b"CONDOR_VM_STATUS 8 1\r\n")
    hear([client], lines(2))
    client.say(b"RESULTS\r\n")
    hear([client], lines(2))
    if b"STATUS=Running" not in client.data:
        raise ValueError(f"a VM should run, but: {client.data!r}")
    return time.monotonic() - began


def checkpoint(task: Mapping[str, Any]) -> dict[str, Any]:
    """One VM whose guest says in sector 1 of its disk that its memory is full: its checkpoint."""
    scratch, ad = prepare(task, 1000)
    there = set(os.listdir(scratch))
    client = Client(task["argv"], {**task["environment"], "VMGAHP_WORKING_DIR": scratch}, task["errors"])
    hear([client], lines(1))
    client.say(ad)
    hear([client], lines(2))
    _done(client, b"CONDOR_VM_START 1 %s" % task["vm_type"].encode())
    there |= set(os.listdir(scratch))
    end = time.monotonic() + PATIENCE
    while _read(f"{scratch}/guest.img")[512:513] != b"1":
        if time.monotonic() > end:
            raise ValueError("the guest does not say that its memory is full")
        time.sleep(LOOK)
    taken = _done(client, b"CONDOR_VM_CHECKPOINT 1 1")
    made = [os.stat(f"{scratch}/{name}") for name in os.listdir(scratch) if name not in there]
    client.say(b"QUIT\r\n")
    client.close()
    shutil.rmtree(scratch)
    return {"seconds": taken, "bytes": sum(status.st_blocks for status in made) * 512}


def _done(client: Client, request: bytes) -> float:
    """Seconds until a request has its result, which is a success."""
    began = time.monotonic()
    client.say(request + b"\r\n")
    hear([client], lines(2))
    client.say(b"RESULTS\r\n")
    hear([client], lines(2))
    if b"\n1 0 " not in client.data:
        raise ValueError(f"{request!r} was answered {client.data!r}")
    return time.monotonic() - began


def _is_over(task: Mapping[str, Any], libvirtd: Any) -> bool:
    """Whether no VM is left: by QEMU's processes where libvirtd may be gone."""
    return not pid_of("qemu-system-x86") and (task["with libvirtd"] or libvirtd.numOfDomains() <= task["domains"])


def death(
    clients: Sequence[Client], others: set[int], daemons: Sequence[int], is_over: Callable[[], bool]
) -> dict[str, Any]:
    """Kill all servers at once: how long their VMs and guardians live, and what that takes of the machine.

    The `daemons` die with them.
    """
    before = set(processes())
    began = time.monotonic()
    for pid in [*daemons, *(client.pid for client in clients)]:
        os.kill(pid, signal.SIGKILL)
    for client in clients:
        client.close()
    found: dict[str, Any] = {"last VM": None, "last guardian": None, "memory": 0, "side by side": 0}
    while time.monotonic() - began < PATIENCE:
        running = processes()
        new = [pid for pid in running if pid not in before]
        found["memory"] = max(found["memory"], sum(map(_anonymous, new)))
        found["side by side"] = max(found["side by side"], len(new))
        if found["last VM"] is None and is_over():
            found["last VM"] = time.monotonic() - began
        if not others & running.keys() and not any(GUARDIAN in words for words in running.values()):
            found["last guardian"] = time.monotonic() - began
            break
        time.sleep(LOOK)
    return found


def _anonymous(pid: int) -> int:
    """KiB that a process shares with no other, as /proc/PID/status has it, which costs less to read than smaps."""
    words = _read(f"/proc/{pid}/status").split()
    return int(words[words.index(b"RssAnon:") + 1]) if b"RssAnon:" in words else 0


def left(there: set[int], execute: Path) -> dict[str, Any]:
    """What is still there that was not before: processes, sockets, files beside those that the job gets."""
    commands = [words.replace(b"\0", b" ").decode()[:200] for pid, words in processes().items() if pid not in there]
    run = Path("/run/vmgahp")
    return {
        "processes": sorted(commands),
        "directories": sorted(path.name for path in run.iterdir() if path.is_dir()) if run.exists() else [],
        "files": sorted({path.name for path in execute.glob("dir_*/*")}),
    }


# ---- programs that end by themselves ----------------------------------------------------------------


class Watched:
    """Counts how often files of a directory are opened and read, by inotify(7)."""

    OPEN, ACCESS = 0x20, 0x01

    def __init__(self, directory: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK)
        if libc.inotify_add_watch(self.descriptor, directory.encode(), self.OPEN | self.ACCESS) < 0:
            raise OSError(ctypes.get_errno(), directory)

    def close(self) -> dict[str, int]:
        """What was counted; reads one after the other are one event."""
        masks = []
        try:
            data = os.read(self.descriptor, 1 << 20)
        except BlockingIOError:
            data = b""
        os.close(self.descriptor)
        while data:
            masks.append(int.from_bytes(data[4:8], sys.byteorder))
            data = data[16 + int.from_bytes(data[12:16], sys.byteorder) :]
        return {
            "opened": sum(bool(mask & self.OPEN) for mask in masks),
            "read": sum(bool(m & self.ACCESS) for m in masks),
        }


def run(program: Mapping[str, Any]) -> dict[str, Any]:
    """A program from its start to its end: how long, how much of the processor with all that it has waited for."""
    for path in program.get("remove", ()):
        Path(path).unlink(missing_ok=True)
    watched = Watched(program["watched"]) if "watched" in program else None
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    done = subprocess.run(
        program["argv"],
        env=program["environment"],
        cwd=program.get("directory", "/"),
        user=program.get("uid"),
        group=program.get("gid"),
        extra_groups=[] if "gid" in program else None,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise ValueError(f"{program['argv']}: exit {done.returncode}: {done.stderr[-2000:]}")
    return {
        "seconds": seconds,
        "cpu": after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime,
        "output": done.stdout,
        **(watched.close() if watched else {}),
    }


def main() -> None:
    task = json.load(sys.stdin)
    signal.alarm(DEADLINE)
    if "programs" in task:
        json.dump([run(program) for program in task["programs"]], sys.stdout)
        return
    if "servers" not in task:
        json.dump(checkpoint(task), sys.stdout)
        return
    import libvirt

    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    # libvirt's test driver keeps its domains as long as somebody is connected.
    libvirtd = libvirt.open(task["uri"])
    json.dump(measure({**task, "domains": libvirtd.numOfDomains()}, libvirtd), sys.stdout)


if __name__ == "__main__":
    main()
