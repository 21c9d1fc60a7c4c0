"""The last facts of one machine, kept while it works and replayable afterwards: one wrapper for every machine.

    driver ── fact ──► FactRecorder.handle ──► machine.handle ──► commands
                          │ append
                          ▼
       former state + its facts │ newer state + its facts        (what came before is forgotten)

Every `FACTS_MIN` facts the machine is frozen (`freeze`), and the facts before the former snapshot are dropped. So a dump
always holds the state that its first fact met, and replaying it gives the same commands. A machine that is large is frozen
less often (`BYTES_PER_FACT`), one beyond `STATE_BYTES_MAX` not again: its facts are kept to be read, not to be replayed.

A dump is lines of JSON: a header (which machine, why it was written, the state), then one fact per line. It holds names,
numbers and reasons, no tensors and no addresses of brokers with their passwords.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, overload

import msgspec

from atoll.base.errors import DataError, ProtocolMisuse, SettingsError, redact_json
from atoll.base.parsing import parsed
from atoll.protocol import events, ownership
from atoll.protocol.events import Acknowledge, ArmTimer, Command, Commit, Dismiss, Fact, PushKey, ShardCommand
from atoll.protocol.invariants import check_island, check_shard
from atoll.protocol.island import Island, LocalInterval
from atoll.protocol.ledger import EndedLives, FragmentLedger, Ledger
from atoll.protocol.ownership import Balance, HandOver, HostHeard, LeaseStanding, Tenure
from atoll.protocol.pacing import ConnectedTime, KnownLearner, MovingAverage
from atoll.protocol.round import FragmentRound, Offer
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import FragmentSlot, Settling, Shard

C = TypeVar("C", bound=Command)

ODD_CHARS_MAX: Final = 200
_ROUND_FIELDS: Final = tuple(name for name in FragmentRound.__dataclass_fields__ if name != "settings")
_OTHER_FORM: Final = ("round", "offers", "unkept", "keeping", "committing")
FACTS_MIN: Final = 1024
FACTS_MAX: Final = 1 << 16
BYTES_PER_FACT: Final = 256
STATE_BYTES_MAX: Final = FACTS_MAX * BYTES_PER_FACT
FORMAT: Final = 1
FACTS: Final[dict[str, type[Fact]]] = {
    kind.__name__: kind
    for module in (events, ownership)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Fact) and kind is not Fact
}


class DumpHeader(msgspec.Struct, kw_only=True):
    """The first line of a dump: what it is of, why it was written, and the state that its first fact met."""

    name: str
    why: str
    facts: int
    facts_before: int
    broke: str = ""
    state: msgspec.Raw = msgspec.Raw(b"null")
    format: int = FORMAT


@dataclass(slots=True)
class Stretch:
    """Facts in order, and the machine before the first of them; `state` is None where it was too large to be frozen."""

    state: bytes | None
    facts: list[Fact]


class FactRecorder(Generic[C]):
    """A machine under a `name`, and its last facts. Not safe for two threads; `lines` may be called from any."""

    @overload
    def __init__(self: FactRecorder[ShardCommand], name: str, machine: Shard, facts_min: int = FACTS_MIN) -> None: ...
    @overload
    def __init__(
        self: FactRecorder[Command], name: str, machine: Island | Tenure | Balance, facts_min: int = FACTS_MIN
    ) -> None: ...
    def __init__(self, name: str, machine: Machine, facts_min: int = FACTS_MIN) -> None:
        self.name = name
        self.machine = machine
        self.broke = ""
        self._facts_min = facts_min
        self._former = Stretch(None, [])
        self._now = Stretch(freeze(machine), [])
        self._due = self._interval(self._now.state)
        self._dropped = 0

    def handle(self, fact: Fact) -> list[C]:
        """Tell the machine a fact and return its commands; a machine that breaks leaves the fact as the last one."""
        facts = self._now.facts
        if len(facts) >= self._due:
            facts = self._turn()
        facts.append(fact)
        try:
            # Each driver tells its own machine its own facts, and gets the commands of that machine (`__init__`).
            return self.machine.handle(fact)  # type: ignore[arg-type, return-value]
        except Exception as error:
            self.broke = f"{type(error).__name__}: {error}"
            raise

    def lines(self, why: str) -> Iterator[bytes]:
        """Yield the lines of a dump of this moment."""
        former, now = self._former, self._now
        facts = [*former.facts, *now.facts]
        first = former if former.facts else now
        whole = first.state is not None and now.state is not None
        header = DumpHeader(
            name=self.name,
            why=why,
            facts=len(facts),
            facts_before=self._dropped,
            broke=self.broke,
            state=msgspec.Raw(first.state if whole and first.state is not None else b"null"),
        )
        yield redact_json(msgspec.json.encode(header))
        for fact in facts:
            yield fact_line(fact)

    def _turn(self) -> list[Fact]:
        self._dropped += len(self._former.facts)
        small = self._now.state is not None and len(self._now.state) <= STATE_BYTES_MAX
        former, self._now = self._now, Stretch(freeze(self.machine) if small else None, [])
        self._former = former
        self._due = self._interval(self._now.state)
        return self._now.facts

    def _interval(self, state: bytes | None) -> int:
        return max(self._facts_min, min(FACTS_MAX, 0 if state is None else len(state) // BYTES_PER_FACT))


class Replay:
    """A dump, read again: `header`, and `play`, which tells a new machine the same facts."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        """Read the whole dump. Raises `DataError`: it is no dump, or one whose beginning was too large to be kept."""
        rows = iter(lines)
        try:
            self.header = parsed(next(rows, b""), DumpHeader)
            if self.header.format != FORMAT:
                raise DataError(
                    "a dump of another format",
                    got=self.header.format,
                    allowed=FORMAT,
                    todo="replay it with its own Atoll",
                )
            self.facts = [_fact(row) for row in rows if row.strip()]
            if bytes(self.header.state) == b"null":
                raise DataError(
                    "this dump holds facts only: the machine was too large to be frozen",
                    got=f"{len(self.facts)} facts",
                    todo="read its lines; each is one fact",
                )
            self.machine = thaw(bytes(self.header.state))
        except (SettingsError, msgspec.MsgspecError, LookupError, ValueError, ArithmeticError, RecursionError) as error:
            raise DataError(
                "not a dump of a machine's facts, or a damaged one",
                got=f"{type(error).__name__}: {error}",
                todo="name a file facts-….jsonl as a process wrote it",
            ) from error

    @property
    def lost(self) -> int:
        """Return how many facts the dump once had and has no more; the last ones, which matter most."""
        return max(0, self.header.facts - len(self.facts))

    def play(self) -> Iterator[tuple[Fact, list[Command]]]:
        """Yield each fact with the commands that it leads to; raise what the machine, or an invariant, raises."""
        for fact in self.facts:
            commands = self.machine.handle(fact)  # type: ignore[arg-type]  # as in `FactRecorder.handle`
            if isinstance(self.machine, Shard):
                check_shard(self.machine)
            elif isinstance(self.machine, Island):
                check_island(self.machine)
            yield fact, list(commands)

    def logbook(self) -> Iterator[str]:
        """Yield a line per fact, as in the golden logbooks, and a last one that says where it breaks, if it does."""
        facts = iter(self.facts)
        try:
            for fact, commands in self.play():
                next(facts)
                yield logbook_line(self.header.name, fact, commands)
        except Exception as error:  # whatever breaks a machine is what a dump is for
            fact = next(facts)
            yield f"{fact.at_s:6.2f} {self.header.name:8} {describe(fact)} -> BREAKS: {type(error).__name__}"
            raise


def first_line(name: str, why: str, machine: Machine) -> bytes:
    """Return the first line of a dump that begins now, of a machine as it is; `fact_line` gives the others."""
    header = DumpHeader(name=name, why=why, facts=0, facts_before=0, state=msgspec.Raw(freeze(machine)))
    return redact_json(msgspec.json.encode(header))


def fact_line(fact: Fact) -> bytes:
    """Return a fact as a line of a dump."""
    return redact_json(msgspec.json.encode([type(fact).__name__, fact], enc_hook=plain))


def _fact(row: bytes) -> Fact:
    name, fields = parsed(row, tuple[str, msgspec.Raw])
    return parsed(bytes(fields), FACTS[name])


def logbook_line(name: str, fact: Fact, commands: Iterable[Command], at_s: float | None = None) -> str:
    """Return one readable line: when (the fact's own time, if not said), which machine, what it was told and answered."""
    done = ", ".join(describe(command) for command in commands) or "nothing"
    return f"{fact.at_s if at_s is None else at_s:6.2f} {name:8} {describe(fact)} -> {done}"


def describe(value: Fact | Command) -> str:
    """Return a fact or command as `Name(what matters)`; numbers carry the first letter of what they number."""
    shown = []
    for name in ("learner", "key", "fragment", "version", "name", "push", "base_version", "attempt", "age", "fate"):
        got: Any = getattr(value, name, None)
        if isinstance(got, tuple):
            shown.append("/".join(str(part) for part in got))
        elif isinstance(got, str) and got:
            shown.append(got)
        elif got is not None and got != "":
            shown.append(f"{name[0]}{got}")
    if isinstance(value, ArmTimer):
        shown.append(f"at {value.due_s:.2f}")
    if isinstance(value, Commit):
        shown.append(f"of {len(value.shares)}: {value.end}")
    reason = getattr(value, "reason", "")
    return f"{type(value).__name__}({' '.join([*shown, *([reason] if reason else [])])})"


def freeze(machine: Machine) -> bytes:
    """Return the machine as it is now."""
    return msgspec.json.encode(_state(machine), enc_hook=plain)


def thaw(frozen: bytes) -> Machine:
    """Return a machine in that state.

    Raises:
        msgspec.ValidationError: for what `freeze` does not write.
        SettingsError: no run agrees on such settings; a machine of them might need any amount of memory.
    """
    state = msgspec.json.decode(frozen, type=State)
    machine: Machine
    if isinstance(state, ShardState):
        machine = Shard(state.settings.check(), state.shard, dict.fromkeys(state.slots, 0))
        _restore(machine, state, but=("settings", "shard", "slots"))
        machine.slots = {fragment: _slot(kept, state.settings) for fragment, kept in state.slots.items()}
    elif isinstance(state, IslandState):
        machine = Island(state.settings.check(), {})
        _restore(machine, state, but=("settings", "in_flight"))
        machine.in_flight = {(fragment, push): tokens for fragment, push, tokens in state.in_flight}
    elif isinstance(state, TenureState):
        machine = Tenure(state.lease_s)
        _restore(machine, state)
    else:
        machine = Balance(state.host, state.lease_s)
        machine.others = {heard.host: heard for heard in state.others}
        machine.settled_s = -math.inf if state.settled_s is None else state.settled_s
        machine.given, machine.vain = state.given, state.vain
    return machine


Machine = Shard | Island | Tenure | Balance


class SettlingState(msgspec.Struct):
    """One `Settling`."""

    refusals: list[Acknowledge]
    farewells: list[Dismiss]

    @classmethod
    def of(cls, settling: Settling) -> SettlingState:
        """Return the state of a settling."""
        return cls(list(settling.refusals.values()), settling.farewells)

    def settling(self) -> Settling:
        """Return the settling in this state."""
        return Settling({each.key: each for each in self.refusals}, self.farewells)


class SlotState(msgspec.Struct, kw_only=True):
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
    fold_due: int = 0
    last_base: int | None = None


class ShardState(msgspec.Struct, tag="shard", kw_only=True):
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


class IslandState(msgspec.Struct, tag="island", kw_only=True):
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
    given: HandOver | None = None
    vain: int = 0


State = ShardState | IslandState | TenureState | BalanceState


def plain(value: Any) -> Any:  # noqa: ANN401  (what no schema of ours holds)
    """Return a number of another library as Python's, and anything else as its text: what a dump shows of an odd value."""
    item = getattr(value, "item", None)
    number = item() if callable(item) and getattr(value, "ndim", None) == 0 else None
    return number if isinstance(number, bool | int | float) else repr(value)[:ODD_CHARS_MAX]


def _restore(machine: Machine, state: State, but: tuple[str, ...] = ()) -> None:
    for name in state.__struct_fields__:
        if name not in but:
            setattr(machine, name, getattr(state, name))


def _state(machine: Machine) -> State:
    """Return references to what the machine holds; `freeze` encodes them before anything changes."""
    if isinstance(machine, Shard):
        slots = {fragment: _slot_state(slot) for fragment, slot in machine.slots.items()}
        return ShardState(slots=slots, **_attributes(machine, ShardState, but=("slots",)))
    if isinstance(machine, Island):
        in_flight = [(*key, tokens) for key, tokens in machine.in_flight.items()]
        return IslandState(in_flight=in_flight, **_attributes(machine, IslandState, but=("in_flight",)))
    if isinstance(machine, Tenure):
        return TenureState(**_attributes(machine, TenureState))
    if isinstance(machine, Balance):
        settled_s = None if math.isinf(machine.settled_s) else machine.settled_s
        others = list(machine.others.values())
        return BalanceState(machine.host, machine.lease_s, others, settled_s, machine.given, machine.vain)
    raise ProtocolMisuse("no machine that can be frozen", got=type(machine).__name__)


def _attributes(source: object, kind: type[msgspec.Struct], but: tuple[str, ...] = ()) -> dict[str, Any]:
    return {name: getattr(source, name) for name in kind.__struct_fields__ if name not in but}


def _slot_state(slot: FragmentSlot) -> SlotState:
    return SlotState(
        round={name: getattr(slot.round, name) for name in _ROUND_FIELDS},
        offers=list(slot.offers.values()),
        unkept=SettlingState.of(slot.unkept),
        keeping=None if slot.keeping is None else SettlingState.of(slot.keeping),
        committing=SettlingState.of(slot.committing),
        **_attributes(slot, SlotState, but=_OTHER_FORM),
    )


def _slot(kept: SlotState, settings: ProtocolSettings) -> FragmentSlot:
    now = msgspec.convert({**kept.round, "settings": msgspec.to_builtins(settings)}, FragmentRound)
    now.settings = settings
    return FragmentSlot(
        now,
        offers={offer.key: offer for offer in kept.offers},
        unkept=kept.unkept.settling(),
        keeping=None if kept.keeping is None else kept.keeping.settling(),
        committing=kept.committing.settling(),
        **_attributes(kept, SlotState, but=_OTHER_FORM),
    )
