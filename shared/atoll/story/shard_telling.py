"""The story of a shard: its owners and the times without one, what it made, whom it refused, its longest rounds."""

from __future__ import annotations

from collections import Counter

from atoll.base.wording import counted
from atoll.run.decisions import describe_isolation
from atoll.story.history import History
from atoll.story.outages import outages_of, owner_of, usual_pause_s
from atoll.story.telling import LATEST, SILENT, long_rounds


def shard_story(history: History, shard: str) -> list[str]:
    """Return what happened to a shard, in order, and what it did."""
    fragments = history.fragments_of(shard)
    served = f"fragments {', '.join(map(str, fragments))}" if fragments else f"which fragments, {SILENT}"
    return [
        f"{shard}: {served}",
        "",
        "its owners",
        *_owners(history, shard),
        "",
        "its commits",
        *_commits(history, shard),
        "",
        "whom it refused",
        *_refused(history, shard),
        "",
        "its longest rounds",
        *(f"  {line}" for line in long_rounds(history, shard)),
    ]


def _owners(history: History, shard: str) -> list[str]:
    clock, missed = (
        history.clock,
        {None if each.heir is None else each.until_s: each for each in outages_of(history) if each.shard == shard},
    )
    told = []
    for tenure in (each for each in history.tenures if each.shard == shard):
        words = (
            f"{owner_of(tenure)} serves it, epoch {tenure.fields.epoch}, after {tenure.fields.took_s:.3g} s to begin"
        )
        if (outage := missed.get(tenure.from_s)) is not None:
            told.append(
                f"  {clock.at(outage.from_s)}  the last sign of its owner; it had none for {outage.lasted_s:.3g} s"
            )
            words += ": a takeover"
        elif tenure.former_s is not None:
            words += ": handed over in good order" if tenure.closed else ": the run went on"
        told.append(f"  {clock.at(tenure.from_s)}  {words}")
    if (lasting := missed.get(None)) is not None:
        told.append(
            f"  {clock.at(lasting.from_s)}  the last sign of its owner; it has none to the end of the event log, "
            f"{lasting.lasted_s:.3g} s"
        )
    elif shard in history.closed:
        told.append("  it has closed its ledger: its last owner left in good order")
    return told or [f"  {SILENT} who served it"]


def _commits(history: History, shard: str) -> list[str]:
    made = [line for line in history.rounds if line.shard == shard]
    if not made:
        return ["  none is in the event log"]
    usual_s = usual_pause_s(history, shard)
    pace = "" if usual_s is None else f", usually one every {usual_s:.3g} s"
    told = [f"  {counted(len(made), 'commit')}{pace}, the last at {history.clock.at(made[-1].at_s)}"]
    newest = {line.round.fragment: line.round.version for line in made}
    told += [f"  fragment {fragment} is at version {version}" for fragment, version in sorted(newest.items())[:LATEST]]
    return [*told, *([f"  and {counted(len(newest) - LATEST, 'more fragment')}"] if len(newest) > LATEST else [])]


def _refused(history: History, shard: str) -> list[str]:
    counts = Counter((each.fields.learner, each.fields.reason) for each in history.refused if each.who == shard)
    told = [
        f"  {counted(count, 'contribution')} of {learner or 'a learner'}: {reason}"
        for (learner, reason), count in counts.most_common(LATEST)
    ]
    told += [
        f"  {history.clock.at(each.at_s)}  it put {each.fields.learner}, incarnation {each.fields.incarnation}, into "
        f"quarantine: {describe_isolation(each.fields.offences, each.fields.reason)}"
        for each in history.quarantined
        if each.who == shard
    ]
    return told or ["  nobody"]
