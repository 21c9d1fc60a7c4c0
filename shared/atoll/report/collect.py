"""From a run's view to `report.json`. The schema is beside this module; docs explain it in prose.

**Fates.** The report merges the shards' closing ledgers into one, settles it against the learners' own counts, and
apportions it to whole tokens. `tokens_by_fate` always sums to `tokens_trained` exactly: tokens without a known fate count
as `lost`; contradictions between ledgers appear in `fates_errors`. `fates_exact` is true only if every shard closed its
ledger, every account balances and nothing has two fates.

**Bytes** are payload bytes: up and down by the learners' own counters, merged and published by the event log, so these two
survive any kill. `moved` is the ledger of every link (`atoll.run.links`).

**Over time.** Curves, and what was slow, are those of the page and of `atoll why`. Times are seconds since `began_s`, the first
thing that the event log tells of. Everything is bounded: `LEARNERS_MAX` learners, and at most `POINTS_MAX` points each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

import atoll
from atoll.base.machine import commit, machine
from atoll.protocol.ledger import Account, Ledger, apportion, settle, split_life
from atoll.run.curves import first_s, learner_curve, lines_of, rates, span_of, stretches, thinned
from atoll.run.folder import RunFile
from atoll.run.history import History
from atoll.run.links import as_report, byte_ledger
from atoll.run.process_views import LearnerLife, LearnerView
from atoll.story.findings import RunFinding
from atoll.story.goodput import goodput_of
from atoll.story.slowness import slowness
from atoll.wire.traffic import NOTHING

SCHEMA: Final = 1
CURVE_MAX: Final = 2000
FRAGMENTS_NAMED: Final = 6
LEARNERS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """Facts that a report reads from a run's broker beside the view; the defaults stand for a broker that did not answer.

    `data_hash` is the fingerprint of the token shards. `ledger` is the ledger from heads and leases, for a run in which a shard
    did not close its own. `history` is the event log as stories read it, None if it could not be read to its end.
    """

    data_hash: str = ""
    ledger: Ledger | None = None
    history: History | None = None


def collect(
    view: History,
    run: RunFile,
    last: BrokerFacts,
    *,
    validation: Mapping[str, Any],
    ended: Collection[str] = (),
    clock: Literal["wall", "virtual"] = "wall",
) -> dict[str, Any]:
    """Return the report of a run as it stands, in plain JSON values.

    Args:
        view: what was heard of it.
        run: its file; settings are dotted names without secrets.
        last: what its broker said at the end.
        validation: the export's measurement, empty if it failed.
        ended: the learners whose processes are certainly over.
        clock: the clock of all seconds.
    """
    unclosed = [name for name in _shard_names(run) if name not in view.ledgers]
    ledger = _whole_ledger(view, last.ledger if unclosed else None)
    believe_the_dead(view, ledger, ended, closed=not unclosed)
    remember_the_lost(view, ledger)
    fragments, history = int(run.settings["protocol.fragments"]), last.history
    doubts = [_describe_unclosed(name, run, heads_read=last.ledger is not None) for name in unclosed]
    doubts += _unbooked(view, ledger, closed=not unclosed)
    return {
        "schema": SCHEMA,
        "run": run.run,
        "ended": run.sessions[-1].ended if run.sessions else "unknown",
        **_fates(ledger, fragments, doubts),
        "validation": _validation(view, validation, fragments),
        "bytes_up": sum(session.bytes_up for session in run.sessions),
        "bytes_down": sum(session.bytes_down for session in run.sessions),
        "bytes_merged": view.bytes_merged,
        "bytes_published": view.bytes_published,
        "moved": as_report(byte_ledger(view, fragments)),
        "goodput": None if history is None else _goodput(history),
        "commits": view.commits,
        "rounds": _rounds(view),
        "curves": curves_of_run(view),
        "slow": None if history is None else slow_parts(history, first_s(view)),
        "faults": None if history is None else history.faults_of_ended(ended),
        "refused": dict(sorted(view.refused_by_reason.items())),
        "quarantined": [msgspec.to_builtins(isolated) for isolated in view.isolations],
        "learners": [_learner(learner, ledger, fragments) for _, learner in sorted(view.learners.items())],
        "shards": [_shard(view, name) for name in _shard_names(run)],
        "seed": run.settings.get("seed", 0),
        "wall_s": round(sum(session.wall_s for session in run.sessions), 3),
        "clock": clock,
        "sessions": len(run.sessions),
        "rebuilt": _rebuilds(run),
        "machine": machine(),
        "atoll": atoll.__version__,
        "commit": commit(),
        "data_source_hash": validation.get("source_hash") or last.data_hash,
        "settings": dict(run.settings),
    }


def _goodput(history: History) -> float | None:
    share = goodput_of(history).share
    return None if share is None else round(share, 4)


def _rebuilds(run: RunFile) -> list[Any]:
    return [msgspec.to_builtins(session.rebuilt) for session in run.sessions if session.rebuilt]


def _shard_names(run: RunFile) -> list[str]:
    return [f"shard-{i}" for i in range(int(run.settings["protocol.shards"]))]


def _whole_ledger(view: History, of_heads: Ledger | None) -> Ledger:
    if of_heads is None:
        return view.closed_ledger()
    ledger = Ledger()
    ledger.absorb(of_heads)
    for _, closed in sorted(view.ledgers.items()):
        ledger.learn(closed.ledger)
    return ledger


def believe_the_dead(view: History, ledger: Ledger, ended: Collection[str] = (), *, closed: bool = True) -> None:
    """Enter the last heartbeats of incarnations that died, because the shards that heard them may have died as well.

    Tokens that such a learner trained and no shard merged are lost with it; the ledgers might not even know the incarnation.
    An incarnation is over if a newer one was heard, or if its learner has `ended` (killed, or cut off without a goodbye).
    Unless all ledgers are `closed`, this includes incarnations that left: their shard may never have read the goodbye.
    """
    for learner in view.learners.values():
        for life in learner.lives.values():
            if ledger.has_folded(f"{learner.learner}/{life.incarnation}"):
                continue
            account = ledger.account(learner.learner, life.incarnation)
            over = life.incarnation < max(learner.lives) or learner.learner in ended
            if over and not (closed and (life.left or account.left)):
                ledger.take_report(learner.learner, life.incarnation, life.tokens, 0, 0, 0)


def remember_the_lost(view: History, ledger: Ledger) -> None:
    """Show incarnations that only the ledgers know, because the event log that named them went with a broker's disk."""
    for name, account in ledger.accounts.items():
        learner, incarnation = split_life(name)
        lives = view.learners.setdefault(learner, LearnerView(learner)).lives
        life = lives.setdefault(incarnation, LearnerLife(incarnation, left=account.left))
        # Of a life that died in an earlier session the event log says what it moved, and only its ledger what it trained.
        life.tokens = max(life.tokens, account.trained)


