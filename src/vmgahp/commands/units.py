"""Sizes, durations and times for people. Sizes are binary: 1 KiB is 1024 bytes."""

import time

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(minutes * _MINUTE for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * _HOUR for hours in (1, 2, 3, 6, 12)),
    *(days * _DAY for days in (1, 2, 7, 14, 28, 91, 182, 365, 1825, 7300)),
)


def size(amount: float) -> str:
    """Format bytes with about three digits: ``820 KiB``, ``1.5 GiB``."""
    power = 0
    while amount >= 1023.95 and power < len(UNITS) - 1:
        amount /= 1024
        power += 1
    return f"{amount:.0f} {UNITS[power]}" if amount >= 99.95 or power == 0 else f"{amount:.1f} {UNITS[power]}"


def duration(seconds: float) -> str:
    """Format seconds: ``15 ms``, ``2.1 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
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
    """Format a moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def zone(when: float) -> str:
    """Name the time zone of a moment: ``CET, UTC+01:00``."""
    local = time.localtime(when)
    minutes = local.tm_gmtoff // 60
    offset = f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"
    if local.tm_zone == "UTC":
        return "UTC"
    return offset if local.tm_zone.lstrip("+-").isdigit() else f"{local.tm_zone}, {offset}"


def axis(length: float) -> list[tuple[float, str]]:
    """Return the marks of an axis of so many seconds: at most six round durations, the first of them 0."""
    step = next((step for step in _STEPS if length / step <= 5), length / 5)
    return [(n * step, duration(n * step) if n else "0") for n in range(int(length / step) + 1)]
