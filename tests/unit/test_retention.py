"""A shard retains its rounds: what an archive that is away costs, and what the next round brings."""

from __future__ import annotations

import asyncio
import base64
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.archive.object_store import FolderArchive
from atoll.archive.rounds import RetainedRound, RoundStore
from atoll.protocol.events import Fold, PushKey, TimerFired
from atoll.protocol.shard import Shard
from atoll.wire.messages import Contribution, decode
from atoll_synchronizer import archivist as retention_module
from atoll_synchronizer.archivist import PAUSE_S, Retention
from support.attacks import manifest
from support.clocks import SetClock
from support.founded_run import BrokenObjectStore, FoundedRun, TurnedClock, run_record

NEVER = 1 << 30
SOON_S = 120.0


class RetentionDesk:
    """A founded run of which shard 0 retains the rounds of fragment 0, in an archive that can fail."""

    def __init__(self, run: str, folder: Path) -> None:
        self.founded = FoundedRun(run_record(run), FolderArchive(folder / "checkpoints"), TurnedClock())
        self.archive = BrokenObjectStore(FolderArchive(folder / "rounds"))
        self.rounds = RoundStore.of(self.archive, self.founded.record)
        self.clock = SetClock()
        self.retention = Retention(self.rounds, self.founded.record, 0, self.clock)

    async def begin(self) -> None:
        await self.founded.found()
        self.retention.begin(1, Shard(self.founded.record.protocol, 0, {0: 0, 2: 0}))

    async def commit(self) -> None:
        store = self.founded.stores[0]
        base = replace(store.holdings[0])
        await self.founded.commit(0)
        await self.retention.round(store.holdings[0].head, base, ())

    def kept(self) -> list[RetainedRound]:
        return [self.rounds.round(name) for name in self.rounds.rounds(0)]


@pytest.fixture
async def desk(run: str, tmp_path: Path) -> RetentionDesk:
    made = RetentionDesk(run, tmp_path)
    await made.begin()
    return made


async def test_an_archive_that_is_away_costs_rounds_and_no_commit(desk: RetentionDesk) -> None:
    """Nothing is tried for a while after a failure; what was not retained is said, and the facts are kept for later."""
    desk.archive.fails_at = 1
    desk.retention.fact(TimerFired(at_s=1.0, name="due/0"))
    await desk.commit()
    acts = desk.archive.acts
    await desk.commit()

    assert desk.kept() == []
    assert desk.retention.failures >= 2
    assert desk.archive.acts == acts, "nothing is tried again at once"
    desk.archive.fails_at, desk.clock.now_s = NEVER, desk.clock.now_s + PAUSE_S + 1.0
    await desk.commit()
    (made,) = desk.kept()
    assert made.head.version == 3
    assert made.anchor is not None, "nothing leads to its base"
    lines, fault = desk.rounds.facts(0, 1)
    assert (len(lines), fault) == (2, ""), "the machine as it began, and the fact"


async def test_a_round_that_lacks_a_contribution_says_so_in_its_name_and_the_next_brings_an_anchor(
    desk: RetentionDesk,
) -> None:
    """The contributions of these rounds were never retained."""
    await desk.commit()
    await desk.commit()

    names = desk.rounds.rounds(0)
    assert [(name.version, name.whole) for name in names] == [(1, False), (2, False)]
    assert all(made.anchor is not None for made in desk.kept())
    assert not desk.rounds.reaches(0, 1, names[0].digest)


async def test_a_repeated_commit_is_retained_once(desk: RetentionDesk) -> None:
    store = desk.founded.stores[0]
    base = replace(store.holdings[0])
    await desk.founded.commit(0)
    head = store.holdings[0].head
    await desk.retention.round(head, base, ())
    acts = desk.archive.acts
    await desk.retention.round(head, base, ())

    assert desk.archive.acts == acts


async def test_only_what_counts_in_the_end_is_in_a_round(desk: RetentionDesk) -> None:
    key = PushKey("a", 1, 0, 1)
    fold = Fold(key=key, weight=1.0, staleness_weight=1.0, age=0)
    desk.retention.note_fold(fold)
    desk.retention.note_unfold(0)
    assert desk.retention.take_folds(0) == ()
    desk.retention.note_fold(fold)
    assert desk.retention.take_folds(0) == (), "its manifest was never retained: it was in a region's sum"
    assert desk.retention.take_folds(0) == ()


async def test_facts_have_a_bound(desk: RetentionDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the archive is away they wait in memory; beyond the bound the decisions of this tenure cannot be replayed."""
    monkeypatch.setattr(retention_module, "FACTS_MAX", 10)
    for number in range(12):
        desk.retention.fact(TimerFired(at_s=float(number), name="due/0"))
    await desk.commit()

    assert desk.rounds.facts(0, 1) == ([], "")


async def test_an_act_that_hangs_is_the_last_until_it_has_ended(
    desk: RetentionDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead network folder would otherwise gather threads, each with a contribution in memory, until memory is full."""
    monkeypatch.setattr(retention_module, "ACT_S", 2.0)  # what does not hang takes less, on a busy machine too
    goes_on, put = threading.Event(), desk.rounds.put_round
    begun = []

    def hanging(made: RetainedRound) -> int:
        begun.append(made)
        assert goes_on.wait(SOON_S)
        return put(made)

    monkeypatch.setattr(desk.rounds, "put_round", hanging)
    await desk.commit()
    desk.clock.now_s += PAUSE_S + 1.0
    await desk.commit()
    assert (len(begun), desk.retention.failures) == (1, 3), "the round, and of the next one the facts and the round"

    goes_on.set()
    async with asyncio.timeout(SOON_S):
        while desk.retention._running:  # noqa: ASYNC110  (a thread sets no event)
            await asyncio.sleep(0.01)
    monkeypatch.setattr(retention_module, "ACT_S", SOON_S)
    desk.clock.now_s += PAUSE_S + 1.0
    await desk.commit()
    assert len(begun) == 2


async def test_facts_that_are_dropped_while_some_are_written_leave_no_gap_behind_them(
    desk: RetentionDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after the bound is not written behind what came before it, as if nothing were missing."""
    monkeypatch.setattr(retention_module, "FACTS_MAX", 10)
    put = desk.rounds.put_facts

    def slow(*given: Any) -> int:  # noqa: ANN401  (passed on)
        written = put(*given)
        for number in range(12):
            desk.retention.fact(TimerFired(at_s=float(number), name="due/0"))
        return written

    monkeypatch.setattr(desk.rounds, "put_facts", slow)
    desk.retention.fact(TimerFired(at_s=0.5, name="first"))
    desk.retention._flush()
    monkeypatch.setattr(desk.rounds, "put_facts", put)
    desk.retention.fact(TimerFired(at_s=99.0, name="late"))
    desk.retention._flush()

    lines, fault = desk.rounds.facts(0, 1)
    assert (len(lines), fault) == (2, ""), "the machine as it began, and the first fact"


async def test_a_frame_that_a_manifest_carries_is_retained_once(desk: RetentionDesk) -> None:
    sent = manifest(desk.founded.record, "a", frame=base64.b64encode(b"frame").decode())
    carrying = decode(Contribution, sent.data)
    key = PushKey("a", 1, 0, 1)
    await desk.retention.contribution(key, carrying, {0: carrying.frame})
    desk.retention.note_fold(Fold(key=key, weight=1.0, staleness_weight=1.0, age=0))

    (fold,) = desk.retention.take_folds(0)
    assert fold.manifest.frame == b""
    assert fold.frame is not None
    assert desk.rounds.get_object(fold.frame) == b"frame"
