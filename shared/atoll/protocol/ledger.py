"""Every token has one fate, counted from both sides.

A token trained by a learner counts once per fragment (a *token-fragment*), since each fragment travels and is merged on its
own. For every incarnation the learner's side says

    P * trained = pushed + superseded + refused_local + open

(`open`: trained since the anchor was adopted and not pushed yet; zero once it has left) and the shards' side says

    pushed = merged + merged_late + refused + queued

(`queued`: durable but not settled; zero at the end). The two are kept by different processes and meet only in `settle`, which
is therefore a real check. The tokens that a dead incarnation had open, and only those, are `lost`.

A shard's own ledger covers its own fragments; `Ledger.absorb` adds several shards together. Lives that have ended long ago are
in one account together (`FormerLives`).

**Durable** is the ledger of each fragment (`FragmentLedger`): it is written together with the fragment's head, in one
compare-and-set, so it is exact by construction. The next owner reads it and knows what not to merge again, however old a
redelivery is. (A sum over several fragments, written with the head of one, would count a commit of another that is still under
way.) Learners' own reports only grow, so any two copies merge by maximum; a ledger carries them because the last report of a
learner that left is heard only once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Protocol

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
    PushNumber,
    RunTokens,
    TokenFragments,
    Tokens,
    Word,
    at_most,
)
from atoll.protocol.events import PushKey, Share
from atoll.protocol.quarantine import FADING, MEASURE_VERSIONS, MEASURES_MAX, OFFENCES, Measure

KEPT_LIVES: Final = 32
"""How many lives that have ended keep their own accounts."""
LIVES_MAX: Final = 64
"""How many accounts one learner may have; beyond, the oldest of its lives is folded at once."""
UNTIL_MAX: Final = 256
BATCH_LEARNERS: Final = 128
WRONG_MAX: Final = 16
TURNS: Final = 2
"""The turn at which a life is seen to be over may have begun before its end; the next one begins after it, and must pass."""
ACCOUNTS_MAX: Final = 1536
"""How many accounts one message carries: 250 bytes each in the common case, 500 with the longest id and every reason."""
RANGES_MAX: Final = 1024
"""Ranges of settled pushes. A push that its learner gave up leaves a hole that stays; beyond this many ranges, which no honest
learner reaches, the oldest hole counts as settled."""
PushRange = Annotated[list[PushNumber], msgspec.Meta(min_length=2, max_length=2)]
LEDGER_BYTES_MAX: Final = 64 << 20


def life_of(learner: str, incarnation: int) -> str:
    """Return the name of a life: `learner/incarnation`."""
    return f"{learner}/{incarnation}"


def split_life(name: str) -> tuple[str, int]:
    """Return the learner and the incarnation of a life, by its name."""
    learner, _, incarnation = name.rpartition("/")
    return learner, int(incarnation)


class FormerLives(msgspec.Struct):
    """The sums of `lives` that are over and settled, of `tokens` trained: in token-fragments of one fragment, or of several.

    A learner that is restarted a thousand times had a thousand lives, and an account of each would be in every commit for
    ever. So the accounts of lives that have *ended* (their learner left, or has a later life) are folded into sums, but for
    the last `KEPT_LIVES`, once nothing of them can come any more: everything was settled that the queue held some time after
    (`EndedLives`).

        P * trained = merged + merged_late + superseded + refused + lost         (in token-fragments, exact)

    **Once only.** `until` says of the last `UNTIL_MAX` learners up to which incarnation their lives are folded: what comes of
    such a life has a fate. An unknown life of any other learner that is over by its own member record may have been folded, so
    it is told apart by that record alone (`forgotten`: how many such learners there are).

    **Two ledgers, one life.** The ledgers of a shard's fragments are written one after the other, and other shards fold when
    they can. So each fragment's ledger has the part of its own fragment. A life that is folded in one ledger and open in
    another is folded there, too, by who adds the two (`covers`). The shard folds only what is durable in all its ledgers, and
    the lives of `BATCH_LEARNERS` learners at most before all ledgers are written again. `wrong`: the last few whose accounts
    did not add up.
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
        return {**_known_fates(self), "lost": self.lost}

    def without_fates(self) -> FormerLives:
        """Return what is known of these lives beside their fates: how many, what they trained, and which they are."""
        return FormerLives(lives=self.lives, tokens=self.tokens, until=dict(self.until), forgotten=self.forgotten)

    def covers(self, name: str) -> bool:
        """Return whether a life, `learner/incarnation`, is folded."""
        learner, incarnation = split_life(name)
        return learner in self.until and incarnation <= self.until[learner]

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
        learner, incarnation = split_life(name)
        self.until[learner] = max(incarnation, self.until.pop(learner, 0))
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

    `noted` has the turn of the queue at which each was seen to have ended. `batch` is folded as soon as each fragment's ledger
    has been written as often as `writes_due` says.
    """

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
        if self.batch or len(self.noted) <= KEPT_LIVES:
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
    by_learner, ready = defaultdict[str, list[int]](list), defaultdict[str, set[int]](set)
    for learner, incarnation in map(split_life, noted):
        by_learner[learner].append(incarnation)
    for learner, incarnation in map(split_life, names):
        ready[learner].add(incarnation)
    for learner, numbers in list(ready.items())[:BATCH_LEARNERS]:
        for number in sorted(by_learner[learner]):
            if number not in numbers:
                break
            yield life_of(learner, number)


class Fates(Protocol):
    """The sums of what shards have decided, in token-fragments."""

    merged: int
    merged_late: int
    refused: dict[str, int]


def book_fate(sums: Fates, tokens: int, fate: str, reason: str = "") -> None:
    """Add tokens to their fate: "merged", "merged_late", or "refused" for a reason."""
    if fate == "refused":
        sums.refused[reason] = at_most(TOKEN_FRAGMENTS_MAX, sums.refused.get(reason, 0) + tokens)
    elif fate == "merged_late":
        sums.merged_late = at_most(TOKEN_FRAGMENTS_MAX, sums.merged_late + tokens)
    else:
        sums.merged = at_most(TOKEN_FRAGMENTS_MAX, sums.merged + tokens)


class Account(msgspec.Struct):
    """One incarnation's sums. `trained` is in tokens, everything else in token-fragments."""

    trained: Tokens = 0
    pushed: TokenFragments = 0
    superseded: TokenFragments = 0
    refused_local: TokenFragments = 0
    merged: TokenFragments = 0
    merged_late: TokenFragments = 0
    refused: dict[Word, TokenFragments] = msgspec.field(default_factory=dict)
    left: bool = False

    @property
    def settled(self) -> int:
        """Return the token-fragments that shards have given a fate."""
        return self.merged + self.merged_late + sum(self.refused.values())

    def fates(self, fragments: int) -> dict[str, int]:
        """Return what became of every token-fragment, for a run of `fragments` fragments that is over.

        `lost` is what no other fate claims; negative when something was counted twice (`settle` says so).
        """
        fates = _known_fates(self)
        return {**fates, "lost": fragments * self.trained - sum(fates.values())}


