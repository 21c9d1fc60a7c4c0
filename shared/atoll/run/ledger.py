"""The ledger of a run as the broker has it now: where every token went.

Every head names its fragment ledger, every lease carries what its owner last heard from the learners, and member records say
which incarnations are over. They hold durable facts only: a contribution that a process still works on counts as queued, and
tokens that no learner has pushed yet count as open.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from atoll.base.errors import BlobCorrupt, BlobGone, BrokerUnavailable, PeerMisbehaved, RunLost
from atoll.base.parsing import parsed
from atoll.bus.interface import Bus
from atoll.protocol.data import DataLedger, sums_by_epoch, sums_by_learner
from atoll.protocol.ledger import (
    LEDGER_BYTES_MAX,
    Account,
    FormerLives,
    FragmentLedger,
    Ledger,
    close_together,
    split_life,
)
from atoll.run.heads import READ_ATTEMPTS, read_heads
from atoll.run.record import read_lease, read_members, readable, recorded_progress
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Rebuilt, RunRecord


@dataclass(frozen=True, slots=True)
class IncarnationAccount:
    """One incarnation: its account, and whether it may still push (`present`), has left in good order, or died.

    Or all lives that have no account of their own, as one: `former`.
    """

    name: str
    account: Account
    state: str
    former: FormerLives | None = None

    def due(self, fragments: int) -> int:
        """Return the token-fragments that it trained."""
        return fragments * self.account.trained if self.former is None else self.former.due

    def excess(self, fragments: int) -> int:
        """Return how many token-fragments have more than one fate, by what it has reported and shards have settled."""
        account = self.account
        spent = account.settled + account.superseded + account.refused_local
        return 0 if self.former is not None else max(0, spent - fragments * account.trained)

    def fates(self, fragments: int) -> dict[str, int]:
        """Return the fate of every token-fragment it trained; the unsettled ones are `queued`, `open` or `lost`.

        Reports and ledgers are read one after the other, so a live learner's may differ by a moment; nothing is
        negative.
        """
        account = self.account
        if self.former is not None:
            return {**self.former.fates(), "queued": 0, "open": 0}
        fates = account.fates(fragments)
        rest = fates.pop("lost")
        if self.state == "died":
            return {**fates, "queued": 0, "open": 0, "lost": rest}
        queued = min(max(0, account.pushed - account.settled), max(0, rest))
        return {**fates, "queued": queued, "open": max(0, rest - queued), "lost": 0}


async def read_lives(bus: Bus, run: RunRecord) -> list[IncarnationAccount]:
    """Return every incarnation of the run with its account, by learner and number."""
    ledger = await read_ledger(bus, run)
    members = await read_members(bus, run.subjects)
    ended = (await recorded_progress(bus, run)).over
    lives = former_of(ledger)
    for name in sorted(ledger.accounts, key=split_life):
        account, (learner, number) = ledger.accounts[name], split_life(name)
        member = members.get(learner)
        if member is not None and member.incarnation != number:
            member = None
        over = account.left or (member is not None and member.left)
        there = member is not None and not ended  # nobody hears it any more
        lives.append(IncarnationAccount(name, account, "left" if over else "present" if there else "died"))
    return lives


def ended_lives(ledger: Ledger) -> list[IncarnationAccount]:
    """Return every incarnation of a run that is over, by learner and number: who has not left has died."""
    return former_of(ledger) + [
        IncarnationAccount(name, ledger.accounts[name], "left" if ledger.accounts[name].left else "died")
        for name in sorted(ledger.accounts, key=split_life)
    ]


def former_of(ledger: Ledger) -> list[IncarnationAccount]:
    """Return the account of all lives that have none of their own, if there are any."""
    former = ledger.former
    name = f"{former.lives:,} former lives"
    return [IncarnationAccount(name, Account(trained=former.tokens), "over", former)] if former.lives else []


async def read_ledger(bus: Bus, run: RunRecord) -> Ledger:
    """Return the sum of all fragment ledgers and the newest reports of all learners.

    Raises:
        RunLost: a head names a ledger that the broker does not have, or not whole.
    """
    missing = list[BlobRef | None]()
    for _ in range(READ_ATTEMPTS):
        ledger, ledgers, named = Ledger(), dict[int, FragmentLedger](), None
        try:
            for fragment, head in (await read_heads(bus, run)).items():
                ledgers[fragment], named = FragmentLedger(), head.fragment_ledger
                if named is not None:
                    ledgers[fragment] = read_fragment_ledger(await bus.get_blob(named, LEDGER_BYTES_MAX))
        except (BlobGone, BlobCorrupt):
            # A commit replaced this ledger between the two reads: read the newer head, which names another one.
            missing.append(named)
            continue
        close_together(ledgers, run.protocol.fragments)
        for each in ledgers.values():
            each.enter_into(ledger)
        break
    else:
        if named is not None and missing == [named] * READ_ATTEMPTS:
            todo = (
                "its store is damaged: restore it, or rebuild the run from its archive (atoll synchronizer --restore)"
            )
            raise RunLost("the broker has lost the ledger that a head names", got=named.stem, todo=todo)
        raise BrokerUnavailable("the ledgers change faster than they can be read", todo="ask again")
    for shard in range(run.protocol.shards):
        lease = await read_lease(bus, run, shard)
        if lease is not None and lease.ledger is not None:
            ledger.learn(lease.ledger)
    return ledger


def read_fragment_ledger(frozen: bytes) -> FragmentLedger:
    """Return the ledger in a blob; raise `PeerMisbehaved` for anything else."""
    try:
        return parsed(frozen, FragmentLedger)
    except msgspec.MsgspecError as error:
        raise PeerMisbehaved("not the ledger of a fragment", got=str(error)) from error


def wrong_accounts(lives: list[IncarnationAccount], fragments: int) -> list[str]:
    """Return which accounts do not add up, in words; of former lives those that are still named."""
    beyond = [(life.name, life.excess(fragments)) for life in lives]
    found = [f"{name}: {excess:,} token-fragments have more than one fate" for name, excess in beyond if excess]
    former = [name for life in lives if life.former is not None for name in life.former.wrong]
    return [*found, *(f"{name}: its account did not add up when its life was over" for name in former)]


def total(lives: list[IncarnationAccount], fragments: int) -> dict[str, int]:
    """Return the run's token-fragments by fate."""
    sums: dict[str, int] = {}
    for life in lives:
        for fate, tokens in life.fates(fragments).items():
            sums[fate] = sums.get(fate, 0) + tokens
    return sums


async def read_data(bus: Bus, run: RunRecord) -> DataLedger | None:
    """Return the ledger of data leases, or None for a run whose learners bring their own data."""
    record = await bus.get_record(run.subjects.data)
    return None if record is None else readable(DataLedger, record)


def as_json(
    lives: list[IncarnationAccount], fragments: int, data: DataLedger | None = None, rebuilt: Rebuilt | None = None
) -> bytes:
    """Return the whole ledger as JSON: per incarnation and in total, in token-fragments and tokens; blocks of data.

    `rebuilt` names the run checkpoint that the ledger goes back to: what came later was lost with the broker, and is
    not in it.
    """
    rows = [
        {"incarnation": life.name, "state": life.state, "trained": life.account.trained, "fates": life.fates(fragments)}
        for life in lives
    ]
    trained = sum(life.due(fragments) for life in lives) // fragments
    whole: dict[str, object] = {
        "fragments": fragments,
        "trained": trained,
        "fates": total(lives, fragments),
        "incarnations": rows,
        "data": None if data is None else {"epochs": sums_by_epoch(data), "learners": sums_by_learner(data)},
    }
    if rebuilt is not None:
        whole["rebuilt"] = rebuilt
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)
