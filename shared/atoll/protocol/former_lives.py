"""Lives that are over and settled, in one account for all of them: what is written with every commit stays small.

A run may go on for months, and a learner that is restarted a thousand times had a thousand lives. An account of each would be
in every commit for ever. So the accounts of lives that have *ended* (their learner left, or has a later life) are folded into
sums, once nothing of them can come any more, but for the last `KEPT_LIVES`, which people may want to see.

    P * trained = merged + merged_late + superseded + refused + lost         (in token-fragments, exact)

**Once only.** `until` says of a learner up to which incarnation its lives are folded: what comes of such a life is one that
has a fate. It names the last `UNTIL_MAX` learners whose lives were folded. An unknown life of any other learner that is over
by its own member record may have been folded, so it is told apart by that record alone (`forgotten`).

**Two ledgers, one life.** The ledgers of a shard's fragments are written one after the other, and other shards fold when
they can. So each fragment's ledger has the part of its own fragment. A life that is folded in one ledger and open in another
is folded there, too, by who adds the two (`FormerLives.covers`). The shard folds only what is durable in all its ledgers, and
the lives of `BATCH_LEARNERS` learners at most before all ledgers are written again: none is further behind than that.

**When nothing can come any more** is the queue's to say: everything was settled that it held some time after the life had ended
(`EndedLives`). What a learner that was replaced goes on to send has no account, and moves no sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from atoll.base.quantities import (
    COUNT_MAX,
    LEARNERS_MAX,
    RUN_TOKENS_MAX,
    TOKEN_FRAGMENTS_MAX,
    AccountKey,
    Count,
    Incarnation,
    PeerId,
    RunTokens,
    TokenFragments,
    Word,
    at_most,
)

KEPT_LIVES: Final = 32
"""How many lives that have ended keep their own accounts."""
LIVES_MAX: Final = 64
"""How many accounts one learner may have; beyond, the oldest of its lives is folded at once."""
UNTIL_MAX: Final = 256
BATCH_LEARNERS: Final = 128
WRONG_MAX: Final = 16
TURNS: Final = 2
"""The turn at which a life is seen to be over may have begun before its end; the next one begins after it, and must pass."""


class FormerLives(msgspec.Struct):
    """The sums of `lives`, of `tokens` trained: in token-fragments of one fragment, or of several.

    `until`: the last incarnation of a learner that is folded. `forgotten`: how many learners are not in it any more. `wrong`:
    the last few whose accounts did not add up.
    """

    lives: Count = 0
    tokens: RunTokens = 0
    merged: TokenFragments = 0
    merged_late: TokenFragments = 0
    superseded: TokenFragments = 0
    refused_local: TokenFragments = 0
    lost: TokenFragments = 0
    refused: dict[Word, TokenFragments] = msgspec.field(default_factory=dict)
    until: Annotated[dict[PeerId, Incarnation], msgspec.Meta(max_length=LEARNERS_MAX)] = msgspec.field(
        default_factory=dict
    )
    forgotten: Count = 0
    wrong: Annotated[list[AccountKey], msgspec.Meta(max_length=WRONG_MAX)] = msgspec.field(default_factory=list)

    @property
    def settled(self) -> int:
        """Return the token-fragments that shards have given a fate."""
        return self.merged + self.merged_late + sum(self.refused.values())

    @property
    def due(self) -> int:
        """Return the token-fragments that were trained: each has one fate."""
        return sum(self.fates().values())

    def fates(self) -> dict[str, int]:
        """Return what became of every token-fragment, by the names of `Account.fates`."""
        fates = {"merged": self.merged, "merged_late": self.merged_late, "superseded": self.superseded}
        if self.refused_local:
            fates["refused:local"] = self.refused_local
        fates |= {f"refused:{reason}": count for reason, count in self.refused.items()}
        return {**fates, "lost": self.lost}

    def reported(self) -> FormerLives:
        """Return what is known of these lives beside their fates: how many, what they trained, and which they are."""
        return FormerLives(lives=self.lives, tokens=self.tokens, until=dict(self.until), forgotten=self.forgotten)

    def covers(self, name: str) -> bool:
        """Return whether a life, `learner/incarnation`, is folded."""
        learner, _, incarnation = name.rpartition("/")
        return learner in self.until and int(incarnation) <= self.until[learner]

    def enter(self, part: LifePart) -> None:
        """Add one life's part in these fragments."""
        self.lives = at_most(COUNT_MAX, self.lives + 1)
        self.tokens = at_most(RUN_TOKENS_MAX, self.tokens + part.trained)
        self._sum(part.fates)

    def add(self, other: FormerLives) -> None:
        """Add the sums of other fragments of the same lives, or more lives in one than in the other."""
        self.lives, self.tokens = max(self.lives, other.lives), max(self.tokens, other.tokens)
        self._sum(other.fates())
        self.forgotten = max(self.forgotten, other.forgotten)
        self.wrong = list(dict.fromkeys([*self.wrong, *other.wrong]))[-WRONG_MAX:]
        for learner, incarnation in other.until.items():
            self.until[learner] = max(incarnation, self.until.get(learner, 0))

    def remember(self, name: str) -> None:
        """Note that a life is folded, and with it all former ones of its learner."""
        learner, _, incarnation = name.rpartition("/")
        self.until[learner] = max(int(incarnation), self.until.pop(learner, 0))
        while len(self.until) > UNTIL_MAX:
            del self.until[next(iter(self.until))]
            self.forgotten = at_most(COUNT_MAX, self.forgotten + 1)

    def doubt(self, name: str) -> None:
        """Note a life whose account did not add up when it was folded."""
        self.wrong = [*self.wrong, name][-WRONG_MAX:]

    def _sum(self, fates: Mapping[str, int]) -> None:
        for fate, tokens in fates.items():
            kind, _, reason = fate.partition(":")
            if kind == "refused" and reason != "local":
                self.refused[reason] = at_most(TOKEN_FRAGMENTS_MAX, self.refused.get(reason, 0) + tokens)
            else:
                field_name = "refused_local" if reason else kind
                setattr(self, field_name, at_most(TOKEN_FRAGMENTS_MAX, getattr(self, field_name) + tokens))


