"""Whether a run goes on as if nobody attacked it, by its records: what was refused of honest learners, and what moved.

A commit may come a moment after what it is due to. So a look is compared with later ones: nothing of an honest learner may be
refused other than for being late, the count of the run may not rise by more than such learners train, and at last each
fragment has a version more and each honest learner has had a part in one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError, BlobGone
from atoll.bus.interface import Bus
from atoll.protocol.claims import BATCHES_MAX, INTERVALS_MAX, Claim, claim_fault, lived_since_s, steps_possible
from atoll.protocol.ledger import LEDGER_BYTES_MAX, FragmentLedger
from atoll.run.heads import read_heads
from atoll.run.history import History
from atoll.run.ledger import read_fragment_ledger
from atoll.run.watch import Watch
from atoll.wire.messages import Head, Included, RunRecord

LATE: Final = frozenset({"stale", "chunks_gone", "after_end"})


@dataclass(frozen=True, slots=True)
class RunLook:
    """A run at a moment: the version of each fragment, what is merged and refused of each honest learner, what counts."""

    at_s: float
    versions: dict[int, int]
    refused: dict[str, int]
    """Token-fragments by `learner: reason`."""
    merged: dict[str, int]
    counted: int
    step_tokens: float
    """The most tokens of an honest learner's step."""


@dataclass(slots=True)
class HonestWatch:
    """Looks at a run, one after the other."""

    bus: Bus
    run: RunRecord
    attackers: Collection[str]
    looks: list[RunLook] = field(default_factory=list)

    async def look(self) -> RunLook:
        """Read the heads, and the ledgers that they name."""
        while True:
            heads = await read_heads(self.bus, self.run)
            with contextlib.suppress(BlobGone):  # a commit wrote a newer ledger meanwhile
                ledgers = {fragment: await self._ledger(head) for fragment, head in heads.items()}
                break
        refused, merged = dict[str, int](), dict[str, int]()
        for ledger in ledgers.values():
            for name, settled in ledger.settled.items():
                learner = name.rpartition("/")[0]
                if learner in self.attackers:
                    continue
                merged[learner] = merged.get(learner, 0) + settled.merged + settled.merged_late
                for reason in settled.refused.keys() - LATE:
                    key = f"{learner}: {reason}"
                    refused[key] = refused.get(key, 0) + settled.refused[reason]
        sizes = [one.tokens / one.steps for head in heads.values() for one in self._honest(head)]
        self.looks.append(
            RunLook(
                asyncio.get_running_loop().time(),
                {fragment: head.version for fragment, head in heads.items()},
                refused,
                merged,
                sum(head.tokens_counted for head in heads.values()),
                max(sizes, default=0.0),
            )
        )
        return self.looks[-1]

    async def keep_looking(self, every_s: float) -> None:
        """Look again and again; a broker that is away is asked again."""
        while True:
            with contextlib.suppress(AtollError):
                await self.look()
            await asyncio.sleep(every_s)

    async def goes_on(self, since: RunLook, within_s: float, every_s: float) -> str:
        """Return what does not go on within some seconds, or the empty string as soon as all does."""
        deadline_s = asyncio.get_running_loop().time() + within_s
        while standing := stands_still(since, await self.look()):
            if asyncio.get_running_loop().time() > deadline_s:
                return standing
            await asyncio.sleep(every_s)
        return ""

    def harm(self, since_s: float, until_s: float) -> str:
        """Return what harm the looks of a time show, those around it included; the empty string for none."""
        before = [look for look in self.looks if look.at_s <= since_s][-1:]
        within = [look for look in self.looks if since_s < look.at_s <= until_s]
        after = [look for look in self.looks if look.at_s > until_s][:1]
        return harm_in([*before, *within, *after], self.run)

    def standing(self, since_s: float, within_s: float) -> str:
        """Return what had not gone on some seconds after a moment, by the looks of that time; the empty string for nothing."""
        before = [look for look in self.looks if look.at_s <= since_s][-1:]
        later = [
            stands_still(before[0], look) for look in self.looks if before and since_s < look.at_s <= since_s + within_s
        ]
        return later[-1] if later and all(later) else ""

    async def _ledger(self, head: Head) -> FragmentLedger:
        if head.fragment_ledger is None:
            return FragmentLedger()
        return read_fragment_ledger(await self.bus.get_blob(head.fragment_ledger, LEDGER_BYTES_MAX))

    def _honest(self, head: Head) -> Iterable[Included]:
        return (one for one in head.included if one.learner not in self.attackers and one.steps)


def harm_in(looks: list[RunLook], run: RunRecord) -> str:
    """Return what of honest learners was refused between the first look and the last, or how far the count has jumped."""
    if len(looks) < 2:
        return ""
    first, last = looks[0], looks[-1]
    cost = {key: tokens - first.refused.get(key, 0) for key, tokens in last.refused.items()}
    if told := ", ".join(f"{key} {tokens}" for key, tokens in cost.items() if tokens > 0):
        return f"refused of {told}"
    commits = sum(last.versions.values()) - sum(first.versions.values())
    pushed_most = max(look.step_tokens for look in looks) * BATCHES_MAX * INTERVALS_MAX * run.protocol.interval_steps
    possible = commits * (len(last.merged) + 1) * pushed_most
    rise = last.counted - first.counted
    return f"{rise:,} token-fragments counted in {commits} commits" if rise > possible else ""


async def unbelievable_lives(bus: Bus, run: RunRecord) -> list[str]:
    """Return the lives of which a reader of the event log shows more steps or tokens than there can be by now."""
    clock, view = SystemClock(), History()
    await Watch(bus, run.subjects.run, view, clock).catch_up()
    steps_max = steps_possible(run.protocol, lived_since_s(run.founded_at_s, clock.wall()))
    shown = {
        f"{name}/{life.incarnation}": Claim(life.steps, life.tokens, 0)
        for name, learner in view.learners.items()
        for life in learner.lives.values()
    }
    return [
        f"{name}: {fault}" for name, claim in shown.items() if (fault := claim_fault(run.protocol, claim, steps_max))
    ]


def stands_still(since: RunLook, now: RunLook) -> str:
    """Return which fragments have made no version, and of which honest learners nothing was merged since."""
    fragments = [str(p) for p, version in now.versions.items() if version <= since.versions.get(p, -1)]
    learners = [name for name, merged in now.merged.items() if merged <= since.merged.get(name, -1)]
    told = [f"no version of fragments {', '.join(fragments)}"] if fragments else []
    return "; ".join([*told, *(f"nothing merged of {name}" for name in learners)])
