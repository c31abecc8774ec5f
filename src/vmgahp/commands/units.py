"""Numbers as people read them, and where an axis has its marks. Sizes are binary: 1 KiB is 1024 bytes."""

import time
from math import ceil

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_STEPS = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 250, 500)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(minutes * _MINUTE for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * _HOUR for hours in (1, 2, 3, 6, 12)),
    *(days * _DAY for days in (1, 2, 7, 14, 28, 91, 182, 365, 1825, 7300)),
)
_SHORT_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, *_TIME_STEPS[:7])
MOST_TIMES = 8


def size(amount: float) -> str:
    """Bytes in three digits or so: ``820 KiB``, ``1.5 GiB``."""
    power = 0
    while amount >= 1023.95 and power < len(UNITS) - 1:
        amount /= 1024
        power += 1
    return f"{amount:.0f} {UNITS[power]}" if amount >= 99.95 or power == 0 else f"{amount:.1f} {UNITS[power]}"


def duration(seconds: float) -> str:
    """``15 ms``, ``2.1 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, unit, part in ((_DAY, _HOUR, "d", "h"), (_HOUR, _MINUTE, "h", "min"), (_MINUTE, 1, "min", "s")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {unit} {rest} {part}" if rest else f"{whole // large} {unit}"
    return f"{whole} s"


def clock(when: float) -> str:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def zone(when: float) -> str:
    """The time zone of a moment: ``CET, UTC+01:00``."""
    local = time.localtime(when)
    minutes = local.tm_gmtoff // 60
    offset = f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"
    if local.tm_zone == "UTC":
        return "UTC"
    return offset if local.tm_zone.lstrip("+-").isdigit() else f"{local.tm_zone}, {offset}"


def byte_marks(top: float, per: str = "") -> list[tuple[float, str]]:
    """The marks of an axis from 0 to at least `top` bytes, with their labels; `per` is ``/s`` or nothing."""
    power = 0
    while top >= 1024 and power < len(UNITS) - 1:
        top /= 1024
        power += 1
    unit = 1024.0**power
    step = next((step for step in _STEPS if top / step <= 4), 1024)
    if power == 0:
        step = max(step, 1)
    count = max(1, ceil(top / step))
    return [(n * step * unit, f"{n * step:g} {UNITS[power]}{per}" if n else "0") for n in range(count + 1)]


def percent_marks(top: float) -> list[tuple[float, str]]:
    """Those of a percentage, which goes to 100 at least: QEMU's own threads come on top of the vCPUs."""
    # A figure of the job's own file may be any number; there is an axis for each.
    step = next((step for step in (25, 50, 100, 250, 1000, 10000, 1e6, 1e9, 1e15) if top / step <= 5), top / 5)
    count = max(ceil(100 / step), ceil(top / step))
    return [(n * step, f"{n * step:g} %") for n in range(count + 1)]


def second_marks(begin: float, length: float, most: int = MOST_TIMES) -> list[tuple[float, str]]:
    """The marks of an axis that counts seconds from `begin` on, for what is over soon."""
    step = next((step for step in _SHORT_STEPS if length / step <= most), length / most)
    return [(begin + n * step, f"{n * step:.3g} s") for n in range(int(length / step) + 1)]


def time_marks(begin: float, end: float, most: int = MOST_TIMES) -> list[tuple[float, str]]:
    """Round moments of local time between `begin` and `end`; a label has what changes, and the date at midnight."""
    length = max(end - begin, 1.0)
    step = next((step for step in _TIME_STEPS if length / step <= most), _TIME_STEPS[-1])
    marks = []
    offset = time.localtime(begin).tm_gmtoff
    when = ceil((begin + offset) / step) * step - offset
    while when <= end:
        # Where summer time begins or ends, what follows is as round as what came before.
        local = time.localtime(when)
        if step >= _DAY or (local.tm_hour, local.tm_min, local.tm_sec) == (0, 0, 0):
            label = time.strftime("%d %b %Y" if step > 90 * _DAY else "%d %b", local)
        else:
            label = time.strftime("%H:%M:%S" if step < _MINUTE else "%H:%M", local)
        marks.append((float(when), label))
        when += step
    return marks
