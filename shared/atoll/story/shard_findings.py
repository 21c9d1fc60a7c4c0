"""What stands out of shards and of the broker: commits that had to wait for it, and shards that had no owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.base.wording import counted
from atoll.story.history import History, RoundMoments, push_id
from atoll.story.outages import ShardOutage, outages_of, owner_of, usual_pause_s
from atoll.story.run_finding import Cause, RunFinding, finding

HINDERED_MIN_S: Final = 1.0
NEAR_S: Final = 60.0
"""What waited again within this time waited for the same cause: one episode. After a longer time the broker was well."""
EPISODES_MAX: Final = 6
NAMED_MAX: Final = 3
HINDRANCES: Final[tuple[tuple[str, Cause, str], ...]] = (
    ("full", "disk was full", "it had no room"),
    ("away", "broker was away", "it did not answer: it was gone, cut off, or its disk was full"),
)
"""What commits note of it, what it is called, and why it made them wait."""


@dataclass(frozen=True, slots=True)
class HinderedWork:
    """A commit or an upload that waited for the broker: when it was under way, how long it waited, and where that is told."""

    from_s: float
    until_s: float
    waited_s: float
    is_commit: bool
    told: str


def hindered_commits(history: History) -> list[RunFinding]:
    """Return what kept commits and uploads waiting: a full disk or stream, or a broker that was away; one for each episode."""
    found: list[RunFinding] = []
    for word, cause, why in HINDRANCES:
        every = episodes(_hindered(history, word))
        kept = _worst(every)
        found += [
            _episode_told(each, cause, why, left_out=len(every) - len(kept) if each is kept[-1] else 0) for each in kept
        ]
    return found


def episodes(hindered: Iterable[HinderedWork]) -> list[list[HinderedWork]]:
    """Return what waited in episodes, oldest first: within one no `NEAR_S` pass in which nothing waited."""
    found: list[list[HinderedWork]] = []
    until_s = 0.0
    for each in sorted(hindered, key=lambda one: one.from_s):
        if not found or each.from_s - until_s > NEAR_S:
            found.append([])
            until_s = each.until_s
        found[-1].append(each)
        until_s = max(until_s, each.until_s)
    return found


def _hindered(history: History, word: str) -> Iterator[HinderedWork]:
    """Yield the commits and uploads that waited because the broker was `word`, "full" or "away"."""
    for line in history.rounds:
        made = line.round
        before_s = made.away_s if word == "away" else 0.0
        waited_s = made.hindered.get(word, 0.0) + before_s
        if waited_s >= HINDERED_MIN_S:
            took_s, what = (
                (made.took_s, "from its call until it was visible") if before_s else (made.commit_s, "to commit")
            )
            told = (
                f"commit/{made.fragment}/{made.version} by {line.shard}: {waited_s:.3g} s of its {took_s:.3g} s {what}"
            )
            yield HinderedWork(line.at_s - took_s, line.at_s, waited_s, is_commit=True, told=told)
    if word != "full":
        return  # a learner notes only how long it waited for room
    for line, share in history.contributions():
        if share.full_s >= HINDERED_MIN_S:
            arrived_s = RoundMoments.of(line).called_s + (share.arrived_s or 0.0)
            told = f"{push_id(line, share)}: its upload waited {share.full_s:.3g} s for room"
            yield HinderedWork(arrived_s - share.upload_s, arrived_s, share.full_s, is_commit=False, told=told)


def _worst(every: Sequence[list[HinderedWork]]) -> list[list[HinderedWork]]:
    """Return the episodes that are told, in order of time: the newest one, and those in which most was waited."""
    if len(every) <= EPISODES_MAX:
        return list(every)
    places = sorted(range(len(every) - 1), key=lambda place: sum(each.waited_s for each in every[place]), reverse=True)
    return [every[place] for place in sorted([*places[: EPISODES_MAX - 1], len(every) - 1])]


def _episode_told(episode: Sequence[HinderedWork], cause: Cause, why: str, left_out: int) -> RunFinding:
    commits, uploads = [each for each in episode if each.is_commit], [each for each in episode if not each.is_commit]
    seconds = sum(each.waited_s for each in episode)
    evidence = [each.told for each in (*commits[:NAMED_MAX], *uploads[:NAMED_MAX])]
    if left_out:
        evidence.append(
            f"it was so at {counted(left_out, 'other time, which is', 'other times, which are')} not told here"
        )
    return finding(
        cause,
        "broker",
        f"{counted(len(commits), 'round')} and {counted(len(uploads), 'upload')} waited {seconds:.3g} s in all, because {why}",
        from_s=min(each.from_s for each in episode),
        until_s=max(each.until_s for each in episode),
        evidence=tuple(evidence),
    )


def shards_without_owner(history: History) -> list[RunFinding]:
    """Return the outages of shards: dead, and taken over or not."""
    return [_without_owner(history, each) for each in outages_of(history)]


def _without_owner(history: History, outage: ShardOutage) -> RunFinding:
    shard = outage.shard
    fragments = ", ".join(map(str, history.fragments_of(shard)))
    stood = f"its fragments ({fragments}) stood still" if fragments else "its fragments stood still"
    last = next((line for line in reversed(history.rounds) if line.shard == shard and line.at_s <= outage.from_s), None)
    usual_s = usual_pause_s(history, shard)
    usual = "" if usual_s is None else f"; a round is usual every {usual_s:.3g} s"
    evidence = [] if last is None else [f"commit/{last.round.fragment}/{last.round.version} was its last before{usual}"]
    if outage.heir is None:
        evidence.append(f"others wrote on: {_others(history, shard)}")
        text = f"it has written nothing for the last {outage.lasted_s:.3g} s, and nobody took it over: {stood}"
    else:
        evidence.append(f"event serving of epoch {outage.heir.fields.epoch}: its next owner")
        text = f"it had no owner for {outage.lasted_s:.3g} s, until {owner_of(outage.heir)} took it over: {stood}"
    until_s = None if outage.heir is None else outage.until_s
    return finding("shard without owner", shard, text, from_s=outage.from_s, until_s=until_s, evidence=tuple(evidence))


def _others(history: History, shard: str) -> str:
    others = sorted(who for who, at_s in history.last_s.items() if who != shard and at_s > history.last_s[shard])
    return ", ".join(others[:NAMED_MAX]) or "nobody"
