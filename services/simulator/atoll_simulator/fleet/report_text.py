"""The results of simulated fleets, as text for a terminal and as plain data for a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path

from atoll.base.atomic_files import write_whole
from atoll.base.errors import SettingsError
from atoll.base.wording import counted
from atoll_simulator.fleet.cells import RIGID, FleetCell, per_cent, size_text
from atoll_simulator.fleet.rounds import RoundsReport
from atoll_simulator.fleet.scavenging import JoinCost, Scavenged


def goodput_tables(cells: Sequence[FleetCell]) -> str:
    """Return goodput and uptime as two tables in per cent, each with the 95 % interval over the seeds."""
    parts = []
    for what in ("goodput", "uptime"):
        columns = list(dict.fromkeys(cell.chips for cell in cells))
        lines = [f"{what + ', %':<12}" + "".join(f"{size_text(chips):>14}" for chips in columns)]
        for system in dict.fromkeys(cell.system for cell in cells):
            row = [cell for cell in cells if cell.system == system]
            lines.append(f"{_name(system):<12}" + "".join(f"{per_cent(getattr(cell, what)):>14}" for cell in row))
        parts.append("\n".join(lines))
    if any(cell.system == RIGID for cell in cells):
        parts.append(
            f"{_name(RIGID)}: spares take the place of what failed at once and are not counted; `atoll plan` counts them"
        )
    if any(cell.used_chips < cell.chips for cell in cells):
        least = min(cells, key=lambda cell: cell.used_chips / cell.chips)
        parts.append(
            f"shares are of the chips in whole slices: {least.used_chips} of {least.chips} in {_name(least.system)}, or more"
        )
    return "\n\n".join(parts)


def window_table(told: RoundsReport) -> str:
    """Return the results of a window of rounds."""
    spread = ", ".join(f"{count} of {n}" for n, count in sorted(told.contributors.items(), reverse=True))
    failures, again = counted(told.chips.failures, "failure"), f"called again {counted(told.called_again, 'time')}"
    rows = [
        ("window", f"{told.window_s:.0f} s, {told.steps:,} steps of all learners, {failures}"),
        ("chips", f"{told.used_chips} in whole slices"),
        ("goodput of the chips", f"{100 * told.chips.goodput:.2f} %"),
        ("capacity trained on", f"{100 * told.stepped:.2f} %"),
        ("participation", f"{100 * told.participation:.2f} % of the learners' time is in finished steps"),
        ("waited", f"{abs(told.waited_s):.3g} s of all learners together"),
        ("commits", f"{told.commits:,} in {counted(told.rounds, 'round')}, {again}"),
        ("contributors", f"{told.contributors_mean:.2f} per commit ({spread})"),
        ("merged", f"{100 * told.share('merged'):.2f} %"),
        ("merged late", f"{100 * told.share('merged_late'):.2f} %"),
        ("superseded", f"{100 * told.share('superseded'):.2f} %"),
        ("refused", f"{100 * told.share('refused:'):.2f} %"),
        ("lost", f"{100 * told.share('lost'):.2f} %"),
        ("ledger", "exact" if told.exact else "DO NOT ADD UP"),
        ("sent", f"{told.up_gbit_s:.2f} Gbit/s per learner, on average"),
    ]
    return "\n".join(f"{name:<22}{text}" for name, text in rows)


def scavenging_table(rows: Sequence[Scavenged]) -> str:
    """Return the table of scavenging: times over those without help."""
    head = (
        f"{'extra':>7}{'0.5+0.5/(1+x)':>15}{'learners':>10}{'off by':>9}{'elastic DP':>12}{'joins':>7}{'copy':>9}"
        f"{'merged':>9}{'ledger':>8}"
    )
    lines = [
        f"{100 * row.extra:>+6.0f}%{row.ideal:>15.3f}{row.learners:>10.3f}{100 * (row.learners / row.ideal - 1):>+8.2f}%"
        f"{row.elastic:>12.3f}{row.joins:>7}{f'{row.join_s:.1f} s' if row.joins else '-':>9}"
        f"{100 * row.merged:>8.1f}%{'exact' if row.exact else 'WRONG':>8}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def write_answer(folder: Path, name: str, **said: object) -> list[Path]:
    """Write the question and the result to `name`.json in `folder`, and return its path."""
    return [_write(folder, f"{name}.json", json.dumps(said, indent=2, default=_plain) + "\n")]


def join_table(rows: Sequence[JoinCost]) -> str:
    """Return the table of joins, in steps."""
    head = f"{'copy':>8}{'others lost':>14}{'steps after':>14}{'merged after':>14}{'ledger':>8}"
    lines = [
        f"{row.copy_steps:>8g}{row.others_lost_steps:>14.2f}{row.stepping_steps:>14.1f}"
        f"{'never' if row.merged_steps is None else format(row.merged_steps, '.1f'):>14}"
        f"{'exact' if row.exact else 'WRONG':>8}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def folder_for(out: str | None, *names: str) -> Path | None:
    """Return the folder for `names`, created if needed; raise `SettingsError` if they cannot be written there."""
    if out is None:
        return None
    if not out.strip():
        raise SettingsError(
            "--out names no folder", got=repr(out), todo="name one, or leave --out away; . is this folder"
        )
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise SettingsError(
            "--out is no folder that can be written", got=out, todo=f"choose another ({error.strerror})"
        ) from error
    for name in names:
        if (folder / name).is_dir():
            raise SettingsError(
                "--out holds a folder where a file is to be", got=folder / name, todo="choose another folder"
            )
    return folder


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise SettingsError("a result cannot be written", got=path, todo=f"see to it ({error.strerror})") from error
    return path


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def _name(system: str) -> str:
    return f"M = {system}" if system.isdigit() else f"1 {system}"
