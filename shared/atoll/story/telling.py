"""Stories in words: the causal chain of a round, a fragment or a contribution, a learner's lives, a shard's owners.

    call ──► contributions ──► commit ──► head ──► adoption

The sentences on why a round waited are those of `atoll.run.decisions`. A shard knows nothing of the time before its present
owner: that time is told from its outages. Times of a round are by its shard's clock, those of an adoption by its learner's.
Where an event lacks a fact, the story says that the event log does not tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from atoll.base.wording import counted
from atoll.protocol.events import id_of
from atoll.run.decisions import describe_clip, describe_isolation, describe_wait, list_names
from atoll.run.history import History, RoundLine, base_of, push_id
from atoll.story.findings import describe_measure, refused_id
from atoll.story.goodput import alignment_of_others, duration_of_others, of_others, points_away, shares_of, weight_of
from atoll.story.lives import (
    LearnerAbsence,
    ShardOutage,
    absences_of,
    long_bound_s,
    outages_of,
    owner_of,
    round_lengths,
    stood_still,
    usual_pause_s,
)
from atoll.wire.events import Contributor

SILENT: Final = "the event log does not tell"
LATEST: Final = 10


def one_line(line: RoundLine) -> str:
    """Return a round in one line: its identity, how long it waited, and why it ended."""
    made, why = line.round, line.round.why
    if why is not None and not why.calls:
        return f"fragment {made.fragment} version {made.version}: it was not called; {describe_wait(why)['end']}"
    end = made.end if why is None else describe_wait(why)["end"]
    quorum = f"{made.phases.quorum_wait_s:.3f} s to the quorum" if made.met_quorum else "its quorum was never met"
    after_s = made.took_s - made.waited_s
    after = f", {after_s:.3f} s more until it was visible" if after_s > 0.1 * made.took_s else ""
    return f"fragment {made.fragment} version {made.version}: {made.waited_s:.3f} s from call to end ({quorum}); {end}{after}"


def round_story(history: History, line: RoundLine) -> list[str]:
    """Return why one round waited, who answered when and with what weight, and its chain of causes."""
    made, clock = line.round, history.clock
    outages = stood_still(history, line, outages_of(history))
    called = made.why is None or made.why.calls > 0
    return [
        f"fragment {made.fragment}: version {made.version - 1} became {made.version}, by {line.shard} at {clock.at(line.at_s)}",
        "",
        "why it waited",
        *_waits(history, line, outages),
        "",
        f"who was called at {clock.at(line.called_s)}, and what came of it"
        if called
        else "nobody was called, and this came of it",
        *_answers(line),
        "",
        "what caused what",
        *_causes(history, line),
    ]


def long_rounds(history: History, shard: str | None = None, count: int = LATEST) -> list[str]:
    """Return the rounds that are long, of all shards or one, the longest first, and by what measure they are."""
    every = round_lengths(history)
    if not every:
        return ["no round has ended yet"]
    bound_s = long_bound_s(every)
    own = [each for each in every if shard in (None, each.line.shard)]
    measure = (
        "from the call of a round until its version was visible, and while its shard had no owner; "
        f"more than {bound_s:.3g} s is long"
    )
    long = [each for each in own if each.whole_s > bound_s]
    standing = [
        f"no round of {each.shard} has ended for {each.lasted_s:.3g} s, to the end of the event log: it has no owner"
        for each in outages_of(history)
        if each.heir is None and shard in (None, each.shard)
    ]
    if not long:
        longest = f", the longest is {one_line(own[0].line)}" if own else ""
        return [*standing, f"none of {len(own)} rounds is long ({measure}){longest}"]
    told = [*standing, f"{len(long)} of {len(own)} rounds are long ({measure})"]
    for each in long[:count]:
        stood = f"{each.whole_s:.3f} s, of these {each.outage_s:.3f} s without an owner: " if each.outage_s else ""
        told.append(f"  {stood}{one_line(each.line)}")
    return [*told, *([f"  and {counted(len(long) - count, 'more round')}"] if len(long) > count else [])]


def fragment_story(history: History, fragment: int) -> list[str]:
    """Return the latest rounds of a fragment, what its next round waits for, and who is on which version."""
    made = [line for line in history.rounds if line.round.fragment == fragment]
    told = [f"fragment {fragment}: {counted(len(made), 'round')} in the event log; the latest"]
    told += [f"  {one_line(line)}" for line in made[-LATEST:]]
    told += ["", _next_version(history, made[-1])] if made else []
    newest: dict[str, tuple[int, str]] = {}
    for line in made:
        for share in line.round.contributors:
            newest[share.learner] = base_of(line, share), push_id(line, share)
    told += [
        f"{learner} was last seen on version {base}: {push} is on it"
        for learner, (base, push) in sorted(newest.items())
    ]
    return told


def _next_version(history: History, newest: RoundLine) -> str:
    version, shard = newest.round.version + 1, newest.shard
    if shard in history.closed:
        return f"version {version - 1} is its last: {shard} has closed its ledger, and makes no other"
    dead = next((each for each in outages_of(history) if each.shard == shard and each.heir is None), None)
    if dead is not None:
        return f"version {version} is not there yet: {shard} has no owner {history.clock.span(dead.from_s, None)}"
    still = history.waiting(newest.round.fragment, version)
    if still is not None:
        return f"version {version} is not there yet; {still.why} ({still.cause_id})"
    return f"version {version} is not there yet: its round rests until its beat, or was called only now"


def contribution_story(history: History, line: RoundLine, share: Contributor) -> list[str]:
    """Return the way of one merged contribution: from its adoption to the version it is part of."""
    made, base, clock = line.round, base_of(line, share), history.clock
    cause = share.cause_id or SILENT
    steps = [
        f"began on version {base} at {clock.at(share.adopted_at_s)}"
        if share.adopted_at_s
        else f"when its learner began on version {base}, {SILENT}",
        f"trained {share.tokens:,} tokens in {share.steps:,} steps"
        + (f" of {share.step_s:.3g} s" if share.step_s else ""),
        f"was asked for by {cause}",
        _describe_upload(share),
        f"reached {line.shard} {_beside_call(share.arrived_s)}"
        if share.arrived_s is not None
        else f"when it arrived, {SILENT}",
        _describe_weight(line, share),
        _describe_correction(share),
        _describe_agreement(share),
        f"became part of version {made.version} ({id_of('head', made.fragment, made.version)}) at {clock.at(line.at_s)}",
    ]
    return [push_id(line, share), *(f"  {step}" for step in steps if step)]


def _describe_upload(share: Contributor) -> str:
    """Return how a contribution came to the broker; one that its manifest carried has no upload of its own."""
    if share.inline:
        late = f", sent {share.upload_s:.3g} s after the push began" if share.upload_s else ""
        return f"was carried by its manifest ({share.bytes:,} bytes){late}" + _describe_wait_for_room(share)
    if share.upload_s:
        return f"was uploaded in {share.upload_s:.3g} s ({share.bytes:,} bytes)" + _describe_wait_for_room(share)
    return f"how long its upload took, {SILENT}"


def refused_story(history: History, learner: str, incarnation: int, fragment: int, push: int) -> list[str]:
    """Return what the event log tells of a contribution that was refused; nothing if it does not know of it."""
    wanted = id_of("push", learner, incarnation, fragment, push)
    return [
        f"{wanted} was refused by {each.who} at {history.clock.at(each.at_s)}: {each.fields.reason}"
        f"{describe_measure(each.fields)}"
        for each in history.refused
        if refused_id(each.fields) == wanted
    ]


# --- the parts of a round's story ---------------------------------------------------------------------------------


def _waits(history: History, line: RoundLine, outages: Sequence[ShardOutage]) -> list[str]:
    made, why = line.round, line.round.why
    still = [
        f"  {'outage':<7} {each.lasted_s:>9.3f} s  {line.shard} had no owner {history.clock.span(each.from_s, each.until_s)}: "
        "it called nobody and made no version, until "
        + (f"{owner_of(each.heir)} took it over" if each.heir is not None else "it wrote again")
        for each in outages
    ]
    if why is None:
        return [*still, f"  not written down; it ended with {made.end!r} {made.waited_s:.3f} s after the call"]
    told, phases = describe_wait(why), made.phases
    if outages and why.opening.opened == "never":
        # The present owner knows only that nobody was left when it began.
        told["rest"] = (
            f"it was never called: {line.shard} had no owner until then, and by then no live learner was left to ask"
        )
    room = {"full": "the broker had no room", "away": "the broker was away"}
    held = "; ".join(f"{seconds:.3g} s of it because {room.get(word, word)}" for word, seconds in made.hindered.items())
    away = f"; {made.away_s:.3g} s of it because {room['away']}" if made.away_s else ""
    places = [
        (why.opening.rested_s, "rest", told["rest"]),
        (phases.quorum_wait_s, "quorum", told.get("quorum", "nobody was called") + away),
        (phases.grace_s, "grace", "; ".join(part for part in (told.get("grace"), told["end"]) if part)),
        (phases.queued_s, "queue", "from the decision until the shard came to it"),
        (phases.merge_s, "merge", f"of {counted(len(made.contributors), 'contribution')}"),
        (phases.commit_s, "commit", "outer step, storing, and the head" + (f"; {held}" if held else "")),
    ]
    return [*still, *(f"  {name:<7} {seconds:>9.3f} s  {words}" for seconds, name, words in places)]


def _answers(line: RoundLine) -> list[str]:
    made, why = line.round, line.round.why
    lines = [
        f"  {describe_answer(line, share)}"
        for share in sorted(made.contributors, key=lambda each: each.arrived_s or 0.0)
    ]
    if why is not None and why.missing.count:
        lines.append(f"  no answer until its end: {list_names(why.missing)}")
    return lines


def describe_answer(line: RoundLine, share: Contributor) -> str:
    """Return a merged contribution in one line: when it arrived, its upload, its steps, its weight, how it agreed."""
    parts = [
        f"arrived {_beside_call(share.arrived_s)}" if share.arrived_s is not None else f"arrived: {SILENT}",
        f"upload {share.upload_s:.3g} s" if share.upload_s else "",
        f"{share.steps} steps" if share.steps else "",
        _describe_weight(line, share),
        _describe_correction(share),
        _describe_agreement(share),
    ]
    return f"{push_id(line, share)}: {', '.join(part for part in parts if part)}"


def _beside_call(seconds: float | None) -> str:
    if seconds is None:
        return SILENT
    return f"{seconds:.3g} s after the call" if seconds >= 0.0 else f"{-seconds:.3g} s before the call"


def _describe_wait_for_room(share: Contributor) -> str:
    return f", of which it waited {share.full_s:.3g} s for room at the broker" if share.full_s else ""


def _describe_weight(line: RoundLine, share: Contributor) -> str:
    total = sum(weight_of(each) for each in line.round.contributors)
    words = f"{weight_of(share) / total:.1%} of the weight" if total else "no weight"
    if not share.age:
        return words
    late = f"{counted(share.age, 'version')} late"
    if share.staleness_weight is None:
        return f"{words}, {late}"
    return f"{words}, {late} and so damped to {share.staleness_weight:.3g} of its own"


def _describe_correction(share: Contributor) -> str:
    words = []
    if share.corrected:
        lengths = f"length {share.norm or 0:.3g} to {share.corrected_norm or 0:.3g}"
        words.append(f"{counted(share.corrected, 'slice')} turned towards the momentum, {lengths}")
    if share.norm_max is not None:
        words.append(describe_clip(share.norm or 0.0, share.norm_max))
    if share.shortened:
        words.append(f"{share.shortened} slices shortened")
    if share.unheard:
        words.append(f"{share.unheard} slices not heard")
    return ", ".join(words)


def _describe_agreement(share: Contributor) -> str:
    if share.aligned is None:
        return ""
    beside = "" if share.aligned_with_others is None else f", {share.aligned_with_others:.3g} with the others"
    return f"cosine {share.aligned:.3g} with the merge{beside}"


def _causes(history: History, line: RoundLine) -> list[str]:
    made, why = line.round, line.round.why
    fragment, version = made.fragment, made.version
    links: list[tuple[str, str, str]] = []
    if why is not None and why.calls:
        again = f"called {why.calls} times" if why.calls > 1 else ""
        links.append((why.opening.cause_id, id_of("call", fragment, version - 1, 1), again))
    for share in made.contributors:
        late = f", {counted(share.age, 'version')} late" if share.age else ""
        links.append((share.cause_id, push_id(line, share), f"{share.tokens:,} tokens{late}"))
    commit, head = id_of("commit", fragment, version), id_of("head", fragment, version)
    links += [(made.cause_id, commit, made.end), (commit, head, "")]
    lines = [f"  {cause or 'unknown':<28} -> {effect:<28} {note}".rstrip() for cause, effect, note in links]
    adopted = history.adopted_by(fragment, version)
    for learner, (push, at_s) in sorted(adopted.items()):
        when = f" {at_s - line.at_s:.3g} s later" if at_s else ""
        lines.append(f"  {head:<28} -> adopted by {learner}{when}: {push} is on it")
    if not adopted:
        lines.append(f"  {head:<28} -> no contribution on it is known yet")
    return lines


def learner_story(history: History, learner: str) -> list[str]:
    """Return what a learner did: its lives, what it contributed beside the others, its refusals, its latest contributions."""
    shares, clock = shares_of(history.rounds), history.clock
    own = next((share for share in shares if share.learner == learner), None)
    told = [f"learner {learner}", ""]
    lives = [
        (each.at_s, f"joined as incarnation {each.fields.incarnation} after {each.fields.took_s:.3g} s")
        for each in history.joined
        if each.who == learner
    ]
    lives += [
        (each.at_s, f"left: {each.fields.tokens:,} tokens in {each.fields.steps:,} steps")
        for each in history.left
        if each.who == learner
    ]
    lives += [(each.from_s, _describe_absence(each)) for each in absences_of(history) if each.learner == learner]
    for each in (one for one in history.quarantined if one.fields.learner == learner):
        why = describe_isolation(each.fields.offences, each.fields.reason)
        lives.append((each.at_s, f"{each.who} put incarnation {each.fields.incarnation} into quarantine: {why}"))
    told += [f"  {clock.at(at_s)}  {words}" for at_s, words in sorted(lives)] or [f"  when it joined, {SILENT}"]
    if own is None:
        return [*told, "", "no contribution of it was merged", *_refusals(history, learner)]
    others, duration = partial(of_others, shares, learner), partial(duration_of_others, shares, learner)
    alignment = alignment_of_others(shares, learner)
    figures = [
        ("contributions merged", own.contributions, None, "{:,}"),
        ("of them late", own.late, None, "{:,}"),
        ("share of a round's weight", own.weight_share, others(lambda each: each.weight_share), "{:.1%}"),
        ("inner steps in a contribution", own.steps, others(lambda each: each.steps), "{:.4g}"),
        ("inner step, s", own.step_s, duration(lambda each: each.step_s), "{:.3g}"),
        ("upload, s", own.upload_s, duration(lambda each: each.upload_s), "{:.3g}"),
        ("cosine with the merge", own.aligned, others(lambda each: each.aligned), "{:.3g}"),
        ("cosine with the other learners", own.aligned_with_others, alignment, "{:.3g}"),
        ("left of its length after correction", own.shortened, None, "{:.1%}"),
        ("training loss", own.loss, others(lambda each: each.loss), "{:.4g}"),
    ]
    told += ["", f"  {'what it contributed (medians)':<38}{learner:>14}{'the others':>14}"]
    for name, mine, theirs, form in figures:
        told.append(
            f"  {name:<38}{'not told' if mine is None else form.format(mine):>14}"
            f"{'' if theirs is None else form.format(theirs):>14}".rstrip()
        )
    if points_away(own, alignment):
        told.append("  it points elsewhere than the others: look at its machine, its data and its learning rate")
    told += _refusals(history, learner)
    told += ["", "its latest contributions"]
    told += [f"  {describe_answer(line, share)}" for line, share in history.contributions(learner)[-LATEST:]]
    return told


def _describe_absence(each: LearnerAbsence) -> str:
    told = f"was last heard: incarnation {each.former} left no word; it was gone for {each.gone_s:.3g} s"
    if each.joined_s is None or each.until_s is None:
        return f"{told}, to the end of the event log{each.describe_loss()}"
    joined = f"incarnation {each.heir} began, which joined {each.joined_s - each.until_s:.3g} s later"
    return f"{told}, until {joined}{each.describe_loss()}"


def _refusals(history: History, learner: str) -> Sequence[str]:
    refused = [each for each in history.refused if each.fields.learner == learner]
    if not refused:
        return []
    told = [
        f"  {history.clock.at(each.at_s)}  push {each.fields.push} of fragment {each.fields.fragment}: {each.fields.reason}"
        f"{describe_measure(each.fields)}"
        for each in refused[-LATEST:]
    ]
    return ["", f"{len(refused)} of its contributions were refused", *told]


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
        *_refused_by_shard(history, shard),
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


def _refused_by_shard(history: History, shard: str) -> list[str]:
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