@dataclass(frozen=True, slots=True)
class LifePart:
    """The part of one life in some fragments: `trained` in tokens, and a fate of each token-fragment."""

    trained: int
    fates: dict[str, int]


def part_of(
    trained: int, settled: Mapping[str, int], fragments: int, *, superseded: int | None, refused_local: int
) -> LifePart:
    """Return what became of `trained` tokens in so many `fragments`, of which shards have `settled` some by fate.

    Of the rest so many were `refused_local` and `superseded` as its learner said (None: all, because it has left), and what is
    left then is lost. Nothing is negative: who has pushed more than it trained has trained that much.
    """
    rest = max(0, fragments * trained - sum(settled.values()))
    local = min(rest, refused_local)
    gone = rest - local if superseded is None else min(rest - local, superseded)
    return LifePart(trained, {**settled, "refused:local": local, "superseded": gone, "lost": rest - local - gone})


def share_of(total: int, part: Collection[int], fragments: int) -> int:
    """Return the share of a run's `total` that falls on the fragments `part` of all `fragments`: all shares add up to it."""
    return sum(total * (p + 1) // fragments - total * p // fragments for p in part)


@dataclass(slots=True)
class EndedLives:
    """The lives that have ended, by account, on their way into `FormerLives`: when each is ready, and which are next.

    Nothing is folded unless it `folds`: not in runs that shards of releases before wire version 5 may serve. `noted` has the
    turn of the queue at which each was seen to have ended. `batch` is folded as soon as each fragment's ledger has been written
    as often as `writes_due` says.
    """

    folds: bool = True
    turns: int = 0
    noted: dict[str, int] = field(default_factory=dict)
    batch: list[str] = field(default_factory=list)
    writes_due: dict[int, int] = field(default_factory=dict)

    def look(self, turns: int, over: Iterable[str], writes: Mapping[int, int]) -> None:
        """Note which lives are `over` at this turn of the queue; choose a batch once the last one is folded.

        `writes` says how often each fragment's ledger was written or is about to be.
        """
        self.turns = turns
        self.noted = {name: self.noted.get(name, turns) for name in over}
        if not self.folds or self.batch or len(self.noted) <= KEPT_LIVES:
            return
        ready = [name for name, since in self.noted.items() if turns - since >= TURNS]
        self.batch = list(_first_of(ready[: len(self.noted) - KEPT_LIVES], self.noted))
        self.writes_due = {fragment: written + 1 for fragment, written in writes.items()}

    def take(self, durable: Mapping[int, int], held: Collection[str]) -> list[str]:
        """Return which lives are to be folded now, and forget them: none of which something is `held`, in order.

        `durable` says how often each fragment's ledger was written, durably.
        """
        if not self.batch or any(durable[p] < due for p, due in self.writes_due.items()):
            return []
        batch, self.batch = self.batch, []
        ready = [name for name in batch if name in self.noted and name not in held]
        due = list(_first_of(ready, self.noted))
        for name in held:
            if name in self.noted:
                self.noted[name] = self.turns
        for name in due:
            del self.noted[name]
        return due


def _first_of(names: Iterable[str], noted: Collection[str]) -> Iterator[str]:
    """Yield those lives, of a bounded number of learners, of which no earlier one of the same learner stays behind."""
    by_learner: dict[str, list[int]] = {}
    for name in noted:
        learner, _, incarnation = name.rpartition("/")
        by_learner.setdefault(learner, []).append(int(incarnation))
    ready: dict[str, set[int]] = {}
    for name in names:
        learner, _, incarnation = name.rpartition("/")
        ready.setdefault(learner, set()).add(int(incarnation))
    for learner, numbers in list(ready.items())[:BATCH_LEARNERS]:
        for number in sorted(by_learner[learner]):
            if number not in numbers:
                break
            yield f"{learner}/{number}"
