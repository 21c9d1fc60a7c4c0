"""What `join` and `read_model` were given, checked by type before anything is opened.

Python passes a dict where settings are wanted, or a path where a name is, and the error would come from deep inside. Here each
argument is refused by its name, with what is allowed. What the values mean is checked where they are used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import AtollError, SettingsError
from atoll.base.logs import get
from atoll.base.loop_thread import LoopThread
from atoll.base.units import DAY_S
from atoll.bus.options import COPIES
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.messages import RunRecord, decode, encode
from atoll.wire.region_names import region_name
from atoll.wire.subjects import token

log = get(__name__)

Kinds = tuple[type, ...]
START_S_MAX: Final = DAY_S
IDENTITY: Final = "ATOLL_BROKER__IDENTITY"
"""The setting `broker.identity` as a variable of the environment; of all settings a loop takes this one only."""

OPTIONS: Final[Mapping[str, Kinds]] = {
    "donated": (bool,),
    "log_adoptions": (bool,),
    "encode": (str,),
    "model": (str,),
    "data": (str,),
    "data_blocks": (int,),
    "seed": (int,),
    "stream_bytes_max": (int, type(None)),
    "replicas": (int,),
    "region": (str,),
    "bulk": (Sequence,),
    "patience_s": (int, float),
    "start_s": (int, float),
    "health_file": (Path, type(None)),
    "home": (LoopThread, type(None)),
}
"""The types of options that are checked nowhere else."""


def check_place(broker: object, run: object) -> None:
    """Raise `SettingsError` unless these can be a broker and a run id."""
    if not isinstance(broker, str) and not callable(broker):
        raise _refused("broker", broker, "the broker's URL, or a coroutine function that opens a bus")
    if not isinstance(run, str):
        raise _refused("run", run, "a string")


def checked_start(start_s: float) -> float:
    """Return how long a program had been starting; raise `SettingsError` for what is no such time."""
    if not 0.0 <= start_s <= START_S_MAX:
        raise SettingsError(
            "start_s is out of range", got=start_s, allowed=f"0 to {START_S_MAX:,.0f} s", todo="correct start_s"
        )
    return start_s


def identity_file(broker: object, identity: Path | str | None) -> Path | None:
    """Return the file that says who we are at a broker with an address: the one given, else that of the environment."""
    told = identity if identity is not None or not isinstance(broker, str) else os.environ.get(IDENTITY) or None
    return None if told is None else Path(told)


def check_joining(learner: object, protocol: object, options: object, kind: type) -> None:
    """Raise `SettingsError` unless these are a learner id, settings of a run or None, and options of this `kind`."""
    if not isinstance(learner, str):
        raise _refused("learner", learner, "a string")
    if protocol is not None and not isinstance(protocol, ProtocolSettings):
        todo = "write protocol=ProtocolSettings(...), from atoll.protocol.settings"
        raise _refused("protocol", protocol, "a ProtocolSettings, or None for the defaults", todo)
    if not isinstance(options, kind):
        raise _refused("options", options, f"an atoll.{kind.__name__}", f"write options=atoll.{kind.__name__}(...)")
    _check_fields(options)


def check_offer(record: RunRecord) -> None:
    """Raise `SettingsError` for a record that nobody could read: it is found before anything is created on the broker."""
    token(record.run, "run id")
    token(record.founder, "learner id")
    try:
        decode(RunRecord, encode(record))
    except AtollError as error:
        raise SettingsError(
            "a run cannot be founded with these values",
            got=error.got or error.what,
            allowed="settings of the types that `ProtocolSettings` names; names of leaves up to 256 characters, on one line, "
            "each to be seen",
            todo="correct the value that is named",
        ) from error


def warn_of_ignored(given: ProtocolSettings, agreed: ProtocolSettings) -> None:
    """Log which settings of a learner that joins an existing run have no effect."""
    # The bound of a step's tokens follows from each learner's own batch, the fragments by value from its leaves.
    names = (name for name in given.__struct_fields__ if name not in {"step_tokens_max", "value_fragments"})
    pairs = ((name, getattr(given, name), getattr(agreed, name)) for name in names)
    if other := [f"{name} = {theirs} of the run, not {ours}" for name, ours, theirs in pairs if ours != theirs]:
        log.warning(
            "protocol.ignored",
            settings="; ".join(other),
            why="the founder's settings hold for the whole run",
            todo="found another run, or leave `protocol` away",
        )


def has_left(what: str) -> SettingsError:
    """Return the error of who uses an island after it has left its run."""
    return SettingsError(
        f"{what} comes after this island has left its run",
        got="close() was called, or the `with` block has ended",
        allowed="params and merged() of an island that has left",
        todo="put it inside the `with` block; to train on, join again",
    )


def _check_fields(options: Any) -> None:  # noqa: ANN401  (a dataclass of options)
    """Raise `SettingsError` for the first option whose value has a wrong type."""
    for name in (field.name for field in fields(options)):
        value, kinds = getattr(options, name), OPTIONS.get(name)
        if kinds is None:
            continue
        # A bool is an int to Python; nobody means it as a seed or a number of bytes.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            allowed = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise _refused(f"options.{name}", value, f"{allowed}")
    if isinstance(options.bulk, str) or not all(isinstance(address, str) for address in options.bulk):
        raise _refused("options.bulk", options.bulk, "a list or tuple of addresses")
    if options.replicas not in COPIES:
        allowed = ", ".join(map(str, COPIES))
        raise SettingsError("options.replicas is out of range", got=options.replicas, allowed=allowed)
    if options.taps not in ("bodies", "headers"):
        raise SettingsError("options.taps is unknown", got=repr(options.taps), allowed='"bodies" or "headers"')
    if options.region:
        region_name(options.region, "correct options.region")
    merge = options.merge
    if not isinstance(merge, Mapping) or not all(isinstance(pattern, str) for pattern in merge):
        raise _refused(
            "options.merge", merge, "a dict from patterns on names of leaves to rules, {'*/scale': 'mean'} say"
        )


def _refused(name: str, value: object, allowed: str, todo: str = "") -> SettingsError:
    return SettingsError(
        f"{name} has a wrong type",
        got=f"{name} = {str(value)[:80]!r} ({type(value).__name__})",
        allowed=allowed,
        todo=todo or f"correct {name}",
    )
