"""The fields of each kind of event, as a reader of the event log takes them: an event lacks none of them, and may have more."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.parsing import parsed
from atoll.base.quantities import Count
from atoll.protocol.ledger import Ledger
from atoll.protocol.reasons import RoundReasons
from atoll.wire.messages import Event
from atoll.wire.traffic import LinkTraffic

F = TypeVar("F", bound=msgspec.Struct)


class Contributor(msgspec.Struct, frozen=True):
    """One contribution to a round, and what caused it.

    Where a run merges robustly: how many of its slices were shortened, and in how many it was not heard.
    """

    learner: str
    incarnation: int
    age: int
    tokens: int
    weight: float
    push: int = 0
    cause_id: str = ""
    shortened: int = 0
    unheard: int = 0


class RoundView(msgspec.Struct, frozen=True):
    """The fields of a `round` event: one commit, what made its round end, and why that took as long as it did."""

    fragment: int
    version: int
    contributors: tuple[Contributor, ...]
    tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    quorum_wait_s: float = 0.0
    grace_s: float = 0.0
    waited_s: float = 0.0
    merge_s: float = 0.0
    commit_s: float = 0.0
    end: str = ""
    live: int = 0
    run_tokens: int = 0
    parameters: int = 0
    queued_s: float = 0.0
    cause_id: str = ""
    why: RoundReasons | None = None


class JoinedEvent(msgspec.Struct, frozen=True):
    """The fields of a `joined` event."""

    incarnation: int
    founder: bool = False
    versions_max: int = 0
    took_s: float = 0.0


class LeftEvent(msgspec.Struct, frozen=True):
    """The fields of a `left` event."""

    incarnation: int
    tokens: int
    steps: int


class RefusedContribution(msgspec.Struct, frozen=True):
    """One contribution that was refused."""

    reason: str
    learner: str = ""


class RefusedEvent(msgspec.Struct, frozen=True):
    """The fields of a `refused` event."""

    refusals: tuple[RefusedContribution, ...]


class JunkEvent(msgspec.Struct, frozen=True):
    """The fields of a `junk` event: what a shard dropped since the last one, by reason."""

    reasons: dict[str, Count]


class QuarantineEvent(msgspec.Struct, frozen=True):
    """The fields of a `quarantined` event: the isolated learner, its number of offences, and the last offence."""

    learner: str
    incarnation: int
    offences: int
    reason: str


class ClosedEvent(msgspec.Struct, frozen=True):
    """The fields of a `ledger` event: a shard's closing ledger; a large one comes in parts."""

    ledger: Ledger
    part: int = 0
    commits: int = 0
    reason: str = ""


class ReportedTotals(msgspec.Struct, frozen=True):
    """The fields of a `moved` event: the traffic of a learner's incarnation, or of a process that serves `shards`."""

    role: str
    moved: LinkTraffic
    incarnation: int = 0
    shards: tuple[int, ...] = ()


class ValidationEvent(msgspec.Struct, frozen=True):
    """The fields of a `validation` event; `average` is measured on the averaged values, where the run keeps them."""

    run_tokens: int
    bits_per_byte: float
    versions_min: int = 0
    versions_max: int = 0
    average: float | None = None


def fields_of(event: Event, kind: type[F]) -> F:
    """Return the fields of `event` as `kind`; raise `PeerMisbehaved` if they are not."""
    try:
        return parsed(msgspec.json.encode(event.fields), kind)
    except msgspec.MsgspecError as error:
        raise PeerMisbehaved(f"not the fields of a {event.kind}", got=str(error)) from error
