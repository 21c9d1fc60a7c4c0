"""The ledger of one fragment: which contributions have a fate, and where their tokens went.

A fragment's ledger becomes durable together with its head, in one compare-and-set, so it is exact by construction. A
commit that never became visible is in no ledger; a commit that became visible is in the ledger that its head names. The
next owner of the fragment reads it and knows what not to merge again, however old a redelivery is. (A sum over several
fragments could not be kept that way: written with the head of one fragment, it would count a commit of another that is
still under way.)

Push numbers of one learner and fragment count up from 1, so the settled pushes are nearly one range. A push that its learner
gave up before sending leaves a hole that stays. Beyond `RANGES_MAX` ranges, which no honest learner reaches, the oldest
hole counts as settled.

Learners' own reports (`LearnerReport`) only grow, so any two copies merge by maximum. The ledger carries them because the
last report of a learner that left is heard only once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from atoll.base.quantities import (
    COUNT_MAX,
    RUN_TOKENS_MAX,
    AccountKey,
    Count,
    PeerId,
    PushNumber,
    RunTokens,
    TokenFragments,
    Tokens,
    Word,
    at_most,
)
from atoll.protocol.events import PushKey, Share
from atoll.protocol.ledger import Account, FormerLives, Ledger, book_fate, part_of, share_of
from atoll.protocol.quarantine import FADING, MEASURE_VERSIONS, MEASURES_MAX, OFFENCES, Measure

RANGES_MAX = 1024
PushRange = Annotated[list[PushNumber], msgspec.Meta(min_length=2, max_length=2)]
LEDGER_BYTES_MAX = 64 << 20


def fate_of(share: Share) -> str:
    """Return the fate of the tokens of a contribution that a commit includes."""
    return "merged_late" if share.age else "merged"


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
        name = f"{key.learner}/{key.incarnation}"
        account = self.settled.get(name)
        if account is None:
            return self.former.covers(name)
        return any(first <= key.push <= last for first, last in account.pushes)

    def spent(self, learner: str, incarnation: int) -> int:
        """Return the tokens of the pushes of one incarnation that have a fate, but for those that could not be."""
        account = self.settled.get(f"{learner}/{incarnation}", SettledPushes())
        refused = sum(tokens for reason, tokens in account.refused.items() if reason != "implausible")
        return account.merged + account.merged_late + refused

    def last_push(self, key: PushKey) -> int:
        """Return the number of the push that this life called its last, 0 for none."""
        account = self.settled.get(f"{key.learner}/{key.incarnation}")
        return 0 if account is None else account.final

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
        account = self.settled.get(f"{learner}/{incarnation}")
        return 0 if account is None else account.offences

    def has_merged(self, learner: str, incarnation: int) -> bool:
        """Return whether a contribution of an incarnation has been merged."""
        account = self.settled.get(f"{learner}/{incarnation}")
        return account is not None and account.merged + account.merged_late > 0

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
            learner, _, incarnation = name.rpartition("/")
            told = (report.trained, report.pushed, report.superseded, report.refused_local)
            ledger.take_report(learner, int(incarnation), *told)
            ledger.accounts[name].left = ledger.accounts[name].left or report.left
        for name, settled in self.settled.items():
            learner, _, incarnation = name.rpartition("/")
            ledger.book(learner, int(incarnation), settled.merged, "merged")
            ledger.book(learner, int(incarnation), settled.merged_late, "merged_late")
            for reason, tokens in settled.refused.items():
                ledger.book(learner, int(incarnation), tokens, "refused", reason)

    def account(self, name: str) -> Account:
        """Return what is known here of one life; it is a copy."""
        report, settled = self.reports.get(name, LearnerReport()), self.settled.get(name, SettledPushes())
        return Account(
            report.trained,
            report.pushed,
            report.superseded,
            report.refused_local,
            settled.merged,
            settled.merged_late,
            settled.refused,
            report.left,
        )

    def _settle(
        self, key: PushKey, tokens: int, fate: str, reason: str = "", *, final: bool, shard: Ledger | None
    ) -> SettledPushes:
        """Book the fate of a contribution, here and in its shard's ledger; return the account of its incarnation."""
        account = self.settled.setdefault(f"{key.learner}/{key.incarnation}", SettledPushes())
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


def fold_life(ledgers: Mapping[int, FragmentLedger], name: str, account: Account, fragments: int) -> None:
    """Fold a life into the former lives of some of a run's `fragments`: each takes its own part, with its own fates.

    `account` says what its learner reported. Where these are not all fragments, what the others settled is not known here: of
    a learner that left in good order, all that is not settled was superseded.
    """
    here = len(ledgers)
    local = share_of(account.refused_local, ledgers, fragments)
    superseded = share_of(account.superseded, ledgers, fragments)
    spent = account.pushed + account.superseded + account.refused_local
    exact = account.left and here < fragments and fragments * account.trained == spent
    for ledger in ledgers.values():
        settled = ledger.settled.pop(name, SettledPushes())
        ledger.reports.pop(name, None)
        fates = Account(merged=settled.merged, merged_late=settled.merged_late, refused=settled.refused).settled_fates()
        gone = None if exact else superseded
        part = part_of(account.trained, fates, 1, superseded=gone, refused_local=local)
        local -= part.fates["refused:local"]
        superseded -= part.fates["superseded"]
        ledger.former.enter(part)
        ledger.former.remember(name)


def adds_up(account: Account, fragments: int, *, all_here: bool) -> bool:
    """Return whether a life that is over balances, as `settle` asks; `all_here`: no other shard settles anything of it."""
    spent = account.pushed + account.superseded + account.refused_local
    if account.left and (fragments * account.trained != spent or (all_here and account.pushed != account.settled)):
        return False
    return account.settled <= fragments * account.trained


def close_together(ledgers: Mapping[int, FragmentLedger], fragments: int) -> None:
    """Fold in each of a run's ledgers what is folded in another: they were written one after the other."""
    former = FormerLives()
    for ledger in ledgers.values():
        former.add(ledger.former)
    for fragment, ledger in ledgers.items():
        for name in [name for name in {**ledger.settled, **ledger.reports} if former.covers(name)]:
            fold_life({fragment: ledger}, name, ledger.account(name), fragments)
