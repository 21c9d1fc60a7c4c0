"""A learner's side of the protocol: what it pushes, what it adopts, and where its tokens went.

For each fragment an incarnation is a chain of *local intervals*. An interval begins when the learner adopts a version (the
anchor) and ends when it adopts the next. Within an interval the learner pushes at most one contribution: the
pseudo-gradient of the snapshot at the first call, with the tokens and steps since the anchor. The same durable push answers
later calls for the same base, so tokens of different pushes are disjoint and each has one fate (docs/adr/0004). If the run
ends `together`, a leaving learner also pushes the residual steps that it trained after that push.

    adopt v ──steps──> call: push (tokens a) ──steps (tokens b)──> adopt v+1
                       a: merged, merged late or refused           b: superseded by the overwrite, or carried along

A learner answers a call at once from its last completed step and never waits for a step boundary. A learner with an older
anchor than the call pushes what it has, as a late contribution, and fetches the head that it missed. A learner whose steps
are longer than a round's interval may find the next head waiting at every boundary, before any call found tokens in its
interval. It then pushes first, on its old base, what the overwrite would throw away; the next round takes it late.

After `UNHEARD_CALLS` repeated calls for a version that it has already answered, a learner assumes that its push was refused
and the notice lost. It adopts that version again and may push once more. Otherwise a fragment could wait for ever.

The driver adopts between two steps and tells the machine afterwards. The machine asks for at most one fetch of a fragment at
a time, and only for one that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatchmethod

from atoll.base.errors import ProtocolMisuse
from atoll.protocol.events import (
    Action,
    Adopted,
    CallHeard,
    DrainOrdered,
    Event,
    FetchFailed,
    FetchFragment,
    FragmentFetched,
    HeadHeard,
    Leave,
    Push,
    PushRefused,
    PushSettled,
    StepDone,
)
from atoll.protocol.settings import ProtocolSettings

UNHEARD_CALLS = 3


@dataclass(slots=True)
class Sent:
    """The one push of an interval: its number, tokens and steps, and repeated calls since it became durable."""

    push: int
    tokens: int
    steps: int
    calls: int = 0


@dataclass(slots=True)
class LocalInterval:
    """One fragment since its anchor was adopted: the counters at that moment, the push, and what is being fetched.

    `pushes` counts over the whole incarnation: push numbers of a fragment have no gaps, so shards keep them as a range.
    """

    anchor: int
    from_tokens: int = 0
    from_steps: int = 0
    sent: Sent | None = None
    known: int = 0
    fetching: bool = False
    ready: int | None = None
    pushes: int = 0


class Island:
    """The machine of one incarnation; `anchors` are the versions that it adopted when it joined."""

    def __init__(self, settings: ProtocolSettings, anchors: Mapping[int, int]) -> None:
        """Start with an empty local interval per fragment."""
        self.settings = settings
        self.intervals = {fragment: LocalInterval(anchor, known=anchor) for fragment, anchor in anchors.items()}
        self.tokens = 0
        self.steps = 0
        self.pushed = 0
        self.superseded = 0
        self.refused_local = 0
        self.in_flight: dict[tuple[int, int], int] = {}
        self.draining = False
        self.left = False

    def handle(self, event: Event) -> list[Action]:
        """Take one fact in and return what to do about it."""
        if self.left:
            return []
        return self._handle(event)

    @property
    def lag_versions(self) -> int:
        """Return by how many versions the most outdated fragment is behind its visible head."""
        return max((interval.known - interval.anchor for interval in self.intervals.values()), default=0)

    @property
    def open(self) -> int:
        """Return the token-fragments that have no fate yet and are not pushed."""
        due = len(self.intervals) * self.tokens
        return due - self.pushed - self.superseded - self.refused_local - sum(self.in_flight.values())

    @singledispatchmethod
    def _handle(self, event: Event) -> list[Action]:
        raise ProtocolMisuse("an island does not know this fact", got=type(event).__name__)

    @_handle.register
    def _(self, event: StepDone) -> list[Action]:
        if self.draining:
            raise ProtocolMisuse("a draining learner takes no step")
        self.tokens += event.tokens
        self.steps += 1
        return []

    @_handle.register
    def _(self, event: CallHeard) -> list[Action]:
        interval = self.intervals[event.fragment]
        if interval.anchor > event.version or self.draining:
            return []
        actions = self._learn_of(event.fragment, event.version, event.cause_id)
        if interval.sent is None and self.tokens > interval.from_tokens:
            actions.append(self._push(event.fragment, interval, event.cause_id, final=False))
        elif interval.sent is not None and interval.anchor == event.version:
            actions += self._called_again(event.fragment, interval, interval.sent, event.cause_id)
        return actions

    @_handle.register
    def _(self, event: HeadHeard) -> list[Action]:
        return self._learn_of(event.fragment, event.version, event.cause_id)

    @_handle.register
    def _(self, event: FragmentFetched) -> list[Action]:
        interval = self.intervals[event.fragment]
        interval.fetching = False
        interval.known = max(interval.known, event.version)
        if self.draining:
            return []
        interval.ready = event.version
        if interval.known > event.version:
            return self._fetch(event.fragment, interval, event.cause_id)
        return []

    @_handle.register
    def _(self, event: FetchFailed) -> list[Action]:
        self.intervals[event.fragment].fetching = False
        return []

    @_handle.register
    def _(self, event: Adopted) -> list[Action]:
        interval = self.intervals[event.fragment]
        if event.version < interval.anchor:
            raise ProtocolMisuse("an adoption went back", got=event.version, allowed=f"{interval.anchor} or later")
        actions: list[Action] = []
        if self.settings.adoption != "carry" and interval.sent is None and self.tokens > interval.from_tokens:
            actions.append(self._push(event.fragment, interval, event.cause_id or "rescue", final=False))
        sent_tokens, sent_steps = (interval.sent.tokens, interval.sent.steps) if interval.sent else (0, 0)
        if self.settings.adoption == "carry":
            interval.from_tokens += sent_tokens
            interval.from_steps += sent_steps
        else:
            self.superseded += self.tokens - interval.from_tokens - sent_tokens
            interval.from_tokens, interval.from_steps = self.tokens, self.steps
        interval.anchor, interval.sent = event.version, None
        interval.known = max(interval.known, event.version)
        if interval.ready is not None and interval.ready <= event.version:
            interval.ready = None
        return actions

    @_handle.register
    def _(self, event: PushSettled) -> list[Action]:
        tokens = self.in_flight.pop((event.fragment, event.push))
        interval = self.intervals[event.fragment]
        ours = interval.sent is not None and interval.sent.push == event.push
        actions: list[Action] = []
        if not event.reason:
            self.pushed += tokens
            actions = self._last(event.fragment, interval, event.cause_id) if ours and self.draining else []
        elif event.reason == "not_finite":
            self.refused_local += tokens
            actions = self._fetch(event.fragment, interval, event.cause_id) if ours else []
        elif ours:
            interval.sent = None
        else:
            self.superseded += tokens
        return actions + self._leave_when_done(event.cause_id)

    @_handle.register
    def _(self, event: PushRefused) -> list[Action]:
        interval = self.intervals[event.fragment]
        if self.draining or interval.sent is None or interval.sent.push != event.push:
            return []
        return self._fetch(event.fragment, interval, event.cause_id)

    @_handle.register
    def _(self, event: DrainOrdered) -> list[Action]:
        if self.draining:
            return []
        self.draining = True
        actions = [
            push
            for fragment, interval in self.intervals.items()
            for push in self._last(fragment, interval, event.cause_id)
        ]
        return actions + self._leave_when_done(event.cause_id)

    def _last(self, fragment: int, interval: LocalInterval, cause_id: str) -> list[Action]:
        """Push what an interval holds and was never pushed; residual steps after its push only if the run ends together.

        Residual steps go on from the push, so their base is the version that the push becomes part of: the next one, unless a
        later one is known. They wait until the push is durable: then its snapshot is known, and no later push can overtake it.
        """
        sent = interval.sent
        if sent is None:
            open_tokens = self.tokens > interval.from_tokens
            return [self._push(fragment, interval, cause_id, final=True)] if open_tokens else []
        rest = self.tokens - interval.from_tokens - sent.tokens
        if self.settings.ending == "apart" or not rest or (fragment, sent.push) in self.in_flight:
            return []
        interval.anchor = interval.known = max(interval.known, interval.anchor + 1)
        interval.from_tokens, interval.from_steps = interval.from_tokens + sent.tokens, interval.from_steps + sent.steps
        interval.ready = None
        return [self._push(fragment, interval, cause_id, final=True, onward=True)]

    def _called_again(self, fragment: int, interval: LocalInterval, sent: Sent, cause_id: str) -> list[Action]:
        """Count a call that a durable push of ours has answered; after some of them, begin anew from the anchor."""
        if (fragment, sent.push) in self.in_flight:
            return []
        sent.calls += 1
        return self._fetch(fragment, interval, cause_id) if sent.calls % UNHEARD_CALLS == 0 else []

    def _learn_of(self, fragment: int, version: int, cause_id: str) -> list[Action]:
        """Note that `version` is visible; fetch it unless it is here or on its way."""
        interval = self.intervals[fragment]
        interval.known = max(interval.known, version)
        newest = interval.anchor if interval.ready is None else max(interval.anchor, interval.ready)
        if interval.known <= newest or self.draining:
            return []
        return self._fetch(fragment, interval, cause_id)

    def _fetch(self, fragment: int, interval: LocalInterval, cause_id: str) -> list[Action]:
        if interval.fetching or self.draining:
            return []
        interval.fetching = True
        return [FetchFragment(fragment=fragment, version=max(interval.known, interval.anchor), cause_id=cause_id)]

    def _push(
        self, fragment: int, interval: LocalInterval, cause_id: str, *, final: bool, onward: bool = False
    ) -> Push:
        interval.pushes += 1
        interval.sent = Sent(interval.pushes, self.tokens - interval.from_tokens, self.steps - interval.from_steps)
        self.in_flight[fragment, interval.pushes] = interval.sent.tokens
        return Push(
            fragment=fragment,
            push=interval.pushes,
            base_version=interval.anchor,
            tokens=interval.sent.tokens,
            steps=interval.sent.steps,
            trained_tokens=self.tokens,
            final=final,
            onward=onward,
            cause_id=cause_id,
        )

    def _leave_when_done(self, cause_id: str) -> list[Action]:
        """Close the ledger once nothing is in flight: tokens trained after the last push are superseded."""
        if not self.draining or self.in_flight:
            return []
        self.superseded += self.open
        self.left = True
        return [Leave(cause_id=cause_id)]
