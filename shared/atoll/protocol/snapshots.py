"""A machine as plain values and back: what a dump begins with, so that its facts can be replayed exactly.

`freeze` writes everything that a machine decides by, as JSON; `thaw` builds a machine that decides the same from there on.
Nothing else is kept in a machine: a test plays random worlds on both and compares every command.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from atoll.base.errors import ProtocolMisuse
from atoll.protocol.events import Acknowledge, Dismiss, PushKey
from atoll.protocol.fragment_ledger import FragmentLedger
from atoll.protocol.island import Island, LocalInterval
from atoll.protocol.ledger import EndedLives, Ledger
from atoll.protocol.ownership import Balance, HostHeard, LeaseStanding, Tenure
from atoll.protocol.pacing import ConnectedTime, KnownLearner
from atoll.protocol.round import FragmentRound, Offer
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import FragmentSlot, Settling, Shard
from atoll.protocol.waits import MovingAverage

ODD_CHARS_MAX: Final = 200

Machine = Shard | Island | Tenure | Balance

_ROUND_FIELDS: Final = tuple(name for name in FragmentRound.__dataclass_fields__ if name != "settings")


class SettlingState(msgspec.Struct):
    """One `Settling`."""

    refusals: list[Acknowledge]
    farewells: list[Dismiss]


class SlotState(msgspec.Struct):
    """One `FragmentSlot`; `round` is its round without the settings, which all rounds share."""

    round: dict[str, Any]
    fragment_ledger: FragmentLedger
    offers: list[Offer]
    parked: list[PushKey]
    called_s: float | None
    due_s: float | None
    unkept: SettlingState
    keeping: SettlingState | None
    committing: SettlingState
    again_s: float | None
    written: int = 0
    durable: int = 0
    last_base: int | None = None


class ShardState(msgspec.Struct, tag="shard"):
    """A `Shard`."""

    settings: ProtocolSettings
    shard: int
    slots: dict[int, SlotState]
    ledger: Ledger
    learners: dict[str, KnownLearner]
    quorum: MovingAverage
    sync: MovingAverage
    draining: bool
    finished: bool
    over_s: float | None
    looked_s: float | None
    committing_since: dict[int, float]
    connected: ConnectedTime
    commits: int
    ended: EndedLives = msgspec.field(default_factory=EndedLives)
    step_sizes: list[float] = msgspec.field(default_factory=list)
    totals: list[int] = msgspec.field(default_factory=list)


class IslandState(msgspec.Struct, tag="island"):
    """An `Island`; `in_flight` holds (fragment, push, tokens)."""

    settings: ProtocolSettings
    intervals: dict[int, LocalInterval]
    tokens: int
    steps: int
    pushed: int
    superseded: int
    refused_local: int
    in_flight: list[tuple[int, int, int]]
    draining: bool
    left: bool


class TenureState(msgspec.Struct, tag="tenure"):
    """A `Tenure`."""

    lease_s: float
    standing: LeaseStanding
    epoch: int
    revision: int
    known: bool
    still_s: float
    looked_s: float | None
    renewed_s: float


class BalanceState(msgspec.Struct, tag="balance"):
    """A `Balance`; `settled_s` is None where it never gave a shard away."""

    host: str
    lease_s: float
    others: list[HostHeard]
    settled_s: float | None


State = ShardState | IslandState | TenureState | BalanceState


def freeze(machine: Machine) -> bytes:
    """Return the machine as it is now."""
    return msgspec.json.encode(_state(machine), enc_hook=plain)


def plain(value: Any) -> Any:  # noqa: ANN401  (what no schema of ours holds)
    """Return a number of another library as Python's, and anything else as its text: what a dump shows of an odd value."""
    item = getattr(value, "item", None)
    number = item() if callable(item) and getattr(value, "ndim", None) == 0 else None
    return number if isinstance(number, bool | int | float) else repr(value)[:ODD_CHARS_MAX]


def thaw(frozen: bytes) -> Machine:
    """Return a machine in that state.

    Raises:
        msgspec.ValidationError: for what `freeze` does not write.
        SettingsError: no run agrees on such settings; a machine of them might need any amount of memory.
    """
    state = msgspec.json.decode(frozen, type=State)
    if isinstance(state, ShardState | IslandState):
        state.settings.check()
    if isinstance(state, ShardState):
        return _shard(state)
    if isinstance(state, IslandState):
        return _island(state)
    if isinstance(state, TenureState):
        tenure = Tenure(state.lease_s)
        tenure.standing, tenure.epoch, tenure.revision = state.standing, state.epoch, state.revision
        tenure.known = state.known
        tenure.still_s, tenure.looked_s, tenure.renewed_s = state.still_s, state.looked_s, state.renewed_s
        return tenure
    balance = Balance(state.host, state.lease_s)
    balance.others = {heard.host: heard for heard in state.others}
    balance.settled_s = -math.inf if state.settled_s is None else state.settled_s
    return balance


