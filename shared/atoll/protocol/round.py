"""One fragment's round: the collection that turns version v into v + 1, and what a shard keeps between rounds.

    RESTING     --call-->     COLLECTING  its beat came
    COLLECTING  --call-->     COLLECTING  below its quorum it is called again
    COLLECTING  --quorum-->   GRACE       K learners contributed on its base
    RESTING     --end-->      COMMITTING  nobody is left to call, or the run ends together
    COLLECTING  --end-->      COMMITTING  nobody is left to wait for, or the run ends together
    GRACE       --end-->      COMMITTING  the deadline passed, or all live learners answered
    COMMITTING  --durable-->  RESTING     its version is visible: the round on that one begins

A round exists from the moment its predecessor commits. While RESTING it already folds late contributions (their base is older
than v). From COMMITTING on its participants are frozen: whatever becomes ready is *parked* for the next round, one version
older. At the end of a run that ends `together`, a learner's last steps may come as a second contribution of one local
interval, on the version that its first one is about to be part of: it is parked, too, or folded here when nothing is left to
make it.

A contribution counts by its tokens and by its tokens per step (`token_weight`), and less the later it is (`staleness_weight`).
The round knows nothing of the schedule, of leases or of other fragments. Each decision names its reason.

Known limitation: a learner with nothing to give stays silent, and the round learns of it only through the deadline.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import msgspec

from atoll.base.errors import ProtocolMisuse
from atoll.protocol.claims import TokensBound
from atoll.protocol.events import (
    NEVER_CALLED,
    NOBODY,
    Commit,
    Fold,
    GraceWindow,
    Names,
    Opened,
    Opening,
    PublishCall,
    PushKey,
    RoundNeeds,
    RoundReasons,
    Share,
)
from atoll.protocol.settings import MAJORITY_MIN, ProtocolSettings

UNBOUNDED = TokensBound()
VAIN_CALLS = 8
PLACES = 2
"""Messages that the queue keeps per learner and fragment: who fills them cannot be heard before they are settled."""


class Phase(enum.Enum):
    """Where a round stands."""

    RESTING = "resting"
    COLLECTING = "collecting"
    GRACE = "grace"
    COMMITTING = "committing"


RoundFact = Literal["call", "quorum", "end", "durable"]


class Transition(NamedTuple):
    """One arrow of a round's life: in `phase`, `fact` leads to `following`; `when` says to people what brings it."""

    phase: Phase
    fact: RoundFact
    following: Phase
    when: str


TRANSITIONS: Final = (
    Transition(Phase.RESTING, "call", Phase.COLLECTING, "its beat came"),
    Transition(Phase.COLLECTING, "call", Phase.COLLECTING, "below its quorum it is called again"),
    Transition(Phase.COLLECTING, "quorum", Phase.GRACE, "K learners contributed on its base"),
    Transition(Phase.RESTING, "end", Phase.COMMITTING, "nobody is left to call, or the run ends together"),
    Transition(Phase.COLLECTING, "end", Phase.COMMITTING, "nobody is left to wait for, or the run ends together"),
    Transition(Phase.GRACE, "end", Phase.COMMITTING, "the deadline passed, or all live learners answered"),
    Transition(Phase.COMMITTING, "durable", Phase.RESTING, "its version is visible: the round on that one begins"),
)
"""The whole life of a round. A fact that its phase has no row for is a mistake of whoever drives it."""
_FOLLOWING: Final = {(row.phase, row.fact): row.following for row in TRANSITIONS}


class Offer(msgspec.Struct, frozen=True):
    """A contribution that has arrived and not been settled: its counters, and once it is read its norm and its scale."""

    key: PushKey
    base_version: int
    tokens: int
    steps: int
    final: bool
    cause_id: str = ""
    norm: float = 0.0
    scale: float = 1.0