def settled_fates(sums: Fates) -> dict[str, int]:
    """Return the token-fragments that shards have given a fate, by fate."""
    refused = {f"refused:{reason}": count for reason, count in sums.refused.items()}
    return {"merged": sums.merged, "merged_late": sums.merged_late, **refused}


def _known_fates(sums: Account | FormerLives) -> dict[str, int]:
    fates = {"merged": sums.merged, "merged_late": sums.merged_late, "superseded": sums.superseded}
    if sums.refused_local:
        fates["refused:local"] = sums.refused_local
    return fates | settled_fates(sums)


def fate_of(share: Share) -> str:
    """Return the fate of the tokens of a contribution that a commit includes."""
    return "merged_late" if share.age else "merged"


class Ledger(msgspec.Struct):
    """The accounts of a run as one shard, or several together, know them; keys are `learner/incarnation`.

    `run_tokens` is the run's count: the tokens merged in the fragment that is the furthest, here or by the leases of all
    shards; learners' own words of what they trained count nothing. `former` are the lives without an account of their own, in
    the `fragments` whose fates this ledger sums.
    """

    accounts: dict[AccountKey, Account] = msgspec.field(default_factory=dict)
    run_tokens: RunTokens = msgspec.field(default=0, name="told_tokens")
    former: FormerLives = msgspec.field(default_factory=FormerLives)
    fragments: Count = 0

    def account(self, learner: str, incarnation: int) -> Account:
        """Return the account of one incarnation; open it if it is new."""
        return self.accounts.setdefault(life_of(learner, incarnation), Account())

    def take_report(
        self, learner: str, incarnation: int, tokens: int, pushed: int, superseded: int, local: int
    ) -> None:
        """Take over a learner's own report; totals only grow, so an old report changes nothing."""
        account = self.account(learner, incarnation)
        account.trained = max(account.trained, tokens)
        account.pushed = max(account.pushed, pushed)
        account.superseded = max(account.superseded, superseded)
        account.refused_local = max(account.refused_local, local)

    def book(self, learner: str, incarnation: int, tokens: int, fate: str, reason: str = "") -> None:
        """Enter what becomes of tokens of a fragment, as `book_fate` does."""
        book_fate(self.account(learner, incarnation), tokens, fate, reason)

    def has_folded(self, name: str) -> bool:
        """Return whether a life, `learner/incarnation`, is among the former ones, as far as that is still known.

        Where some are forgotten, a life that nobody has an account of was one of them.
        """
        return name not in self.accounts and (self.former.forgotten > 0 or self.former.covers(name))

    def ever_refused(self, learner: str, incarnation: int) -> bool:
        """Return whether anything of one incarnation was refused; to ask opens no account."""
        account = self.accounts.get(life_of(learner, incarnation))
        return account is not None and bool(account.refused)

    def ever_merged(self, learner: str, incarnation: int) -> bool:
        """Return whether anything of one incarnation was merged; to ask opens no account."""
        account = self.accounts.get(life_of(learner, incarnation))
        return account is not None and account.merged + account.merged_late > 0

    def count(self, tokens: int) -> None:
        """Raise the run's count to that of a fragment, or of another shard."""
        self.run_tokens = max(self.run_tokens, at_most(RUN_TOKENS_MAX, tokens))

    def reached(self, tokens_target: int) -> bool:
        """Return whether the run is at its token target; one without a target never is."""
        return 0 < tokens_target <= self.run_tokens

    def learn(self, other: Ledger) -> None:
        """Take over learners' reports from elsewhere, by maximum; fates stay as they are. Former lives stay former."""
        self.count(other.run_tokens)
        for key, theirs in other.accounts.items():
            if self.former.covers(key):
                continue
            learner, incarnation = split_life(key)
            self.take_report(
                learner, incarnation, theirs.trained, theirs.pushed, theirs.superseded, theirs.refused_local
            )
            self.accounts[key].left = self.accounts[key].left or theirs.left

    def absorb(self, other: Ledger) -> None:
        """Add another shard's ledger: reports by maximum, fates by sum; a life that is former in one of them is former."""
        self.close(other.former)
        theirs_former = FormerLives()
        theirs_former.add(other.former)
        for key, account in other.accounts.items():
            if self.former.covers(key):
                theirs_former.enter(_part_of(account, other.fragments))
        self.former.add(theirs_former)
        self.fragments += other.fragments
        self.learn(other)
        for key, theirs in other.accounts.items():
            if self.former.covers(key):
                continue
            ours = self.accounts[key]
            ours.merged += theirs.merged
            ours.merged_late += theirs.merged_late
            for reason, count in theirs.refused.items():
                ours.refused[reason] = ours.refused.get(reason, 0) + count

    def close(self, elsewhere: FormerLives) -> None:
        """Fold the accounts of lives that are former `elsewhere`: their part in our fragments."""
        for key in [key for key in self.accounts if elsewhere.covers(key)]:
            self.former.enter(_part_of(self.accounts.pop(key), self.fragments))


