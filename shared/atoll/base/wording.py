"""Text for people: numbers with their nouns and units, and lists cut short.

Findings, log lines and errors say how many of something there are, and name some of it: `1 round`, `3 rounds`, `a, b and 3
more`; what a list leaves out is always counted. All verbs read numbers here, `12B` parameters or `100Mbit` a second, so the
same flag takes the same words everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from atoll.base.errors import SettingsError

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")
DAY_S = 86_400.0
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
DURATIONS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}
TOO_LARGE = 1e24
LEAST_SHARE = 0.001
ROUNDING = 1e-12
RATES = {"k": 1e3, "kbit": 1e3, "m": 1e6, "mbit": 1e6, "g": 1e9, "gbit": 1e9, "t": 1e12, "tbit": 1e12}


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, which a verb may follow; `plural` stands for any other number than one.

    Examples:
        >>> counted(1, "round"), counted(1200, "round")
        ('1 round', '1,200 rounds')
        >>> counted(1, "more finding stands", "more findings stand")
        '1 more finding stands'
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def few(names: Iterable[str], most: int, sep: str = ", ", *, of: int | None = None) -> str:
    """Return the first names of a list in one line, at `most` so many, and how many more there are.

    If `names` are only the first ones, there are so many `of` them.

    Examples:
        >>> few(["a", "b", "c"], 2), few(["a", "b"], 2)
        ('a, b and 1 more', 'a, b')
    """
    there = list(names)
    named = there[:most]
    left_out = (len(there) if of is None else of) - len(named)
    return sep.join(named) + (f" and {left_out:,} more" if left_out > 0 else "")


def check_within(flag: str, got: float, low: float, high: float) -> None:
    """Raise `SettingsError` unless `low <= got <= high`; a NaN is never within."""
    if not low <= got <= high:
        allowed = f"{low:g}..{high:g}"
        raise SettingsError(f"{flag} is out of range", got=f"{got:.12g}", allowed=allowed, todo=f"correct {flag}")


def count(text: str, flag: str) -> int:
    """Return `12B`, `350M` or `1e9` as a number; raise `SettingsError` naming `flag`."""
    return round(_scaled(text, flag, COUNTS, "a number with K, M, B or T, as 12B"))


def rate(text: str, flag: str) -> float:
    """Return `100Mbit`, `2.5Gbit` or `2.5G` as bits per second; raise `SettingsError` naming `flag`."""
    return _scaled(
        re.sub(r"(bps|[bB]it/s)$", "bit", text.strip()), flag, RATES, "a rate with its unit, as 100Mbit or 2.5Gbit"
    )


def duration(text: str, flag: str) -> float:
    """Return `90s`, `5m`, `2h` or `1d` as seconds; raise `SettingsError` naming `flag`."""
    return _scaled(text, flag, DURATIONS, "a duration with its unit, as 90s, 5m, 2h or 1d")


def rates(text: str, flag: str) -> tuple[float, ...]:
    """Return a comma-separated list of rates as bits per second."""
    return tuple(rate(part, flag) for part in text.split(","))


def _scaled(text: str, flag: str, scales: dict[str, float], allowed: str) -> float:
    match = _NUMBER.fullmatch(text)
    scale = None if match is None else scales.get(match[2].lower())
    if match is None or scale is None:
        raise SettingsError(f"{flag} is not understood", got=text, allowed=allowed, todo=f"correct {flag}")
    value = float(match[1]) * scale
    if not 0.0 < value < TOO_LARGE:
        allowed = f"above 0 and below {TOO_LARGE:g}"
        raise SettingsError(f"{flag} is out of range", got=text, allowed=allowed, todo=f"correct {flag}")
    return value


def as_count(value: float) -> str:
    """Return a count with K, M, B or T."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= scale:
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"


def as_bytes(value: float) -> str:
    """Return bytes in decimal units, as links and prices count."""
    for scale, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.0f} B"


def as_rate(bits_per_s: float | None) -> str:
    """Return bits per second in decimal units; a dash where no rate would do."""
    if bits_per_s is None:
        return "-"
    if math.isinf(bits_per_s):
        return "any rate"
    if bits_per_s == 0.0:
        return "none"
    for scale, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_s >= scale:
            return f"{bits_per_s / scale:.4g} {unit}"
    return f"{bits_per_s:.3g} bit/s"


def rate_flag(bits_per_s: float) -> str:
    """Return a rate as a flag takes it, no lower than `bits_per_s`: four figures, rounded up."""
    scales = {"Tbit": 1e12, "Gbit": 1e9, "Mbit": 1e6, "kbit": 1e3}
    unit = next((unit for unit, scale in scales.items() if bits_per_s >= scale), "kbit")
    value = bits_per_s / scales[unit]
    figures = 10.0 ** (3 - math.floor(math.log10(value)))
    return f"{math.ceil(value * figures * (1.0 - ROUNDING)) / figures:.12g}{unit}"


def as_time(seconds: float) -> str:
    """Return seconds in a unit that suits their size."""
    if math.isinf(seconds):
        return "for ever"
    for scale, unit in ((365 * DAY_S, "years"), (DAY_S, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def as_share(value: float) -> str:
    """Return a share in per cent: one decimal, or two significant figures below that."""
    return f"{100.0 * value:.1f} %" if value == 0.0 or value >= LEAST_SHARE else f"{100.0 * value:.2g} %"


def as_size(count: int) -> str:
    """Return bytes for people, in decimal units."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def as_duration(seconds: float) -> str:
    """Return seconds for people: `m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