@dataclass(slots=True)
class FragmentRound:
    """The collection of one fragment on base `version`.

    Attributes:
        called_s: when it was first called; 0 while resting.
        asked_s: when it was called last.
        absent_s: for how long its shard had been cut off from the broker when it was first called (`ConnectedTime`).
        quorum_s: when the quorum was met; 0 before.
        grace_s: the window that was granted then.
        shares: what is folded, in folding order.
        began_s: when its version became visible here; None until the shard is told its first fact.
        opening, unanswered, awaited, met_by, grace: notes for `RoundReasons`; they decide nothing.
    """

    fragment: int
    version: int
    settings: ProtocolSettings
    phase: Phase = Phase.RESTING
    attempt: int = 0
    called_s: float = 0.0
    asked_s: float = 0.0
    absent_s: float = 0.0
    quorum_s: float = 0.0
    grace_s: float = 0.0
    shares: list[Share] = field(default_factory=list)
    loading: set[PushKey] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    began_s: float | None = None
    opening: Opening = NEVER_CALLED
    unanswered: Names = NOBODY
    awaited: int = 0
    met_by: str = ""
    grace: GraceWindow | None = None

    def call(
        self, at_s: float, awaited: set[str], opened: Opened, due_s: float | None, step_s: float, cause_id: str
    ) -> int:
        """Open the round, or call again below quorum; return the attempt number, from 1.

        All else is only noted: the live learners, its beat (None before the first) and their step time.
        """
        if self._move("call") is Phase.RESTING:
            self.called_s = at_s
            began_s = at_s if self.began_s is None else self.began_s
            due_s = at_s if due_s is None else due_s
            self.opening = Opening(
                opened=opened,
                rested_s=at_s - began_s,
                late_s=max(0.0, at_s - due_s),
                behind_commit=began_s > due_s,
                interval_steps=self.settings.interval_steps,
                step_s=step_s,
                cause_id=cause_id,
            )
        self.unanswered, self.awaited = Names.of(awaited - self.answerers()), len(awaited)
        self.asked_s = at_s
        self.attempt += 1
        return self.attempt

    def call_command(self, run_tokens: int, cause_id: str) -> PublishCall:
        """Return the command that asks all learners for this round; from its second call on it says what it waits for."""
        needs = None
        if self.attempt > 1:
            needs = RoundNeeds(self.settings.quorum, self.quorum_so_far(), self.unanswered, self.awaited)
        return PublishCall(
            fragment=self.fragment,
            version=self.version,
            attempt=self.attempt,
            run_tokens=run_tokens,
            needs=needs,
            cause_id=cause_id,
        )

    def age(self, offer: Offer) -> int:
        """Return how many versions behind this round's base the offer is; negative means it is from the future."""
        return self.version - offer.base_version

    def ahead(self, offer: Offer) -> bool:
        """Return whether the offer is a learner's last steps, and goes on from one that the next version will hold."""
        return self.settings.ending == "together" and offer.final and self.age(offer) == -1

    def parks(self, offer: Offer) -> bool:
        """Return whether a ready offer waits for the next round: this one is closed, or will make the version it is on."""
        return self.phase is Phase.COMMITTING or (self.ahead(offer) and not self.idle)

    @property
    def idle(self) -> bool:
        """Return whether nothing is folded and nothing on its way, so that nothing is about to make a version."""
        return self.phase is not Phase.COMMITTING and not self.shares and not self.loading

    def refusal(self, offer: Offer) -> str:
        """Return why the offer cannot enter this round, or the empty string when it can."""
        age = self.age(offer)
        # A learner may read a version, answer it and leave before the shard has heard that its own commit is through.
        being_made = age == -1 and self.phase is Phase.COMMITTING
        if age < 0 and not being_made and not self.ahead(offer):
            return "future_base"
        if age > self.settings.age_max:
            return "stale"
        if offer.tokens <= 0 or offer.steps <= 0:
            return "empty"
        if 0 < self.settings.step_tokens_max * offer.steps < offer.tokens:
            return "implausible"
        return ""

    def fold(
        self, offer: Offer, cause_id: str, step_tokens_max: float = math.inf, most: TokensBound = UNBOUNDED
    ) -> Fold:
        """Take a ready offer in, with its token weight and the staleness weight of its age.

        Of a step, `step_tokens_max` tokens weigh and count at most, and of the whole what `most` allows.
        """
        if self.phase is Phase.COMMITTING or self.refusal(offer):
            raise ProtocolMisuse("this round cannot fold it", got=(self.phase.value, self.refusal(offer), offer.key))
        age = max(0, self.age(offer))
        tokens = int(min(offer.tokens, step_tokens_max * offer.steps))
        weight = token_weight(tokens, offer.steps) * min(1.0, most.weighed / max(1, tokens))
        self.loading.discard(offer.key)
        self.shares.append(
            Share(
                key=offer.key,
                base_version=offer.base_version,
                tokens=offer.tokens,
                steps=offer.steps,
                weight=weight,
                age=age,
                credit=int(min(tokens, most.counted)),
                scale=offer.scale,
                cause_id=offer.cause_id,
            )
        )
        staleness = staleness_weight(self.settings, age)
        return Fold(
            key=offer.key,
            weight=weight,
            staleness_weight=staleness,
            age=age,
            scale=offer.scale,
            norm=offer.norm,
            cause_id=cause_id,
        )

    def answerers(self) -> set[str]:
        """Return the learners that answered *this* base, well or badly: a late contribution is no answer."""
        return {share.key.learner for share in self.shares if share.age == 0} | self.refused

    def drop(self, offer: Offer) -> None:
        """Forget an offer that was refused; its learner has answered all the same."""
        self.loading.discard(offer.key)
        if self.age(offer) == 0:
            self.refused.add(offer.key.learner)

    def quorum_so_far(self) -> int:
        """Return how many learners count towards the quorum: those on this base, on any after `VAIN_CALLS` calls in vain.

        Late contributions do not count: a round that began with them would open its grace as it is called, end before
        anybody can answer, and make everybody late for the next one too. But what is late keeps its place in the queue,
        which is bounded per learner, until a commit: where it has filled the places, nobody can answer until it counts.
        """
        return len({share.key.learner for share in self.shares if share.age == 0 or self.attempt > VAIN_CALLS})

    def open_grace(self, at_s: float, grace: GraceWindow, cause_id: str) -> float:
        """Note that the quorum was met, because of `cause_id`, and return the deadline of the grace window."""
        self._move("quorum")
        self.quorum_s, self.grace_s = at_s, grace.granted_s
        self.grace, self.met_by = grace, cause_id
        return at_s + grace.granted_s

    def shorten_grace(self, grace: GraceWindow) -> float:
        """Note that the grace window is shorter, because steps are, and return its deadline."""
        self.grace_s, self.grace = grace.granted_s, grace
        return self.quorum_s + grace.granted_s

    def end(self, at_s: float, live: set[str], *, alone: bool, patient: bool = False) -> str:
        """Return why the round ends now, or the empty string while it goes on.

        A called round with its quorum ends when every live learner has answered and nothing it could still use is being
        read, or when the grace deadline has passed. A `patient` one knows no deadline, and needs no quorum, which guards
        a running fleet. When it is `alone` (learners were known, and each has left or is silent), whatever is folded is merged
        at once.
        """
        if self.phase is Phase.COMMITTING or not self.shares:
            return ""
        if alone and not self.loading:
            return "nobody left"
        if self.phase is not Phase.GRACE and not patient:
            return ""
        if not patient and at_s >= self.quorum_s + self.grace_s:
            return "grace over"
        if live <= self.answerers() and not self.loading:
            return "all answered"
        return ""

    def goes_on(self, at_s: float, living: Iterator[str]) -> bool:
        """Return whether the round surely stays as it is, with the fewest looks at the learners that are live.

        Only `quorum_so_far`, `end` and a fleet of which nobody is live move a round. So below the quorum the first one that is
        live is enough to go on, and in the grace window the first that has not answered. False says nothing.
        """
        if self.settings.ending != "apart" or (
            self.phase is not Phase.GRACE and len(self.shares) >= self.settings.quorum
        ):
            return False
        if self.phase is Phase.GRACE and at_s >= self.quorum_s + self.grace_s:
            return False
        answered = self.answerers() if self.phase is Phase.GRACE and not self.loading else set()
        return any(name not in answered for name in living)

    @property
    def unjudged(self) -> bool:
        """Return whether contributions are judged by those of other learners, and these are too few for that."""
        learners = {share.key.learner for share in self.shares}
        return self.settings.robust != "none" and len(learners) < MAJORITY_MIN

    def commit(
        self,
        at_s: float,
        reason: str,
        awaited: set[str],
        cause_id: str,
        *,
        together: bool = False,
        fragment_ledger: bytes = b"",
    ) -> Commit:
        """Freeze the participants and say what to commit, with its ledger; `awaited` are the live learners."""
        called_s = self.called_s if self.attempt else at_s
        quorum_s = self.quorum_s if self._move("end") is Phase.GRACE else called_s
        why = RoundReasons(
            version=self.version,
            opening=self.opening,
            calls=self.attempt,
            quorum=self.settings.quorum,
            quorum_wait_s=quorum_s - called_s,
            unanswered=self.unanswered,
            met_by=self.met_by,
            grace=self.grace,
            grace_waited_s=at_s - quorum_s,
            end=reason,
            missing=Names.of(awaited - self.answerers()),
            reading=len(self.loading),
            together=together,
        )
        return Commit(
            fragment=self.fragment,
            base_version=self.version,
            shares=tuple(self.shares),
            called_s=called_s,
            quorum_s=quorum_s,
            grace_s=self.grace_s,
            end=reason,
            live=len(awaited),
            fragment_ledger=fragment_ledger,
            cause_id=cause_id,
            why=why,
        )

    def succeed(self, version: int, at_s: float) -> FragmentRound:
        """Return the round on `version`, which this one has made durable and visible at `at_s`."""
        if version != self.version + 1:
            raise ProtocolMisuse("a round makes the version behind its own", got=version, allowed=self.version + 1)
        self._move("durable")
        return FragmentRound(self.fragment, version, self.settings, began_s=at_s)

    def _move(self, fact: RoundFact) -> Phase:
        former = self.phase
        following = _FOLLOWING.get((former, fact))
        if following is None:
            taken = [row.phase.value for row in TRANSITIONS if row.fact == fact]
            raise ProtocolMisuse(f"a round takes {fact!r} in another phase", got=former.value, allowed=taken)
        self.phase = following
        return former


def token_weight(tokens: int, steps: int) -> float:
    """Return the weight of a learner that trained over `tokens` tokens in `steps` inner steps, both positive.

    It is tokens^2 / steps (Sec. 3.2 of arXiv 2604.21428), so the tokens times the tokens per step.
    """
    return tokens * tokens / steps


def staleness_weight(settings: ProtocolSettings, age: int) -> float:
    """Return what a contribution that is `age` versions late keeps of its weight: 1 at age 0, then falling.

    The gate is that of CGAD (arXiv 2605.09126), sigma = gate * e^(-alpha age) with the cosine gate's end where contributions
    are refused anyway: `age_max + 1`. So there is no jump between what is taken and what is refused.
    """
    power = settings.age_damping**age
    if settings.age_law == "power":
        return power
    return power * 0.5 * (1.0 + math.cos(math.pi * age / (settings.age_max + 1)))