def _part_of(account: Account, fragments: int) -> LifePart:
    """Return a life's part in so many fragments: what is not settled there was superseded if it has left, and else lost."""
    gone = None if account.left else 0
    return part_of(account.trained, settled_fates(account), fragments, superseded=gone, refused_local=0)


class SettledPushes(msgspec.Struct):
    """One incarnation's tokens of one fragment by fate, the settled push numbers as ranges `[first, last]`, offences.

    `clean` counts the contributions that were merged since the last offence, or since one has faded.
    `final` is the number of the push that it called its last, 0 before that.
    """

    merged: TokenFragments = 0
    merged_late: TokenFragments = 0
    refused: dict[Word, TokenFragments] = msgspec.field(default_factory=dict)
    pushes: Annotated[list[PushRange], msgspec.Meta(max_length=RANGES_MAX)] = msgspec.field(default_factory=list)
    offences: Count = 0
    clean: Count = 0
    final: Count = 0


class LearnerReport(msgspec.Struct):
    """The last report of one incarnation, as in `atoll.protocol.ledger.Account`."""

    trained: Tokens = 0
    pushed: TokenFragments = 0
    superseded: TokenFragments = 0
    refused_local: TokenFragments = 0
    left: bool = False


class FragmentLedger(msgspec.Struct):
    """The ledger of one fragment; keys are `learner/incarnation`. `lengths`: the measure of each learner.

    `former`: the part of this fragment in lives whose accounts are folded. `tokens_counted`: the tokens merged, as far as they
    count towards the run's target; `run_tokens`: those of the run, as its owner knew them.
    """

    settled: dict[AccountKey, SettledPushes] = msgspec.field(default_factory=dict)
    reports: dict[AccountKey, LearnerReport] = msgspec.field(default_factory=dict)
    lengths: Annotated[dict[PeerId, Measure], msgspec.Meta(max_length=MEASURES_MAX)] = msgspec.field(
        default_factory=dict
    )
    run_tokens: RunTokens = msgspec.field(default=0, name="told_tokens")
    former: FormerLives = msgspec.field(default_factory=FormerLives)
    tokens_counted: RunTokens = 0

    def knows(self, key: PushKey) -> bool:
        """Return whether a contribution has a fate, or comes of a life that is folded."""
        name = life_of(*key[:2])
        account = self.settled.get(name)
        if account is None:
            return self.former.covers(name)
        return any(first <= key.push <= last for first, last in account.pushes)

    def spent(self, learner: str, incarnation: int) -> int:
        """Return the tokens of the pushes of one incarnation that have a fate, but for those that could not be."""
        account = self._of(learner, incarnation)
        refused = sum(tokens for reason, tokens in account.refused.items() if reason != "implausible")
        return account.merged + account.merged_late + refused

    def last_push(self, key: PushKey) -> int:
        """Return the number of the push that this life called its last, 0 for none."""
        return self._of(*key[:2]).final

    def merge(self, share: Share, *, final: bool = False, shard: Ledger | None = None) -> None:
        """Enter a contribution that is about to be committed, also into the ledger of its shard."""
        account = self._settle(share.key, share.tokens, fate_of(share), final=final, shard=shard)
        self.tokens_counted = at_most(RUN_TOKENS_MAX, self.tokens_counted + share.credit)
        if account.offences:
            account.clean += 1
            if account.clean >= FADING:
                account.offences, account.clean = account.offences - 1, 0

    def refuse(
        self, key: PushKey, tokens: int, reason: str, *, final: bool = False, shard: Ledger | None = None
    ) -> None:
        """Enter a contribution that is refused whole, also into the ledger of its shard."""
        account = self._settle(key, tokens, "refused", reason, final=final, shard=shard)
        if reason in OFFENCES:
            account.offences, account.clean = at_most(COUNT_MAX, account.offences + 1), 0

    def offences(self, learner: str, incarnation: int) -> int:
        """Return how often one incarnation sent something that no healthy learner sends."""
        return self._of(learner, incarnation).offences

    def has_merged(self, learner: str, incarnation: int) -> bool:
        """Return whether a contribution of an incarnation has been merged."""
        account = self._of(learner, incarnation)
        return account.merged + account.merged_late > 0

    def _of(self, learner: str, incarnation: int) -> SettledPushes:
        return self.settled.get(life_of(learner, incarnation)) or SettledPushes()

    def measures(self, version: int) -> dict[str, Measure]:
        """Return the measures by learner that are not too old at a version."""
        return {name: each for name, each in self.lengths.items() if version - each.version <= MEASURE_VERSIONS}

    def remember(self, learner: str, measure: Measure) -> None:
        """Keep a learner's latest length in place of its former one; a norm of 0 means that it was not measured."""
        if measure.norm > 0.0 and self.has_merged(learner, measure.incarnation):
            kept = self.measures(measure.version) | {learner: measure}
            newest = sorted(kept, key=lambda name: (kept[name].version, name), reverse=True)[:MEASURES_MAX]
            self.lengths = {name: kept[name] for name in newest}

    def freeze(self, ledger: Ledger) -> bytes:
        """Return the ledger of this moment as JSON, with the learners' reports; `parsed` reads it."""
        reports = {
            key: LearnerReport(account.trained, account.pushed, account.superseded, account.refused_local, account.left)
            for key, account in ledger.accounts.items()
        }
        now = FragmentLedger(self.settled, reports, self.lengths, ledger.run_tokens, self.former, self.tokens_counted)
        return msgspec.json.encode(now)

    def enter_into(self, ledger: Ledger) -> None:
        """Add this fragment's fates to a shard's ledger, and what learners reported."""
        ledger.count(max(self.run_tokens, self.tokens_counted))
        ledger.former.add(self.former)
        ledger.fragments += 1
        for name, report in self.reports.items():
            learner, incarnation = split_life(name)
            told = (report.trained, report.pushed, report.superseded, report.refused_local)
            ledger.take_report(learner, incarnation, *told)
            ledger.accounts[name].left = ledger.accounts[name].left or report.left
        for name, settled in self.settled.items():
            learner, incarnation = split_life(name)
            ledger.book(learner, incarnation, settled.merged, "merged")
            ledger.book(learner, incarnation, settled.merged_late, "merged_late")
            for reason, tokens in settled.refused.items():
                ledger.book(learner, incarnation, tokens, "refused", reason)

    def _settle(
        self, key: PushKey, tokens: int, fate: str, reason: str = "", *, final: bool, shard: Ledger | None
    ) -> SettledPushes:
        account = self.settled.setdefault(life_of(*key[:2]), SettledPushes())
        book_fate(account, tokens, fate, reason)
        if shard is not None:
            shard.book(key.learner, key.incarnation, tokens, fate, reason)
        if final and not account.final:
            account.final = key.push
        joined: list[list[int]] = []
        for first, last in sorted([*account.pushes, [key.push, key.push]]):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = [joined[-1][0], max(joined[-1][1], last)]
            else:
                joined.append([first, last])
        while len(joined) > RANGES_MAX:
            joined[:2] = [[joined[0][0], joined[1][1]]]
        account.pushes = joined
        return account


