"""A run whose processes are killed all the time, made once more from what it has retained: `make bench-replay`.

One `atoll up` as in `chaos` with `archive.contributions`, in which after every `COMMITS_PER_KILL` commits a shard's owner, or
now and then a learner, gets SIGKILL. It ends after `COMMITS` commits, or after `--minutes`; a shorter run has no goals for
commits and kills. Then every round is replayed from the archive alone and compared with what was seen:

    identical     the shard's machine, told the same facts, decides the same; the same arithmetic gives the digests of the head
    heard         heads that a listener beside the run has read: same version, digest and contributions as replayed
    on the event log   commits of the event log: same contributions as replayed
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Final

from atoll.archive.object_store import open_archive
from atoll.archive.replay import ReplayedRound, RunReplay
from atoll.archive.rounds import RoundStore, foundings
from benchmarks.faults.chaos import FOLDER, LEARNERS
from benchmarks.faults.metrics import Course, Extract, ExtractShare, save
from benchmarks.faults.storm import Planned
from benchmarks.faults.up_in_storm import SHARDS, run_up
from benchmarks.lib.harness import Figure, at_least, fact, run_benchmark, zero
from benchmarks.lib.runs import prepare

COMMITS: Final = 600
COMMITS_PER_KILL: Final = 8
LEARNER_EVERY: Final = 5
"""Every so manyth kill is of a learner, which takes long to come back; the others are of owners of shards."""
MINUTES: Final = 10.0
SETTINGS: Final = ("archive.contributions=true", "protocol.interval_steps=8")
"""Short local intervals, so that there are many commits."""
COMMITS_MIN: Final = 500
KILLS_MIN: Final = 50


@dataclass(frozen=True, slots=True)
class Replayed:
    """Every round of a run, replayed in so many seconds."""

    rounds: dict[tuple[int, int], ReplayedRound]
    seconds: float
    facts: int
    tenures: int
    size_bytes: int

    @property
    def identical(self) -> int:
        return sum(made.identical for made in self.rounds.values())


def main(*, minutes: Annotated[float, "of the storm, at most"] = MINUTES, seed: int = 0) -> list[Figure]:
    course = Course("replay", "atoll", 0.0, seed, float(COMMITS), 0.0, LEARNERS)
    out = FOLDER / "replay"
    shutil.rmtree(out, ignore_errors=True)
    extract = run_up(course, prepare(), out, kills(), SETTINGS, commits_by=60.0 * minutes)
    save(extract, out.with_suffix(".json.zst"))
    archive = open_archive(str(out / "archive"))
    rounds = RoundStore(archive, course.name, foundings(archive, course.name)[-1])
    print("replaying …", flush=True)
    made = replay_all(rounds)
    found = [*run_figures(extract, made, whole=minutes >= MINUTES), *compare(extract, made)]
    return [*found, *cost(made, out / "logs")]


def kills() -> list[Planned]:
    """Return the kills, by number of commits: owners of either shard in turn, and now and then a learner."""
    planned = []
    for number in range(COMMITS // COMMITS_PER_KILL):
        is_learner = number % LEARNER_EVERY == LEARNER_EVERY - 1
        role, among = ("learner", LEARNERS) if is_learner else ("owner", SHARDS)
        turn = number // LEARNER_EVERY if is_learner else number
        planned.append(Planned(float(COMMITS_PER_KILL * (number + 1)), "kill", role, (turn % among + 0.5) / among))
    return planned


def replay_all(rounds: RoundStore) -> Replayed:
    began_s = time.monotonic()
    again = RunReplay(rounds)
    found = [made for fragment in range(again.run.protocol.fragments) for made in again.fragment(fragment)]
    took_s = time.monotonic() - began_s
    facts = sum(tenure.facts for tenure in again.tenures.values())
    by_version = {(made.fragment, made.version): made for made in found}
    return Replayed(by_version, took_s, facts, len(again.tenures), rounds.size_bytes())


def run_figures(extract: Extract, made: Replayed, *, whole: bool) -> list[Figure]:
    """Return how many kills and commits there were; goals only for a `whole` run."""
    kinds = [fault.role for fault in extract.faults if fault.act == "kill"]
    how = f"{kinds.count('learner')} learners, {kinds.count('owner')} owners of shards; one every {COMMITS_PER_KILL} commits"
    commits, epochs = sum(extract.heads.values()), f"{made.tenures} tenures of shards"
    return [
        at_least("processes killed", float(len(kinds)), "kills", KILLS_MIN if whole else None, how),
        at_least("commits", float(commits), "commits", COMMITS_MIN if whole else None, epochs),
    ]


def compare(extract: Extract, made: Replayed) -> list[Figure]:
    versions = {(p, version) for p, last in extract.heads.items() for version in range(1, last + 1)}
    missing = versions - made.rounds.keys()
    differing = sorted(key for key, each in made.rounds.items() if not each.identical)
    words = "; ".join(f"{p}/{v}: {made.rounds[p, v].differences[0]}" for p, v in differing[:3]) or "none differs"
    heard = [each for each in extract.made if each.version]
    same = sum(is_same(made, each.fragment, each.version, each.shares, each.digest) for each in heard)
    told = sum(is_same(made, each.fragment, each.version, each.shares) for each in extract.rounds)
    count = len(made.rounds)
    return [
        fact("heads compared", float(count), "heads", f"{made.facts} facts of {made.tenures} tenures told again"),
        Figure("heads identical", float(made.identical), "heads", "all", made.identical == count, words),
        zero("versions without a retained round", len(missing), "versions", str(sorted(missing)[:3])),
        Figure(
            "heads heard beside the run, replayed", float(same), "heads", "all", same == len(heard), f"of {len(heard)}"
        ),
        Figure(
            "commits on the event log, replayed",
            float(told),
            "commits",
            "all",
            told == len(extract.rounds),
            f"of {len(extract.rounds)}; the same contributions in the same order",
        ),
    ]


def is_same(made: Replayed, fragment: int, version: int, shares: Sequence[ExtractShare], digest: str = "") -> bool:
    """Return whether a version was replayed with these contributions, and to this digest if one is given."""
    there = made.rounds.get((fragment, version))
    if there is None or (digest and there.digest != digest):
        return False
    return [(each.learner, each.incarnation, each.push) for each in shares] == [
        (key.learner, key.incarnation, key.push) for key in there.pushes
    ]


def cost(made: Replayed, logs: Path) -> list[Figure]:
    owners = [*logs.glob("shard-*.jsonl"), *logs.glob("standby-*.jsonl")]
    said = (line for log in owners for line in log.read_text(encoding="utf-8").splitlines())
    lines = [json.loads(line) for line in said if line.startswith("{") and line.endswith("}")]
    retained = [line for line in lines if line.get("event") == "round.retained"]
    lost = sum(line.get("event") == "rounds.not_retained" for line in lines)
    count = max(1, len(made.rounds))
    return [
        fact("replaying takes", made.seconds, "s", "from the archive alone, by one process"),
        fact("replaying takes per round", 1e3 * made.seconds / count, "ms", f"{count} rounds"),
        fact("retained", made.size_bytes / 1e6, "MB", "contributions, rounds, facts and anchors"),
        fact("retained per round", made.size_bytes / 1e3 / count, "kB", f"{count} rounds"),
        fact(
            "a commit waits for its round to be retained",
            1e3 * median(line["took_s"] for line in retained),
            "ms",
            "median, in a folder of this machine",
        ),
        fact("acts of retention that failed", float(lost), "acts", "the archive was away or too slow"),
    ]


if __name__ == "__main__":
    run_benchmark("bench-replay", main)