def _unbooked(view: History, ledger: Ledger, *, closed: bool) -> Iterator[str]:
    where = "after the ledgers were closed" if closed else "that no ledger tells of"
    for learner in view.learners.values():
        for life in learner.lives.values():
            name = f"{learner.learner}/{life.incarnation}"
            beyond = life.tokens - ledger.accounts.get(name, Account()).trained
            if beyond > 0 and not ledger.has_folded(name):
                yield f"{name} trained {beyond} tokens {where}"


def _describe_unclosed(shard: str, run: RunFile, *, heads_read: bool) -> str:
    """Return whose ledger is missing, and how far the counts go without it: heads name theirs as of the last commits."""
    shards, fragments = int(run.settings["protocol.shards"]), int(run.settings["protocol.fragments"])
    own = [str(fragment) for fragment in range(int(shard.removeprefix("shard-")), fragments, shards)]
    whose = f"fragments {', '.join([*own[:FRAGMENTS_NAMED], '…'][: len(own)])}"
    known = (
        f"what it merged into {whose} is known, and what it refused there after the last commits counts as lost"
        if heads_read
        else f"what became of the tokens in {whose} is not known, and counts as lost"
    )
    return f"{shard} did not close its ledger: {known}; losses and bytes do not depend on it"


def _fates(ledger: Ledger, fragments: int, doubts: Sequence[str]) -> dict[str, Any]:
    settlement = settle(ledger, fragments)
    errors = [*doubts, *settlement.errors]
    return {
        "tokens_trained": settlement.trained // fragments,
        "tokens_by_fate": dict(sorted(apportion(settlement.fates, fragments).items())),
        "token_fragments_by_fate": dict(sorted(settlement.fates.items())),
        "fates_exact": settlement.exact and not errors,
        "fates_errors": errors,
    }


