"""The log of a schedule in words: what happened, to whom, and what was made of it."""

from __future__ import annotations

from atoll.protocol.events import Command, Fact

SHOWN = (
    "learner",
    "incarnation",
    "key",
    "fragment",
    "version",
    "name",
    "push",
    "base_version",
    "attempt",
    "age",
    "fate",
    "reason",
    "epoch",
    "revision",
    "proven",
    "end",
)


def told(said: tuple[object, ...]) -> str:
    """Return one line: who first, then facts and commands by name with what matters of them."""
    who, *rest = said
    return f"{who!s:10} " + " ".join(_worded(part) for part in rest)


def _worded(part: object) -> str:
    if isinstance(part, list):
        return "-> " + (", ".join(_worded(each) for each in part) or "nothing")
    if isinstance(part, Fact | Command):
        shown = ((name, getattr(part, name, None)) for name in SHOWN)
        inside = " ".join(f"{name[0]}={_short(value)}" for name, value in shown if value not in (None, ""))
        return f"{type(part).__name__}({inside})"
    return str(part)


def _short(value: object) -> str:
    return "/".join(str(each) for each in value) if isinstance(value, tuple) else str(value)
