"""What stands out of shards and of the broker: commits that had to wait for it, and shards that had no owner."""

from __future__ import annotations

from atoll.story.history import History, RoundMoments, push_id
from atoll.story.outages import ShardOutage, outages_of, owner_of, usual_pause_s
from atoll.story.run_finding import Cause, RunFinding, finding

HINDERED_MIN_S = 1.0
NAMED_MAX = 3


def hindered_commits(history: History) -> list[RunFinding]:
    """Return what kept commits and uploads waiting: a full disk or stream, or a broker that was away."""
    found = []
    causes: tuple[tuple[str, Cause, str], ...] = (
        ("full", "disk was full", "it had no room"),
        ("away", "broker was away", "it did not answer"),
    )
    for word, cause, why in causes:
        commits = [line for line in history.rounds if line.round.hindered.get(word, 0.0) >= HINDERED_MIN_S]
        waited = [
            (line, share)
            for line, share in history.contributions()
            if word == "full" and share.full_s >= HINDERED_MIN_S
        ]
        if not commits and not waited:
            continue
        seconds = sum(line.round.hindered[word] for line in commits) + sum(share.full_s for _, share in waited)
        evidence = [
            f"commit/{line.round.fragment}/{line.round.version} by {line.shard}: {line.round.hindered[word]:.3g} s of its "
            f"{line.round.commit_s:.3g} s to commit"
            for line in commits[:NAMED_MAX]
        ]
        evidence += [
            f"{push_id(line, share)}: its upload waited {share.full_s:.3g} s for room"
            for line, share in waited[:NAMED_MAX]
        ]
        spans = [(line.at_s - line.round.commit_s, line.at_s) for line in commits]
        for line, share in waited:
            arrived_s = RoundMoments.of(line).called_s + (share.arrived_s or 0.0)
            spans.append((arrived_s - share.upload_s, arrived_s))
        found.append(
            finding(
                cause,
                "broker",
                f"{len(commits)} commits and {len(waited)} uploads waited {seconds:.3g} s in all, because {why}",
                from_s=min(begun_s for begun_s, _ in spans),
                until_s=max(ended_s for _, ended_s in spans),
                evidence=tuple(evidence),
            )
        )
    return found


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
