"""Sums of ledgers beside sums that are added up one by one: settling, sharing out, pages, and what an heir is told."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import msgspec
import pytest

from atoll.base.parsing import parsed
from atoll.protocol.events import PushKey, Share
from atoll.protocol.ledger import (
    RANGES_MAX,
    Account,
    FragmentLedger,
    Ledger,
    add_part,
    apportion,
    newest,
    parts,
    settle,
)
from atoll.protocol.quarantine import MEASURES_MAX, OFFENCES, Measure

SEEDS = range(25)
REASONS = ("stale", "corrupt", "empty")


def drawn(seed: int, learners: int = 4) -> Ledger:
    """Return a ledger of some learners and lives, with sums that need not agree."""
    chance = random.Random(seed)
    ledger = Ledger(run_tokens=chance.randrange(200))
    for number in range(learners):
        for life in range(1, chance.randrange(2, 4)):
            account = ledger.account(f"l{number}", life)
            for field in ("trained", "pushed", "superseded", "refused_local", "merged", "merged_late"):
                setattr(account, field, chance.randrange(50))
            account.refused = {reason: chance.randrange(9) for reason in REASONS if chance.random() < 0.5}
            account.left = chance.random() < 0.5
    return ledger


def copied(ledger: Ledger) -> Ledger:
    return msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger)


def plain(ledger: Ledger) -> dict[str, Account]:
    return copied(ledger).accounts


def test_a_settlement_is_the_sum_of_all_accounts_and_names_each_that_is_wrong() -> None:
    for seed in SEEDS:
        ledger, fragments = drawn(seed), 3
        sums: Counter[str] = Counter()
        trained, wrong = 0, []
        for name, account in sorted(ledger.accounts.items()):
            due = fragments * account.trained
            trained += due
            fates = {"merged": account.merged, "merged_late": account.merged_late, "superseded": account.superseded}
            fates["refused:local"] = account.refused_local
            fates |= {f"refused:{reason}": tokens for reason, tokens in account.refused.items()}
            fates["lost"] = due - sum(fates.values())
            sums.update(fates)
            if account.left and due != account.pushed + account.superseded + account.refused_local:
                wrong.append(f"{name}: its own ledger differs")
            if account.left and account.pushed != account.merged + account.merged_late + sum(account.refused.values()):
                wrong.append(f"{name}: pushed")
            if fates["lost"] < 0:
                wrong.append(f"{name}: {-fates['lost']} token-fragments have more than one fate")

        settled = settle(ledger, fragments)

        assert settled.trained == trained
        assert Counter(settled.fates) == sums
        assert {"merged", "merged_late", "superseded", "lost"} <= set(settled.fates)
        assert len(settled.errors) == len(wrong)
        assert all(said.startswith(due) for said, due in zip(settled.errors, wrong, strict=True))
        assert settled.exact == (not wrong)


def test_a_run_that_adds_up_is_exact_and_one_token_more_is_not() -> None:
    right = {"trained": 10, "pushed": 12, "superseded": 5, "refused_local": 3, "merged": 8, "merged_late": 2}
    for field in ("", *right):
        ledger = Ledger()
        account = ledger.account("a", 1)
        for name, value in right.items():
            setattr(account, name, value + (name == field))
        account.refused, account.left = {"stale": 2}, True
        settled = settle(ledger, 2)
        assert settled.exact == (not field)
        assert sum(settled.fates.values()) == settled.trained


@pytest.mark.parametrize("fragments", [1, 2, 7, 24])
def test_tokens_are_shared_out_by_the_largest_remainder(fragments: int) -> None:
    """Whole tokens that sum exactly; whoever got one more had a remainder at least as large, or an earlier name."""
    for seed in SEEDS:
        chance = random.Random(seed)
        fates = {name: chance.randrange(200) for name in ("merged", "late", "superseded", "stale")}
        fates["lost"] = -sum(fates.values()) % fragments + fragments * chance.randrange(3)

        whole = apportion(fates, fragments)

        assert sum(whole.values()) * fragments == sum(fates.values())
        more = {name for name in fates if whole[name] > fates[name] // fragments}
        assert all(0 <= whole[name] - fates[name] // fragments <= 1 for name in fates)
        assert all(abs(Fraction(fates[name], fragments) - whole[name]) < 1 for name in fates)
        rank = sorted(fates, key=lambda name: (-(fates[name] % fragments), name))
        assert more == set(rank[: len(more)])


@pytest.mark.parametrize("page", [1, 2, 3, 100])
def test_a_ledger_in_pages_is_the_same_ledger(page: int) -> None:
    for seed in SEEDS:
        ledger = drawn(seed)
        pages = parts(ledger, page)
        together: Ledger | None = drawn(seed + 1)
        for number, part in enumerate(pages):
            together = add_part(together, copied(part), number)

        assert len(pages) == max(1, -(-len(ledger.accounts) // page))
        assert all(len(part.accounts) <= page for part in pages)
        assert together is not None
        assert plain(together) == plain(ledger)
        assert together.run_tokens == ledger.run_tokens
        assert parts(Ledger(run_tokens=5)) == [Ledger(run_tokens=5)]
        assert add_part(None, ledger, 3) is ledger


def test_two_ledgers_are_absorbed_reports_by_maximum_and_fates_by_sum() -> None:
    for seed in SEEDS:
        one, other = drawn(seed), drawn(seed + 100, learners=5)
        learnt, absorbed = copied(one), copied(one)
        learnt.learn(other)
        absorbed.absorb(other)

        for name in {*one.accounts, *other.accounts}:
            ours, theirs = (ledger.accounts.get(name, Account()) for ledger in (one, other))
            for into, summed in ((learnt.accounts[name], False), (absorbed.accounts[name], True)):
                for field in ("trained", "pushed", "superseded", "refused_local"):
                    assert getattr(into, field) == max(getattr(ours, field), getattr(theirs, field))
                assert into.left == (ours.left or theirs.left)
                assert into.merged == ours.merged + summed * theirs.merged
                assert into.merged_late == ours.merged_late + summed * theirs.merged_late
                refused = Counter(ours.refused) + (Counter(theirs.refused) if summed else Counter())
                assert +Counter(into.refused) == +refused
        assert learnt.run_tokens == absorbed.run_tokens == max(one.run_tokens, other.run_tokens)
        for target in (0, one.run_tokens, one.run_tokens + 1):
            assert one.reached(target) == (0 < target <= one.run_tokens)


def test_the_newest_accounts_are_those_of_lives_that_go_on() -> None:
    """In the order of their ranks, of what was heard of last; a ledger that is small enough is itself."""
    for seed in SEEDS:
        ledger = drawn(seed, learners=5)
        last = {name.rpartition("/")[0]: int(name.rpartition("/")[2]) for name in sorted(ledger.accounts)}
        names = list(ledger.accounts)
        lives_on = [n for n in names if f"{last[n[:2]]}" == n[3:] and not ledger.accounts[n].left]
        over = [name for name in names if name not in lives_on]
        for room in range(1, len(names) + 1):
            kept = newest(ledger, room)
            wanted = [*over, *lives_on][-room:]
            assert set(kept.accounts) == set(wanted)
            assert list(kept.accounts) == [name for name in names if name in wanted]
            assert kept.run_tokens == ledger.run_tokens
        assert newest(ledger, len(names)) is ledger


def test_settled_pushes_are_a_set_whatever_their_order() -> None:
    for seed in SEEDS:
        chance = random.Random(seed)
        pushes = [chance.randrange(1, 30) for _ in range(chance.randrange(40))]
        ledger = FragmentLedger()
        for number, push in enumerate(pushes, start=1):
            ledger.refuse(PushKey("a", 1, 0, push), 8, "stale")
            known = set(pushes[:number])
            assert {push for push in range(32) if ledger.knows(PushKey("a", 1, 0, push))} == known
            ranges = ledger.settled["a/1"].pushes
            assert all(first <= last for first, last in ranges)
            assert all(before[1] + 1 < after[0] for before, after in pairwise(ranges))


def test_beyond_a_bound_of_ranges_the_oldest_hole_counts_as_settled() -> None:
    ledger = FragmentLedger()
    keys = [PushKey("a", 1, 0, push) for push in range(2 * RANGES_MAX + 2)]
    for key in keys[1:-1:2]:
        ledger.refuse(key, 8, "stale")
    settled = ledger.settled["a/1"]
    assert len(settled.pushes) == RANGES_MAX
    assert not ledger.knows(keys[2])

    ledger.refuse(keys[-1], 8, "stale")

    assert len(settled.pushes) == RANGES_MAX
    assert settled.pushes[0] == [1, 3]
    assert ledger.knows(keys[2])
    assert not ledger.knows(keys[4])


def test_books_that_are_frozen_tell_an_heir_all_of_it() -> None:
    for seed in SEEDS:
        chance, reports = random.Random(seed), drawn(seed)
        ledger, due = FragmentLedger(), Ledger(run_tokens=0)
        for push in range(1, 30):
            key = PushKey(f"l{chance.randrange(4)}", 1, 0, push)
            tokens = chance.randrange(1, 9)
            if chance.random() < 0.6:
                age = chance.randrange(3)
                ledger.merge(Share(key=key, base_version=0, tokens=tokens, steps=1, weight=1.0, age=age, credit=tokens))
                due.book(key.learner, 1, tokens, "merged_late" if age else "merged")
            else:
                reason = chance.choice(REASONS)
                ledger.refuse(key, tokens, reason)
                due.book(key.learner, 1, tokens, "refused", reason)
            assert ledger.knows(key)
            assert not ledger.knows(key._replace(push=push + 1))
        ledger.lengths = {f"l{number}": Measure(1.0, 2, 1, number) for number in range(MEASURES_MAX)}
        due.learn(reports)
        due.count(ledger.tokens_counted)

        heir = parsed(ledger.freeze(reports), FragmentLedger)
        told = Ledger()
        heir.enter_into(told)

        assert plain(told) == plain(due)
        assert told.run_tokens == max(reports.run_tokens, ledger.tokens_counted)
        assert heir.tokens_counted == ledger.tokens_counted
        assert heir.settled == ledger.settled
        assert heir.lengths == ledger.lengths
        for name in ("l0", "l1", "l2", "l3"):
            refused = ledger.settled[f"{name}/1"].refused if f"{name}/1" in ledger.settled else {}
            offences = heir.offences(name, 1)
            assert (offences > 0) == any(reason in OFFENCES for reason in refused)
        assert heir.offences("nobody", 1) == 0