def _state(machine: Machine) -> State:
    """Return references to what the machine holds; `freeze` encodes them before anything changes."""
    if isinstance(machine, Shard):
        return ShardState(
            settings=machine.settings,
            shard=machine.shard,
            slots={fragment: _slot_state(slot) for fragment, slot in machine.slots.items()},
            ledger=machine.ledger,
            learners=machine.learners,
            quorum=machine.quorum,
            sync=machine.sync,
            draining=machine.draining,
            finished=machine.finished,
            over_s=machine.over_s,
            looked_s=machine.looked_s,
            committing_since=machine.committing_since,
            connected=machine.connected,
            commits=machine.commits,
            ended=machine.ended,
            step_sizes=machine.step_sizes,
            totals=machine.totals,
        )
    if isinstance(machine, Island):
        return IslandState(
            settings=machine.settings,
            intervals=machine.intervals,
            tokens=machine.tokens,
            steps=machine.steps,
            pushed=machine.pushed,
            superseded=machine.superseded,
            refused_local=machine.refused_local,
            in_flight=[(*key, tokens) for key, tokens in machine.in_flight.items()],
            draining=machine.draining,
            left=machine.left,
        )
    if isinstance(machine, Tenure):
        return TenureState(
            machine.lease_s,
            machine.standing,
            machine.epoch,
            machine.revision,
            machine.known,
            machine.still_s,
            machine.looked_s,
            machine.renewed_s,
        )
    if isinstance(machine, Balance):
        settled_s = None if math.isinf(machine.settled_s) else machine.settled_s
        return BalanceState(machine.host, machine.lease_s, list(machine.others.values()), settled_s)
    raise ProtocolMisuse("no machine that can be frozen", got=type(machine).__name__)


def _slot_state(slot: FragmentSlot) -> SlotState:
    return SlotState(
        round={name: getattr(slot.round, name) for name in _ROUND_FIELDS},
        fragment_ledger=slot.fragment_ledger,
        offers=list(slot.offers.values()),
        parked=slot.parked,
        called_s=slot.called_s,
        due_s=slot.due_s,
        unkept=_settling_state(slot.unkept),
        keeping=None if slot.keeping is None else _settling_state(slot.keeping),
        committing=_settling_state(slot.committing),
        again_s=slot.again_s,
        written=slot.written,
        durable=slot.durable,
        last_base=slot.last_base,
    )


def _settling_state(settling: Settling) -> SettlingState:
    return SettlingState(list(settling.refusals.values()), settling.farewells)


def _settling(state: SettlingState) -> Settling:
    return Settling({each.key: each for each in state.refusals}, state.farewells)


def _shard(state: ShardState) -> Shard:
    settings = state.settings
    shard = Shard(settings, state.shard, dict.fromkeys(state.slots, 0))
    agreed = msgspec.to_builtins(settings)
    for fragment, kept in state.slots.items():
        now = msgspec.convert({**kept.round, "settings": agreed}, FragmentRound)
        now.settings = settings
        offers = {offer.key: offer for offer in kept.offers}
        shard.slots[fragment] = FragmentSlot(
            now,
            kept.fragment_ledger,
            offers,
            kept.parked,
            kept.called_s,
            kept.due_s,
            kept.again_s,
            _settling(kept.unkept),
            None if kept.keeping is None else _settling(kept.keeping),
            _settling(kept.committing),
            kept.written,
            kept.durable,
            kept.last_base,
        )
    shard.ledger, shard.learners = state.ledger, state.learners
    shard.quorum, shard.sync = state.quorum, state.sync
    shard.draining, shard.finished, shard.ended = state.draining, state.finished, state.ended
    shard.connected, shard.commits, shard.step_sizes = state.connected, state.commits, state.step_sizes
    shard.over_s, shard.looked_s, shard.totals = state.over_s, state.looked_s, state.totals
    shard.committing_since = state.committing_since
    return shard


def _island(state: IslandState) -> Island:
    island = Island(state.settings, {})
    island.intervals = state.intervals
    island.tokens, island.steps = state.tokens, state.steps
    island.pushed, island.superseded, island.refused_local = state.pushed, state.superseded, state.refused_local
    island.in_flight = {(fragment, push): tokens for fragment, push, tokens in state.in_flight}
    island.draining, island.left = state.draining, state.left
    return island