def _spent(report: Account | LearnerReport) -> int:
    return report.pushed + report.superseded + report.refused_local


def fold_life(
    ledgers: Mapping[int, FragmentLedger], name: str, report: Account | LearnerReport, fragments: int
) -> None:
    """Fold a life into the former lives of some of a run's `fragments`: each takes its own part, with its own fates.

    `report` says what its learner reported. Where these are not all fragments, what the others settled is not known here: of
    a learner that left in good order, all that is not settled was superseded.
    """
    here = len(ledgers)
    local = share_of(report.refused_local, ledgers, fragments)
    superseded = share_of(report.superseded, ledgers, fragments)
    exact = report.left and here < fragments and fragments * report.trained == _spent(report)
    for ledger in ledgers.values():
        settled = ledger.settled.pop(name, SettledPushes())
        ledger.reports.pop(name, None)
        gone = None if exact else superseded
        part = part_of(report.trained, settled_fates(settled), 1, superseded=gone, refused_local=local)
        local -= part.fates["refused:local"]
        superseded -= part.fates["superseded"]
        ledger.former.enter(part)
        ledger.former.remember(name)


def adds_up(account: Account, fragments: int, *, all_here: bool) -> bool:
    """Return whether a life that is over balances, as `settle` asks; `all_here`: no other shard settles anything of it."""
    if account.left and (
        fragments * account.trained != _spent(account) or (all_here and account.pushed != account.settled)
    ):
        return False
    return account.settled <= fragments * account.trained


