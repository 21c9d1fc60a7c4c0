"""A learner's side of the protocol: what it pushes, what it adopts, and where its tokens went.

For each fragment an incarnation is a chain of *local intervals*. An interval begins when the learner adopts a version (the
anchor) and ends when it adopts the next. Within an interval the learner pushes at most one contribution: the pseudo-gradient
of the snapshot at the first call, with the tokens and steps since the anchor. The same durable push answers later calls for
the same base, so tokens of different pushes are disjoint and each has one fate (docs/adr/0004). If the run ends `together`, a
leaving learner also pushes the residual steps that it trained after that push.

    adopt v ──steps──> call: push (tokens a) ──steps (tokens b)──> adopt v+1
                       a: merged, merged late or refused           b: superseded by the overwrite, or carried along

A learner answers a call at once from its last completed step. One with an older anchor than the call pushes what it has, as a
late contribution, and fetches the head that it missed; it does not push what is too late to be merged (`age_max`). One whose
steps are longer than a round's interval may find the next head waiting at every boundary, before any call found tokens in its
interval. It then pushes first, on its old base, what the overwrite would throw away.

After `UNHEARD_CALLS` repeated calls for a version that it has already answered, a learner assumes that its push was refused
and the notice lost. It adopts that version again and may push once more. Otherwise a fragment could wait for ever.

A call, a tap or a verdict is a hint that may be wrong and repeated for ever: it leads to one look at the record. A look that
finds nothing newer puts off the next one, up to `LOOK_S_MAX`, and to begin anew from the same version is put off likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.base.errors import ProtocolMisuse
from atoll.protocol.events import (
    Adopt,
    Adopted,
    CallHeard,
    Command,
    DrainOrdered,
    Fact,
    FetchFailed,
    FetchFragment,
    FragmentFetched,
    HeadHeard,
    Leave,
    NothingNewer,
    Push,
    PushRefused,
    PushSettled,
    SnapshotKept,
    StepDone,
    id_of,
)
from atoll.protocol.pacing import RECALL_S_MIN
from atoll.protocol.settings import ProtocolSettings

UNHEARD_CALLS = 3
LOOK_S = 0.1
LOOK_S_MAX = 1.0
AGAIN_S = 0.5
AGAIN_S_MAX = 60.0


@dataclass(slots=True)
class Sent:
    """The one push of an interval: its number, tokens and steps, and repeated calls since it became durable.

    Calls count that come at least as far apart as a shard repeats them; `called_s` is when the last one came.
    """

    push: int
    tokens: int
    steps: int
    calls: int = 0
    called_s: float | None = None


@dataclass(slots=True)
class LocalInterval:
    """One fragment since its anchor was adopted: the counters at that moment, the push, and what is being fetched.

    `pushes` counts over the whole incarnation: push numbers of a fragment have no gaps, so shards keep them as a range.
    `known` is the newest version that a record has shown, `hinted` the newest that messages have claimed since the fetch
    under way began; `ready` is fetched, and `adopting` on its way into the parameters. `unread` is the push whose snapshot is
    still to be kept, 0 for none. `vain` looks in a row found nothing newer, and none follows before `look_s`; likewise `again`
    and `again_s` for beginning anew from the same version.
    """

    anchor: int
    from_tokens: int = 0
    from_steps: int = 0
    sent: Sent | None = None
    known: int = 0
    hinted: int = 0
    fetching: bool = False
    ready: int | None = None
    adopting: int | None = None
    unread: int = 0
    pushes: int = 0
    vain: int = 0
    look_s: float | None = None
    again: int = 0
    again_s: float | None = None

    @property
    def newest(self) -> int:
        """Return the newest version that is here: adopted, or ready to be."""
        return self.anchor if self.ready is None else max(self.anchor, self.ready)


class Island:
    """The machine of one incarnation; `anchors` are the versions that it adopted when it joined."""

    def __init__(self, settings: ProtocolSettings, anchors: Mapping[int, int]) -> None:
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

    def handle(self, event: Fact) -> list[Command]:
        """Take one fact in and return what to do about it."""
        if self.left:
            return []
        rule = self._RULES.get(type(event))
        if rule is None:
            raise ProtocolMisuse("an island does not know this fact", got=type(event).__name__)
        return rule(self, event)

    @property
    def lag_versions(self) -> int:
        """Return by how many versions the most outdated fragment is behind its visible head."""
        return max((interval.known - interval.anchor for interval in self.intervals.values()), default=0)

    @property
    def open(self) -> int:
        """Return the token-fragments that have no fate yet and are not pushed."""
        due = len(self.intervals) * self.tokens
        return due - self.pushed - self.superseded - self.refused_local - sum(self.in_flight.values())

    def _on_step_done(self, event: StepDone) -> list[Command]:
        if self.draining:
            raise ProtocolMisuse("a draining learner takes no step")
        self.tokens += event.tokens
        self.steps += 1
        # A fragment whose pushed snapshot is still to be kept waits for a later boundary: what was pushed must be known.
        return [
            self._adopt(fragment, interval, interval.ready)
            for fragment, interval in self.intervals.items()
            if interval.ready is not None and interval.adopting is None and not interval.unread
        ]

    def _on_call_heard(self, event: CallHeard) -> list[Command]:
        interval = self.intervals[event.fragment]
        # While it is adopted, a push would count steps that the adoption is about to carry or overwrite.
        if interval.anchor > event.version or interval.adopting is not None or self.draining:
            return []
        actions = self._hear_of(event.fragment, interval, event.version, event)
        if interval.sent is None and self.tokens > interval.from_tokens and self._counts(interval, event.version):
            keep = self._goes_on_from_pushes(event.fragment)
            actions.append(self._push(event.fragment, interval, event.cause_id, keep=keep))
        elif interval.sent is not None and interval.anchor == event.version:
            actions += self._called_again(event.fragment, interval, interval.sent, event)
        return actions

    def _on_head_heard(self, event: HeadHeard) -> list[Command]:
        interval = self.intervals[event.fragment]
        if event.proven:
            interval.known = max(interval.known, event.version)
        return self._hear_of(event.fragment, interval, event.version, event)

    def _on_fragment_fetched(self, event: FragmentFetched) -> list[Command]:
        interval = self.intervals[event.fragment]
        interval.fetching = False
        if event.version > interval.newest:
            interval.vain, interval.look_s = 0, None
        interval.known = max(interval.known, event.version)
        if self.draining:
            return []
        interval.ready = event.version
        return self._hear_of(event.fragment, interval, interval.hinted, event)

    def _on_nothing_newer(self, event: NothingNewer) -> list[Command]:
        interval = self.intervals[event.fragment]
        interval.fetching = False
        interval.vain += 1
        interval.look_s = event.at_s + min(LOOK_S_MAX, LOOK_S * 2.0 ** min(interval.vain, 16))
        return self._hear_of(event.fragment, interval, interval.hinted, event)

    def _on_fetch_failed(self, event: FetchFailed) -> list[Command]:
        self.intervals[event.fragment].fetching = False
        return []

    def _on_adopted(self, event: Adopted) -> list[Command]:
        interval = self.intervals[event.fragment]
        if event.version < interval.anchor:
            raise ProtocolMisuse("an adoption went back", got=event.version, allowed=f"{interval.anchor} or later")
        actions: list[Command] = []
        carried = self.settings.of(event.fragment).adoption == "carry" and not event.overwritten
        heard = carried or event.overwritten or interval.sent is not None
        if not heard and self.tokens > interval.from_tokens and self._counts(interval, event.version):
            actions.append(self._push(event.fragment, interval, event.cause_id or "rescue"))
        sent_tokens, sent_steps = (interval.sent.tokens, interval.sent.steps) if interval.sent else (0, 0)
        if carried:
            interval.from_tokens += sent_tokens
            interval.from_steps += sent_steps
        else:
            self.superseded += self.tokens - interval.from_tokens - sent_tokens
            interval.from_tokens, interval.from_steps = self.tokens, self.steps
        if event.version > interval.anchor:
            interval.again, interval.again_s = 0, None
        interval.anchor, interval.sent, interval.adopting = event.version, None, None
        interval.known = max(interval.known, event.version)
        if interval.ready is not None and interval.ready <= event.version:
            interval.ready = None
        return actions

    def _on_snapshot_kept(self, event: SnapshotKept) -> list[Command]:
        interval = self.intervals[event.fragment]
        if interval.unread == event.push:
            interval.unread = 0
        return []

    def _on_push_settled(self, event: PushSettled) -> list[Command]:
        tokens = self.in_flight.pop((event.fragment, event.push))
        interval = self.intervals[event.fragment]
        if interval.unread == event.push:  # given up before its snapshot was read
            interval.unread = 0
        ours = interval.sent is not None and interval.sent.push == event.push
        actions: list[Command] = []
        if not event.reason:
            self.pushed += tokens
            actions = self._last(event.fragment, interval, event.cause_id) if ours and self.draining else []
        elif event.reason == "not_finite":
            self.refused_local += tokens
            actions = self._begin_again(event.fragment, interval, event) if ours else []
        elif ours:
            interval.sent = None
        else:
            self.superseded += tokens
        return actions + self._leave_when_done(event.cause_id)

    def _on_push_refused(self, event: PushRefused) -> list[Command]:
        interval = self.intervals[event.fragment]
        if interval.sent is None or interval.sent.push != event.push:
            return []
        return self._begin_again(event.fragment, interval, event)

    def _on_drain_ordered(self, event: DrainOrdered) -> list[Command]:
        if self.draining:
            return []
        self.draining = True
        actions = [
            push
            for fragment, interval in self.intervals.items()
            for push in self._last(fragment, interval, event.cause_id)
        ]
        return actions + self._leave_when_done(event.cause_id)

    _RULES: ClassVar[dict[type[Fact], Callable[[Any, Any], list[Command]]]] = {
        StepDone: _on_step_done,
        CallHeard: _on_call_heard,
        HeadHeard: _on_head_heard,
        FragmentFetched: _on_fragment_fetched,
        NothingNewer: _on_nothing_newer,
        FetchFailed: _on_fetch_failed,
        Adopted: _on_adopted,
        SnapshotKept: _on_snapshot_kept,
        PushSettled: _on_push_settled,
        PushRefused: _on_push_refused,
        DrainOrdered: _on_drain_ordered,
    }

    def _adopt(self, fragment: int, interval: LocalInterval, version: int) -> Adopt:
        interval.adopting = version
        since = interval.sent.push if interval.sent is not None and self._goes_on_from_pushes(fragment) else 0
        overwrite = not self._keeps(interval, version)
        cause = id_of("head", fragment, version)
        return Adopt(fragment=fragment, version=version, overwrite=overwrite, since=since, cause_id=cause)

    def _keeps(self, interval: LocalInterval, version: int) -> bool:
        """Return whether progress since the last push is of use once `version` is adopted: carried over, or pushed in time.

        Not so where more versions were missed than a late contribution may be behind (`age_max`), while more was trained than
        an interval: the learner was cut off, and has gone its own way from values that are long replaced. Carried over, that
        would pass for fresh, with the weight of all its tokens. A slow learner, with steps that outlast rounds, trains less.
        """
        alone = self.steps - interval.from_steps - (interval.sent.steps if interval.sent else 0)
        # Before `version` was visible, a push on the anchor could last enter the round that made it, on `version - 1`.
        return self._counts(interval, version - 1) or alone <= self.settings.interval_steps

    def _goes_on_from_pushes(self, fragment: int) -> bool:
        return self.settings.of(fragment).adoption == "carry" or self.settings.ending == "together"

    def _counts(self, interval: LocalInterval, version: int) -> bool:
        return version - interval.anchor <= self.settings.age_max

    def _last(self, fragment: int, interval: LocalInterval, cause_id: str) -> list[Command]:
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

    def _called_again(self, fragment: int, interval: LocalInterval, sent: Sent, event: Fact) -> list[Command]:
        apart = sent.called_s is None or event.at_s - sent.called_s >= RECALL_S_MIN / 2.0
        if (fragment, sent.push) in self.in_flight or not apart:
            return []
        sent.calls, sent.called_s = sent.calls + 1, event.at_s
        return self._begin_again(fragment, interval, event) if sent.calls % UNHEARD_CALLS == 0 else []

    def _begin_again(self, fragment: int, interval: LocalInterval, event: Fact) -> list[Command]:
        if interval.again_s is not None and event.at_s < interval.again_s:
            return []
        actions = self._fetch(fragment, interval, event.cause_id, again=True)
        if actions:
            interval.again += 1
            interval.again_s = event.at_s + min(AGAIN_S_MAX, AGAIN_S * 2.0 ** min(interval.again, 16))
        return actions

    def _hear_of(self, fragment: int, interval: LocalInterval, version: int, event: Fact) -> list[Command]:
        if max(version, interval.known) <= interval.newest or self.draining:
            return []
        if interval.fetching:
            interval.hinted = max(interval.hinted, version)
            return []
        early = interval.look_s is not None and event.at_s < interval.look_s
        if early and interval.known <= interval.newest:
            return []
        return self._fetch(fragment, interval, event.cause_id, version=version)

    def _fetch(
        self, fragment: int, interval: LocalInterval, cause_id: str, *, version: int = 0, again: bool = False
    ) -> list[Command]:
        if interval.fetching or self.draining:
            return []
        interval.fetching, interval.hinted = True, 0
        wanted = max(version, interval.known, interval.anchor)
        return [FetchFragment(fragment=fragment, version=wanted, again=again, cause_id=cause_id)]

    def _push(
        self,
        fragment: int,
        interval: LocalInterval,
        cause_id: str,
        *,
        final: bool = False,
        onward: bool = False,
        keep: bool = False,
    ) -> Push:
        interval.pushes += 1
        if keep:
            interval.unread = interval.pushes
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
            keep=keep,
            cause_id=cause_id,
        )

    def _leave_when_done(self, cause_id: str) -> list[Command]:
        """Close the ledger once nothing is in flight: tokens trained after the last push are superseded."""
        if not self.draining or self.in_flight:
            return []
        self.superseded += self.open
        self.left = True
        return [Leave(cause_id=cause_id)]
