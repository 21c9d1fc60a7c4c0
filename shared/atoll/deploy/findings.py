"""What a check found: one line each, with what to do where something is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from atoll.base.errors import AtollError, on_one_line

Grade = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `grade` tells whether a run can do without it, `todo` what mends it."""

    grade: Grade
    about: str
    what: str
    todo: str = ""

    def text(self) -> str:
        """Return the line as a terminal shows it, and a second one with what to do."""
        line = f"{self.grade:<5} {self.about}: {self.what}"
        return f"{line}\n      to do: {self.todo}" if self.todo else line


def of_error(about: str, error: AtollError, todo: str = "") -> Finding:
    """Return an error of ours as a finding."""
    parts = error.parts()
    said = [parts[name] for name in ("what", "got") if name in parts]
    allowed = [f"allowed: {parts['allowed']}"] if "allowed" in parts else []
    return Finding("FAIL", about, on_one_line("; ".join([*said, *allowed])), todo or on_one_line(parts.get("todo", "")))


def graded(about: str, faults: list[str], well: str, todo: str) -> Finding:
    """Return one finding: the faults if there are any, else what is well."""
    return Finding("FAIL", about, "; ".join(faults), todo) if faults else Finding("ok", about, well)


def as_date(at_s: float) -> str:
    """Return a moment as a person compares it with a clock."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