def close_together(ledgers: Mapping[int, FragmentLedger], fragments: int) -> None:
    """Fold in each of a run's ledgers what is folded in another: they were written one after the other."""
    former = FormerLives()
    for ledger in ledgers.values():
        former.add(ledger.former)
    for fragment, ledger in ledgers.items():
        for name in [name for name in {**ledger.settled, **ledger.reports} if former.covers(name)]:
            fold_life({fragment: ledger}, name, ledger.reports.get(name, LearnerReport()), fragments)


def parts(ledger: Ledger, accounts_max: int = ACCOUNTS_MAX) -> list[Ledger]:
    """Return ledgers of at most `accounts_max` accounts that add up to this one, at least one."""
    keys = list(ledger.accounts)
    starts = range(0, max(1, len(keys)), accounts_max)
    pages = [keys[start : start + accounts_max] for start in starts]
    first = Ledger({key: ledger.accounts[key] for key in pages[0]}, ledger.run_tokens, ledger.former, ledger.fragments)
    return [first, *(Ledger({key: ledger.accounts[key] for key in page}, ledger.run_tokens) for page in pages[1:])]


def add_part(ledger: Ledger | None, part: Ledger, number: int) -> Ledger:
    """Return `ledger` with part `number` added; part 0 begins a new one."""
    if ledger is None or number == 0:
        return part
    ledger.absorb(part)
    return ledger


