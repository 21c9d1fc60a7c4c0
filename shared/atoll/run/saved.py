"""A *saved* run: its whole event log lies in its folder as `events.jsonl`, and no broker is asked.

    OUT/events.jsonl    a line per event, in order: {"sequence": …, "subject": …, "event": {…}}
    OUT/run.json        its name and what its processes agreed on; a copied event log may lack it

A simulated run leaves such a folder. The event log of a run of `atoll up` is in its broker's store, so that one is not a saved
run in this sense. Every reader of a saved run begins here (`atoll why`, `story`, `what-if`, `dashboard`), so all read the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from atoll.base.errors import PeerMisbehaved, SettingsError
from atoll.base.parsing import parsed
from atoll.base.regular_files import lines_of
from atoll.protocol.settings import ProtocolSettings
from atoll.run.folder import SIMULATED, RunFile, read_run_file
from atoll.wire.events import event_of
from atoll.wire.messages import Event

EVENTS_FILE: Final = "events.jsonl"
LINE_BYTES_MAX: Final = 8 << 20
"""Twice what a broker takes as one message."""
_SECTION: Final = "protocol."


class SavedEvent(msgspec.Struct, frozen=True):
    """A line of `events.jsonl`."""

    subject: str
    event: msgspec.Raw


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run that its folder alone tells; without a `run.json` nobody knows its `agreement`, nor whether it was `simulated`."""

    folder: Path
    run: str
    agreement: ProtocolSettings | None = None
    simulated: bool = False

    def events(self) -> Iterator[Event | None]:
        """Yield the event log in order; None stands for a line that cannot be read.

        Raises:
            SettingsError: the file cannot be read.
        """
        return saved_events(self.folder / EVENTS_FILE)


def saved_run(out: Path) -> SavedRun | None:
    """Return the saved run in a folder; None if the folder holds none, or a run that has a broker.

    Raises:
        SettingsError: `run.json` is damaged, or says no agreement that we know.
    """
    file = read_run_file(out)
    if file is None:
        return SavedRun(out, out.resolve().name) if (out / EVENTS_FILE).is_file() else None
    return SavedRun(out, file.run, agreement_of(file), simulated=True) if file.broker == SIMULATED else None


def saved_events(path: Path) -> Iterator[Event | None]:
    """Yield the events of an `events.jsonl`; None stands for a line that cannot be read.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        for line in lines_of(path, LINE_BYTES_MAX):
            try:
                saved = parsed(line or b"", SavedEvent)
                yield event_of(saved.subject, bytes(saved.event))
            except (PeerMisbehaved, msgspec.MsgspecError):
                yield None
    except OSError as error:
        raise SettingsError(
            "the event log of this run cannot be read",
            got=f"{path}: {error.strerror}",
            todo="restore the file, or simulate it again",
        ) from error


def agreement_of(file: RunFile) -> ProtocolSettings:
    """Return what the processes of a run agreed on, by its `run.json`.

    Raises:
        SettingsError: it says no agreement that we know.
    """
    told = {name.removeprefix(_SECTION): value for name, value in file.settings.items() if name.startswith(_SECTION)}
    try:
        return msgspec.convert(told, ProtocolSettings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(
            "run.json says no agreement that we know", got=error, todo="simulate the run again"
        ) from error
