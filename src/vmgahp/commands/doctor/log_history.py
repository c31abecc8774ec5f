"""The last failures in VM_GAHP_LOG, which the starters of all users write."""

import os
import re
import time

from vmgahp.commands.doctor.context import Context
from vmgahp.commands.files import log_lines
from vmgahp.findings import OFF, OK, UNKNOWN, Finding

SHOWN = 3
LONGEST_TAIL = 1 << 20
"""The maximum number of bytes that are read of each file, from its end."""
LONGEST_SENTENCE = 600
MOST_FILES = 50

_WHO = re.compile(r" ?\((client|job's owner|administrator|hypervisor's administrator)\)$")


def failures(context: Context) -> list[Finding]:
    """List the last failures, the latest first, each once, with its time and its number of occurrences."""
    path = context.settings.string("VM_GAHP_LOG")
    looked_at = f"the last failures in {path} and the files beside it" if path else "VM_GAHP_LOG"
    if not path.startswith("/") or path == os.devnull:
        return [Finding("log", UNKNOWN, looked_at, "There is no log: VM_GAHP_LOG is not the path of a file.")]
    seen: dict[str, tuple[float, int]] = {}
    unread, read = [], 0
    for name in _files(path):
        try:
            lines = list(log_lines(name, LONGEST_TAIL, follow=False))
        except FileNotFoundError:
            continue
        except OSError as error:
            unread.append(f"{name} cannot be read: {error.strerror}")
            continue
        read += 1
        for line in lines:
            if "VMGAHP_ERR_" in line.text:
                latest, times = seen.get(line.text, (0.0, 0))
                seen[line.text] = (max(latest, line.time), times + 1)
    found = [Finding("log", UNKNOWN, looked_at, sentence + ".") for sentence in unread[:SHOWN]]
    last = sorted(seen.items(), key=lambda item: -item[1][0])[:SHOWN]
    found += [_finding(looked_at, sentence, *when) for sentence, when in last]
    if not found:
        found.append(Finding("log", OK, looked_at, "no failure is in it" if read else "there is none yet"))
    return found


def _files(path: str) -> list[str]:
    """List the log files: the log, the one before it (``.old``), and those with a user's name after a dot."""
    directory, base = os.path.split(path)
    try:
        names = [name for name in os.listdir(directory) if name == base or name.startswith(base + ".")]
    except FileNotFoundError:
        return []
    except OSError:
        return [path]
    return [os.path.join(directory, name) for name in sorted(names)[:MOST_FILES]]


def parted(sentence: str) -> tuple[str, str, str]:
    """Parse a rendered fault (`vmgahp.errors.Fault.render`): the problem, who must act, the hint."""
    who = _WHO.search(sentence)
    problem, _, hint = _WHO.sub("", sentence).partition(" Hint: ")
    return problem[:LONGEST_SENTENCE], who[1] if who else "", hint[:LONGEST_SENTENCE]


def _finding(looked_at: str, sentence: str, when: float, times: int) -> Finding:
    problem, who, hint = parted(sentence)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    often = f", {times} times" if times > 1 else ""
    # A job's own mistake has held that job and is not a problem of the machine.
    owners = who in ("job's owner", "client")
    acting = f" ({who})" if who else ""
    return Finding("log", OK if owners else OFF, looked_at, f"{stamp}{often}: {problem}{acting}", hint)