def newest(ledger: Ledger, accounts_max: int = ACCOUNTS_MAX) -> Ledger:
    """Return at most `accounts_max` accounts of a ledger, for a record that must stay small; the tokens stay known.

    Incarnations that left or were replaced go first, the one heard first before all others. All that is left out is still in
    the fragments' ledgers, which every commit writes with all reports.
    """
    if len(ledger.accounts) <= accounts_max:
        return ledger
    newest_life: dict[str, int] = {}
    for learner, incarnation in map(split_life, ledger.accounts):
        newest_life[learner] = max(newest_life.get(learner, 0), incarnation)
    present = {life_of(*life) for life in newest_life.items()}
    rank = {
        key: (key in present and not account.left, number)
        for number, (key, account) in enumerate(ledger.accounts.items())
    }
    kept = set(sorted(rank, key=rank.__getitem__)[len(rank) - accounts_max :])
    accounts = {key: account for key, account in ledger.accounts.items() if key in kept}
    return Ledger(accounts, ledger.run_tokens, ledger.former, ledger.fragments)


class Settlement(msgspec.Struct, frozen=True):
    """The sums of a finished run, in token-fragments, and every account that does not add up."""

    trained: int
    fates: dict[str, int]
    errors: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Return whether every fate adds up."""
        return not self.errors and sum(self.fates.values()) == self.trained


def settle(ledger: Ledger, fragments: int) -> Settlement:
    """Return the fate of every token-fragment of a finished run with `fragments` fragments.

    An incarnation that left must balance on both sides. A dead one cannot report any more: what it had trained by its last
    report, and what was neither merged nor refused nor superseded, is lost with it; this must not be negative.
    """
    sums = Counter(ledger.former.fates())
    errors = [f"{key}: its account did not add up when its life was over" for key in ledger.former.wrong]
    trained = ledger.former.due
    for key, account in sorted(ledger.accounts.items()):
        due = fragments * account.trained
        trained += due
        fates = account.fates(fragments)
        sums.update(fates)
        if account.left:
            if local := due - _spent(account):
                errors.append(f"{key}: its own ledger differs by {local} token-fragments")
            if account.pushed != account.settled:
                errors.append(f"{key}: pushed {account.pushed} token-fragments, settled {account.settled}")
        if fates["lost"] < 0:
            errors.append(f"{key}: {-fates['lost']} token-fragments have more than one fate")
    return Settlement(trained=trained, fates={**Account().fates(fragments), **sums}, errors=tuple(errors))


def apportion(fates: dict[str, int], fragments: int) -> dict[str, int]:
    """Return `fates` in whole tokens (token-fragments over P) that sum exactly to the tokens trained.

    Largest remainder: every fate is rounded down and the missing tokens go to the largest remainders, so each figure is
    less than one token from the exact quotient.
    """
    total = sum(fates.values()) // fragments
    whole = {fate: count // fragments for fate, count in fates.items()}
    missing = total - sum(whole.values())
    by_remainder = sorted(fates, key=lambda fate: (-(fates[fate] % fragments), fate))
    for fate in by_remainder[:missing]:
        whole[fate] += 1
    return whole