def _validation(view: History, exported: Mapping[str, Any], fragments: int) -> dict[str, Any]:
    """Return the export's own two measurements, or the curve's ends where there was no export, and the curve."""
    points = [note.fields for note in thinned(list(view.validations), CURVE_MAX)]
    curve = [
        {
            "run_tokens": point.run_tokens,
            "tokens_merged": (point.token_fragments_merged or 0) // fragments,
            "bits_per_byte": point.bits_per_byte,
            **_averaged(point.average),
        }
        for point in points
    ]
    merged, measured = exported.get("token_fragments_merged"), exported.get("final_bits_per_byte")
    newest = (points[-1].token_fragments_merged or 0) if points else -1
    if measured is not None and isinstance(merged, int) and merged > newest:
        # An export of its own, after the evaluator had left, measured the model and told no event.
        average = _averaged(exported.get("average_bits_per_byte"))
        last = {"run_tokens": view.run_tokens, "tokens_merged": merged // fragments}
        curve.append({**last, "bits_per_byte": measured, **average})
    # A curve may begin late: an evaluator has to be up, and its broker to answer.
    initial = curve[0]["bits_per_byte"] if curve and curve[0]["run_tokens"] == 0 else None
    final = curve[-1]["bits_per_byte"] if curve else None
    return {
        "initial_bits_per_byte": exported.get("initial_bits_per_byte", initial),
        "final_bits_per_byte": exported.get("final_bits_per_byte", final),
        **_averaged(exported.get("average_bits_per_byte", points[-1].average if points else None)),
        "validation_bytes": exported.get("validation_bytes"),
        "curve": curve,
    }


def _averaged(bits_per_byte: float | None) -> dict[str, float]:
    return {} if bits_per_byte is None else {"average_bits_per_byte": bits_per_byte}


def _rounds(view: History) -> dict[str, Any]:
    """Return what all rounds come to; times are of those that the view keeps, which are the last of a very long run."""
    rounds, sums = [line.round for line in view.rounds], view.sums
    waited = sorted(line.waited_s for line in rounds)
    return {
        "count": view.commits,
        "contributors_mean": round(sums.contributions / view.commits, 6) if view.commits else None,
        "late": sums.late,
        "grace_s_mean": mean([line.grace_s for line in rounds]),
        "waited_s_p50": quantile(waited, 0.50),
        "waited_s_p95": quantile(waited, 0.95),
        "merge_s_mean": mean([line.merge_s for line in rounds]),
        "commit_s_mean": mean([line.commit_s for line in rounds]),
        "ends": dict(sorted(sums.ends.items())),
        "shortened": dict(sorted(sums.shortened.items())),
        "unheard": dict(sorted(sums.unheard.items())),
    }


def _learner(learner: LearnerView, ledger: Ledger, fragments: int) -> dict[str, Any]:
    lives = [
        _life(life, ledger.accounts.get(f"{learner.learner}/{life.incarnation}", Account()), fragments)
        for _, life in sorted(learner.lives.items())
    ]
    return {
        "learner": learner.learner,
        "tokens": sum(life["tokens"] for life in lives),
        "steps": sum(life["steps"] or 0 for life in lives),
        "incarnations": lives,
    }


def _life(life: LearnerLife, account: Account, fragments: int) -> dict[str, Any]:
    """Return one incarnation; figures only heartbeats carry are None for a life of an earlier session."""
    beat, moved = life.beat, life.meter.moved
    return {
        "incarnation": life.incarnation,
        "founder": life.founder,
        "left": life.left,
        "tokens": life.tokens,
        "steps": life.steps if beat is not None or (life.left and life.steps) else None,
        "tokens_by_fate": dict(sorted(apportion(account.fates(fragments), fragments).items())),
        "join_s": life.took_s,
        "tokens_per_s": None if beat is None else round(beat.tokens_per_s, 1),
        "overhead": None if beat is None else round(beat.overhead, 5),
        "bytes_up": None if moved == NOTHING else moved.payload_up,
        "bytes_down": None if moved == NOTHING else moved.payload_down,
    }


def _shard(view: History, name: str) -> dict[str, Any]:
    closed = view.ledgers.get(name)
    reason = "" if closed is None else closed.reason
    return {"shard": name, "commits": view.sums.commits[name], "closed": closed is not None, "reason": reason}


def mean(values: Sequence[float]) -> float | None:
    """Return the arithmetic mean to six places, None of nothing."""
    return round(math.fsum(values) / len(values), 6) if values else None


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest of `ordered` (ascending) that `share` of them do not exceed (nearest rank), None of none."""
    if not ordered:
        return None
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 6)


def curves_of_run(view: History) -> dict[str, Any]:
    """Return loss, lag, overhead and tokens/s of each learner, and tokens/s and goodput of all, in plain JSON values."""
    began_s = first_s(view)
    lines = {name: lines_of(one) for name, one in sorted(view.learners.items())}
    parts = {name: list(stretches(view.learners[name], samples)) for name, samples in lines.items()}
    every = [part for own in parts.values() for part in own]
    span = span_of(every) if every else None
    return {
        "began_s": round(began_s, 3),
        "learners": [
            # In the bins of the whole run, so that the tokens/s of all learners add up to the run's.
            learner_curve(name, lines[name], began_s) | {"tokens_per_s": rates(parts[name], span).tokens_per_s}
            for name in list(lines)[:LEARNERS_MAX]
        ],
        "learners_left_out": max(0, len(lines) - LEARNERS_MAX),
        "rates": rates(every).as_json(began_s),
    }


def slow_parts(history: History, began_s: float) -> dict[str, Any]:
    """Return what was slow, in plain JSON values, with times in seconds since `began_s`."""
    slow = slowness(history)
    return {
        "lost": [part.as_json() for part in slow.lost],
        "findings": [_finding(found, began_s) for found in slow.findings],
        "notes": list(slow.notes),
    }


def _finding(found: RunFinding, began_s: float) -> dict[str, Any]:
    return {
        "cause": found.cause,
        "culprit": found.culprit,
        "from_s": round(found.from_s - began_s, 3),
        "until_s": None if found.until_s is None else round(found.until_s - began_s, 3),
        "text": found.text,
        "command": found.command,
        "evidence": list(found.evidence),
        "consequences": [_finding(each, began_s) for each in found.consequences],
    }
