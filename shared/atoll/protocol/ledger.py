"""Every token has one fate, counted from both sides.

A token trained by a learner counts once per fragment (a *token-fragment*), since each fragment travels and is merged on
its own. For every incarnation the learner's side says

    P * trained = pushed + superseded + refused_local + open

(`open`: trained since the anchor was adopted and not pushed yet; zero once it has left) and the shards' side says

    pushed = merged + merged_late + refused + queued

(`queued`: durable but not settled; zero at the end). The two are kept by different processes and meet only in
`settle`, which is therefore a real check. What a dead incarnation had open, and only that, is `lost`.

A shard's own ledger covers its own fragments; `Ledger.absorb` adds several shards together. Lives that have ended long ago
are in one account together (`atoll.protocol.former_lives`).
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Protocol

import msgspec

from atoll.base.quantities import (
    RUN_TOKENS_MAX,
    TOKEN_FRAGMENTS_MAX,
    AccountKey,
    Count,
    RunTokens,
    TokenFragments,
    Tokens,
    Word,
    at_most,
)
from atoll.protocol.former_lives import FormerLives, LifePart, part_of


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
        fates = {"merged": self.merged, "merged_late": self.merged_late, "superseded": self.superseded}
        if self.refused_local:
            fates["refused:local"] = self.refused_local
        fates |= {f"refused:{reason}": count for reason, count in self.refused.items()}
        return {**fates, "lost": fragments * self.trained - sum(fates.values())}

    def settled_fates(self) -> dict[str, int]:
        """Return the token-fragments that shards have given a fate, by fate."""
        refused = {f"refused:{reason}": count for reason, count in self.refused.items()}
        return {"merged": self.merged, "merged_late": self.merged_late, **refused}


class Ledger(msgspec.Struct):
    """The accounts of a run as one shard, or several together, know them; keys are `learner/incarnation`.

    `run_tokens` is the run's count: the tokens merged in the fragment that is the furthest, here or by the leases of all
    shards. What learners say that they trained counts nothing. `former` are the lives without an account of their own, in the
    `fragments` whose fates this ledger sums.
    """

    accounts: dict[AccountKey, Account] = msgspec.field(default_factory=dict)
    run_tokens: RunTokens = msgspec.field(default=0, name="told_tokens")
    former: FormerLives = msgspec.field(default_factory=FormerLives)
    fragments: Count = 0

    def account(self, learner: str, incarnation: int) -> Account:
        """Return the account of one incarnation; open it if it is new."""
        return self.accounts.setdefault(f"{learner}/{incarnation}", Account())

    def reported(self, learner: str, incarnation: int, tokens: int, pushed: int, superseded: int, local: int) -> None:
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
        account = self.accounts.get(f"{learner}/{incarnation}")
        return account is not None and bool(account.refused)

    def ever_merged(self, learner: str, incarnation: int) -> bool:
        """Return whether anything of one incarnation was merged; to ask opens no account."""
        account = self.accounts.get(f"{learner}/{incarnation}")
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
            learner, _, incarnation = key.rpartition("/")
            self.reported(
                learner, int(incarnation), theirs.trained, theirs.pushed, theirs.superseded, theirs.refused_local
            )
            self.accounts[key].left = self.accounts[key].left or theirs.left

    def absorb(self, other: Ledger) -> None:
        """Add another shard's ledger: reports by maximum, fates by sum. What is former in one of them is former."""
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
    return part_of(account.trained, account.settled_fates(), fragments, superseded=gone, refused_local=0)


ACCOUNTS_MAX: Final = 1536
"""How many accounts one message carries: 250 bytes each in the common case, 500 with the longest id and every reason."""


def parts(ledger: Ledger, accounts_max: int = ACCOUNTS_MAX) -> list[Ledger]:
    """Return ledgers of at most `accounts_max` accounts that add up to this one, at least one."""
    keys = list(ledger.accounts)
    starts = range(0, max(1, len(keys)), accounts_max)
    pages = [keys[start : start + accounts_max] for start in starts]
    first = Ledger({key: ledger.accounts[key] for key in pages[0]}, ledger.run_tokens, ledger.former, ledger.fragments)
    return [first, *(Ledger({key: ledger.accounts[key] for key in page}, ledger.run_tokens) for page in pages[1:])]


def continued(fragment_ledger: Ledger | None, part: Ledger, number: int) -> Ledger:
    """Return `fragment_ledger` with part `number` added; part 0 begins a new one."""
    if fragment_ledger is None or number == 0:
        return part
    fragment_ledger.absorb(part)
    return fragment_ledger


def newest(ledger: Ledger, accounts_max: int = ACCOUNTS_MAX) -> Ledger:
    """Return at most `accounts_max` accounts of a ledger, for a record that must stay small; the tokens stay known.

    Incarnations that left or were replaced go first, the one heard first before all others. What is left out is still in the
    fragments' ledgers, which every commit writes with all reports. Only one thing could be missing after the owner's death:
    the last report of an incarnation that ended before `accounts_max` others did, with no commit of the shard since.
    """
    if len(ledger.accounts) <= accounts_max:
        return ledger
    newest_life: dict[str, int] = {}
    for key in ledger.accounts:
        learner, _, incarnation = key.rpartition("/")
        newest_life[learner] = max(newest_life.get(learner, 0), int(incarnation))
    present = {f"{learner}/{incarnation}" for learner, incarnation in newest_life.items()}
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
            local = due - account.pushed - account.superseded - account.refused_local
            if local:
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
