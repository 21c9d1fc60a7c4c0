"""What is kept of one run of the chaos harness, and every figure that follows from it. Pure.

An `Extract` holds what was done to the run and what its event log, ledger and heartbeats say. Times are seconds since
`began_s`, when every learner had taken a step; the window ends `seconds` later. A *life* is one incarnation of a learner (of
the synchronous baseline: one generation of the whole group), as rows (time, steps, tokens, seconds per step).

**Participation** is stepping time over present time: learner-seconds in which steps were taken over all of the window, dead or
alive. Between two rows stepping is the new steps times the seconds a step takes, at most the time between the rows.
**Useful-step share** is the tokens that entered the model in the window over those that the same system would have trained
undisturbed: of Atoll what was merged, in time or late; of the baseline the steps that its group still has at the end. The
*damped* share counts `age_damping^age` of a late contribution.

**Safety** is judged by two sides that do not know of each other, because an owner that is killed between commit and line leaves
none, and one that is frozen between them writes it late; so versions are judged by their heads as well:

    per incarnation and fragment   tokens that the ledgers give a fate  =  tokens of the distinct pushes with a fate
    per fragment                   tokens merged by the head  =  by the ledgers  =  of the distinct contributions merged
    per incarnation that left      tokens pushed  =  tokens settled

A contribution merged twice has its tokens twice in the first two of each, and once in the last. Where nobody heard what a push
was worth, the first line is an inequality, and how often that was is told.
"""

from __future__ import annotations

import itertools
import json
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from atoll.base.files import write_whole
from atoll.protocol.ledger import Ledger
from benchmarks.faults.storm import Fault
from benchmarks.lib.figures import line_figure
from benchmarks.lib.harness import Figure, at_least, at_most, fact, true, zero
from benchmarks.lib.runs import loss_beside, merged_tokens

LEVEL = 19
SCHEMA = 2
EXTRACT_BYTES_MAX = 256 << 20
Row = tuple[float, int, int, float]
Ranges = list[list[int]]


class ExtractShare(msgspec.Struct, array_like=True, frozen=True):
    """One contribution in a commit."""

    learner: str
    incarnation: int
    push: int
    age: int
    tokens: int


class ExtractRound(msgspec.Struct, array_like=True, frozen=True):
    """One commit, as the event log tells of it."""

    at_s: float
    shard: str
    fragment: int
    version: int
    shares: list[ExtractShare]


class Made(msgspec.Struct, array_like=True, frozen=True):
    """One version as its head told of it, while it was the newest; `digest` is that of its frame."""

    fragment: int
    version: int
    digest: str
    shares: list[ExtractShare]


FORMER = "former"
"""What `Extract.booked` calls the lives that the ledgers have folded: `former/fragment`."""


class Booked(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of one incarnation and fragment by fate, as the ledgers have them at the end."""

    merged: int
    merged_late: int
    refused: int


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """One refused contribution, as the event log tells of it."""

    at_s: float
    learner: str
    incarnation: int
    fragment: int
    push: int
    reason: str


class Course(msgspec.Struct, frozen=True):
    """The identity of a run; a kept extract of the same course and sources is not measured again.

    `kills_min` is what a gauntlet must kill; 0 for the runs that are compared with each other, all of the same length.
    """

    name: str
    system: str
    per_minute: float
    seed: int
    seconds: float
    partition_s: float
    learners: int
    kills_min: int = 0


class Extract(msgspec.Struct, kw_only=True):
    """See the module docstring.

    Attributes:
        faults: what was done; `missed` counts the forecast's faults that found nobody.
        rounds, refusals: the event log; versions by fragment in `heads` are the last ones visible.
        acknowledged: push numbers, by learner/incarnation/fragment, whose manifests the broker said it had stored.
        settled: the same, of those that have a fate by the ledgers at the end.
        stored: pairs (push, tokens) of the same keys, of what was heard of as stored.
        booked: tokens by fate of the same keys, by the ledgers at the end.
        made: versions whose head was read when it was announced, whether or not the event log has a line for them.
        merged: tokens merged by fragment, as the last heads count them.
        age_damping: how fresh what is late is, per version of age.
        ledger: what the shards closed with.
        report: fates and validation of `report.json`; of the baseline what corresponds to them.
        schema: which of these were recorded; an extract of another schema is measured again.
        step_tokens: tokens of one step of the whole group (the baseline only).
    """

    course: Course
    sources: str
    machine: str
    commit: str
    began_s: float
    fragments: int = 1
    faults: list[Fault] = []
    missed: int = 0
    lives: dict[str, list[Row]] = {}
    rounds: list[ExtractRound] = []
    refusals: list[Refusal] = []
    heads: dict[int, int] = {}
    acknowledged: dict[str, Ranges] = {}
    settled: dict[str, Ranges] = {}
    stored: dict[str, list[tuple[int, int]]] = {}
    booked: dict[str, Booked] = {}
    made: list[Made] = []
    merged: dict[int, int] = {}
    age_damping: float = 1.0
    schema: int = 1
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    report: dict[str, Any] = {}
    step_tokens: int = 0

    @property
    def storm(self) -> list[Fault]:
        """Return the faults with their times counted from `began_s`, as everything else is."""
        began_s = self.began_s
        return [
            msgspec.structs.replace(
                fault, at_s=fault.at_s - began_s, over_at_s=fault.over_at_s - began_s if fault.over_at_s else 0.0
            )
            for fault in self.faults
        ]


def save(extract: Extract, path: Path) -> None:
    """Write an extract; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, zstandard.compress(msgspec.json.encode(extract), LEVEL))


def load(path: Path) -> Extract:
    data = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=EXTRACT_BYTES_MAX)
    return msgspec.json.decode(data, type=Extract)


def ranges(numbers: Iterable[int]) -> Ranges:
    found: Ranges = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def numbers(found: Ranges) -> set[int]:
    return {number for first, last in found for number in range(first, last + 1)}


Window = tuple[float, float]


def participation(extract: Extract) -> float:
    """Return stepping over present learner-seconds; see the module docstring."""
    seconds = extract.course.seconds
    stepping: dict[str, float] = defaultdict(float)
    for life, rows in extract.lives.items():
        learner = life.rpartition("/")[0]
        for before, after in itertools.pairwise(rows):
            between_s = max(0.0, min(after[0], seconds) - max(before[0], 0.0))
            whole_s = after[0] - before[0]
            if between_s > 0.0 and whole_s > 0.0:
                stepped_s = min(whole_s, (after[1] - before[1]) * after[3])
                stepping[learner] += stepped_s * between_s / whole_s
    present = 1 if extract.course.system == "synchronous" else extract.course.learners
    return sum(stepping.values()) / (seconds * present)


def useful_share(extract: Extract, plain: Extract, damping: float = 1.0) -> float:
    """Return useful tokens over those possible at the rate of `plain`, the same system undisturbed."""
    possible = trained_tokens(plain) / plain.course.seconds * extract.course.seconds
    return useful(extract, damping) / possible if possible else 0.0


def useful(extract: Extract, damping: float = 1.0) -> float:
    """Return the tokens that entered the model in the window, each times `damping` per version of its age."""
    if extract.course.system == "synchronous":
        return kept_steps(extract) * extract.step_tokens
    merged = sum(share.tokens * damping**share.age for made in within(extract) for share in made.shares)
    return merged / extract.fragments


def within(extract: Extract) -> list[ExtractRound]:
    return [made for made in extract.rounds if 0.0 <= made.at_s <= extract.course.seconds]


def kept_steps(extract: Extract) -> float:
    """Return by how many steps the synchronous group's model is ahead at the end of the window of its beginning."""
    rows = sorted(row for rows in extract.lives.values() for row in rows)
    before = [row[1] for row in rows if row[0] <= 0.0]
    inside = [row[1] for row in rows if row[0] <= extract.course.seconds]
    return inside[-1] - (before[-1] if before else 0) if inside else 0


def trained_tokens(extract: Extract) -> float:
    ends = (0.0, extract.course.seconds)
    return sum(grown(rows, *ends, column=2) for rows in extract.lives.values())


def grown(rows: Sequence[Row], start_s: float, stop_s: float, column: int = 1) -> float:
    """Return by how much a column of a life grew between two times, straight between its rows."""
    return _at(rows, stop_s, column) - _at(rows, start_s, column)


def _at(rows: Sequence[Row], at_s: float, column: int) -> float:
    after = bisect_right(rows, at_s, key=lambda row: row[0])
    if after == 0:
        return rows[0][column]
    if after == len(rows):
        return rows[-1][column]
    low, high = rows[after - 1], rows[after]
    return low[column] + (high[column] - low[column]) * (at_s - low[0]) / (high[0] - low[0])


def spans(rows: Sequence[Row], window: Window) -> bool:
    """Return whether a life goes on over the whole of a window, as far as was heard."""
    return bool(rows) and rows[0][0] <= window[0] and rows[-1][0] >= window[1]


def paces(extract: Extract, windows: Iterable[Window], quiet: Iterable[Window]) -> list[tuple[float, float]]:
    """Return, per window and learner that lives through it, the steps taken and those it takes in as much quiet time.

    Learners are compared with themselves; where the sums are equal they did not notice.
    """
    windows, quiet = list(windows), list(quiet)
    by_learner: dict[str, list[list[Row]]] = defaultdict(list)
    for life, rows in extract.lives.items():
        by_learner[life.rpartition("/")[0]].append(rows)
    found: list[tuple[float, float]] = []
    for lives in by_learner.values():
        calm = [(rows, w) for rows in lives for w in quiet if spans(rows, w)]
        calm_s = sum(stop - start for _, (start, stop) in calm)
        if calm_s <= 0.0:
            continue
        rate = sum(grown(rows, *w) for rows, w in calm) / calm_s
        found += [
            (grown(rows, *window), rate * (window[1] - window[0]))
            for window in windows
            for rows in lives
            if rate > 0.0 and spans(rows, window)
        ]
    return found


def gaps(busy: Iterable[Window], start_s: float, stop_s: float, shortest_s: float) -> list[Window]:
    """Return what lies between some windows, from `start_s` to `stop_s`, where it lasts `shortest_s` or longer."""
    free: list[Window] = []
    at_s = start_s
    for begin, end in sorted(busy):
        if begin - at_s >= shortest_s:
            free.append((at_s, begin))
        at_s = max(at_s, end)
    if stop_s - at_s >= shortest_s:
        free.append((at_s, stop_s))
    return free


Key = tuple[str, int, int]


def safety(extract: Extract) -> list[Figure]:
    """Return what must be zero or exact whatever happens."""
    merges = commits(extract)
    pushes = Counter(
        (fragment, *key_of(share)) for (fragment, _), told in merges.items() for shares in told for share in shares
    )
    silent = sum(
        last - len({made.version for made in extract.rounds if made.fragment == fragment} - {0})
        for fragment, last in extract.heads.items()
    )
    seen = f"{len(extract.rounds)} commits on the event log, {len(extract.made)} heads read"
    died = "their owner died between the commit and the line"
    twice = sum(count - 1 for count in pushes.values())
    late = sum(later < former for made in versions_by_fragment(extract).values() for former, later in pairwise(made))
    return [
        zero("versions made twice or out of order", forks(extract, merges), "versions", seen),
        zero("contributions merged twice", twice, "pushes", f"{len(pushes)} contributions in {len(merges)} commits"),
        *fates(extract),
        multiplicity(extract, merges),
        merged_alike(extract, merges),
        *unheard(extract),
        *report(extract),
        fact("commits without a line on the event log", float(silent), "commits", died),
        fact("lines that came late", float(late), "lines", "their owner was away between commit and line"),
    ]


def key_of(share: ExtractShare) -> Key:
    return share.learner, share.incarnation, share.push


def commits(extract: Extract) -> dict[tuple[int, int], list[list[ExtractShare]]]:
    """Return, by fragment and version, every different list of contributions that a head or the event log gives it."""
    found: dict[tuple[int, int], dict[frozenset[Key], list[ExtractShare]]] = defaultdict(dict)
    every: list[Made | ExtractRound] = [*extract.made, *extract.rounds]
    for made in every:
        if made.version > 0:
            found[made.fragment, made.version].setdefault(frozenset(map(key_of, made.shares)), made.shares)
    return {version: list(told.values()) for version, told in found.items()}


def versions_by_fragment(extract: Extract) -> dict[int, list[int]]:
    """Return the versions of each fragment in the order in which the event log tells of them."""
    versions: dict[int, list[int]] = defaultdict(list)
    for line in extract.rounds:
        versions[line.fragment].append(line.version)
    return versions


def forks(extract: Extract, merges: dict[tuple[int, int], list[list[ExtractShare]]]) -> int:
    """Return how many versions were made again: by the event log, by two heads, told of differently by both, or after later."""
    again = sum(len(made) - len(set(made)) for made in versions_by_fragment(extract).values())
    newest: dict[int, int] = {}
    for made in extract.made:
        again += made.version < newest.get(made.fragment, 0)
        newest[made.fragment] = max(newest.get(made.fragment, 0), made.version)
    frames = Counter(
        (fragment, version) for fragment, version, _ in {(m.fragment, m.version, m.digest) for m in extract.made}
    )
    return again + sum(max(frames[version], len(told)) - 1 for version, told in merges.items())


def fates(extract: Extract) -> list[Figure]:
    """Return what was stored or pushed and has no fate by the ledgers; of an incarnation that left, also what has too much.

    Of former lives the ledgers have sums and no push numbers: these are compared in tokens (`multiplicity`, `merged_alike`).
    """
    former = extract.ledger.former
    open_lives = {
        who: found for who, found in extract.acknowledged.items() if not former.covers(who.rpartition("/")[0])
    }
    lost = sum(len(numbers(found) - numbers(extract.settled.get(who, []))) for who, found in open_lives.items())
    heard = sum(len(numbers(found)) for found in open_lives.values())
    unsettled = sum(
        abs(a.pushed - a.settled) if a.left else max(0, a.pushed - a.settled) for a in extract.ledger.accounts.values()
    )
    how = "by the ledgers that shards closed with; of incarnations that left also what was settled beyond it"
    return [
        zero(
            "acknowledged and without a fate", lost, "pushes", f"{heard} heard of as stored, by the ledgers at the end"
        ),
        zero("pushed and without a fate", unsettled, "token-fragments", how),
    ]


def multiplicity(extract: Extract, merges: dict[tuple[int, int], list[list[ExtractShare]]]) -> Figure:
    """Return by how much the tokens with a fate differ from those of the distinct pushes that have one."""
    worth = {key: dict(pairs) for key, pairs in extract.stored.items()}
    for (fragment, _), told in merges.items():
        for share in (share for shares in told for share in shares):
            worth.setdefault(f"{share.learner}/{share.incarnation}/{fragment}", {})[share.push] = share.tokens
    wrong = unknown = compared = 0
    pooled: Counter[str] = Counter()
    for who, known in worth.items():
        if who not in extract.settled and extract.ledger.former.covers(who.rpartition("/")[0]):
            pooled[f"{FORMER}/{who.rpartition('/')[2]}"] += sum(known.values())
    for who in (extract.settled.keys() | extract.booked.keys()) - pooled.keys():
        booked, settled = extract.booked.get(who, Booked(0, 0, 0)), numbers(extract.settled.get(who, []))
        known = worth.get(who, {})
        sizes = [known[push] for push in settled if push in known]
        beyond = booked.merged + booked.merged_late + booked.refused - sum(sizes)
        missing = len(settled) - len(sizes)
        compared += len(sizes)
        unknown += missing
        # A push whose size nobody heard has at least a token.
        wrong += abs(beyond) if not missing else max(0, missing - beyond)
    for who, tokens in pooled.items():  # a push that nobody heard of may be among them
        booked = extract.booked.get(who, Booked(0, 0, 0))
        wrong += max(0, tokens - booked.merged - booked.merged_late - booked.refused)
    how = f"{compared} pushes with a fate have a known size; of {unknown} nobody heard it"
    return zero("tokens with a fate beside those of the pushes with one", wrong, "token-fragments", how)


def merged_alike(extract: Extract, merges: dict[tuple[int, int], list[list[ExtractShare]]]) -> Figure:
    """Return by how much the tokens merged differ between heads, ledgers and the distinct contributions in commits."""
    wrong = whole = 0
    for fragment, by_head in extract.merged.items():
        by_books = sum(
            booked.merged + booked.merged_late
            for who, booked in extract.booked.items()
            if who.rpartition("/")[2] == str(fragment)
        )
        wrong += abs(by_head - by_books)
        if all((fragment, version) in merges for version in range(1, extract.heads[fragment] + 1)):
            told = [
                share for (of, _), found in merges.items() if of == fragment for shares in found for share in shares
            ]
            wrong += abs(by_head - sum({key_of(share): share.tokens for share in told}.values()))
            whole += 1
    how = f"{len(extract.merged)} fragments by heads and ledgers, {whole} whose every commit is known by contributions too"
    return zero("tokens merged by heads, ledgers and contributions", wrong, "token-fragments", how)


def unheard(extract: Extract) -> list[Figure]:
    """Return what the tap did not tell: pushes with a fate that nobody heard of, and numbers that nothing is known of."""
    silent = skipped = settled = 0
    for who in extract.settled.keys() | extract.acknowledged.keys():
        ends, heard = numbers(extract.settled.get(who, [])), numbers(extract.acknowledged.get(who, []))
        settled += len(ends)
        silent += len(ends - heard)
        skipped += max(ends | heard, default=0) - len(ends | heard)
    away = f"of {settled} with a fate; the recorder was cut from the broker when they were stored"
    given_up = "given up before they were sent, or stored unheard and lost, which the tokens pushed would show"
    return [
        fact("stored and not heard of", float(silent), "pushes", away),
        fact("push numbers without a sound or a fate", float(skipped), "pushes", given_up),
    ]


def report(extract: Extract) -> list[Figure]:
    said = extract.report
    exact = bool(said["fates_exact"] and sum(said["tokens_by_fate"].values()) == said["tokens_trained"])
    isolated = said.get("quarantined", [])
    what = json.dumps(said["tokens_by_fate"])
    what += "".join(f"; {error}" for error in said.get("fates_errors", [])[:4])
    return [
        true("every token has one fate", exact, what, "exact"),
        zero("honest learners isolated", len(isolated), "learners", json.dumps(isolated)),
    ]


COMMIT_MAX_S = 5.0
LOSS_MAX = 0.01
PACE_MIN = 0.99
QUIET_AFTER_S = 8.0
QUIET_AFTER_LEARNER_S = 20.0
QUIET_MIN_S = 3.0


def figures(extracts: Sequence[Extract]) -> list[Figure]:
    """Return every figure of the runs that were measured; what a missing run would have told is left out."""
    undisturbed = plains(extracts)
    storms = [e for e in extracts if e.course.per_minute]
    found: list[Figure] = []
    for extract in [*undisturbed.values(), *storms]:
        plain = undisturbed.get((extract.course.system, extract.course.seed))
        found += named(extract, what_was_done(extract))
        if extract.course.kills_min:
            found += named(extract, [*safety(extract), *([] if plain is None else [loss_at_equal(extract, plain)])])
            continue
        found += named(extract, shares(extract, plain))
        if extract.course.system == "atoll":
            found += named(extract, [*safety(extract), *recovery(extract), *partition(extract)])
            found += named(extract, [] if plain is None or plain is extract else quality(extract, plain))
        elif extract is not plain and plain is not None:
            found += named(
                extract, [final_loss(extract), thrown_away(extract, "tokens rolled back", "to a checkpoint")]
            )
    return [*found, *takeovers([e for e in storms if e.course.system == "atoll" and not e.course.kills_min])]


def plains(extracts: Sequence[Extract]) -> dict[tuple[str, int], Extract]:
    return {(e.course.system, e.course.seed): e for e in extracts if not e.course.per_minute}


def named(extract: Extract, found: Sequence[Figure]) -> list[Figure]:
    name = extract.course.name
    return [Figure(f"{name}: {f.name}", f.value, f.unit, f.goal, f.holds, f.how) for f in found]


def what_was_done(extract: Extract) -> list[Figure]:
    if not extract.course.per_minute:
        return []
    kinds = Counter(f"{fault.act} {fault.role}" for fault in extract.faults)
    killed = sum(fault.act == "kill" for fault in extract.faults)
    what = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    least = extract.course.kills_min
    minutes = (extract.storm[-1].at_s if least and extract.faults else extract.course.seconds) / 60
    missed = f"{extract.missed} planned faults found nobody"
    return [
        at_least("kills", float(killed), "kills", least or None, f"in {minutes:.1f} minutes; {missed}"),
        fact("faults", float(len(extract.faults)), "faults", what),
    ]


# --- how soon things went on --------------------------------------------------------------------------------------------


def recovery(extract: Extract) -> list[Figure]:
    """Return how soon after each kind of fault something was committed again, and whether learners noticed."""
    storm = extract.storm
    rounds = extract.rounds
    owners = [
        (f, next_commit(rounds, f.at_s, f"shard-{f.shard}")) for f in storm if (f.act, f.role) == ("kill", "owner")
    ]
    cut_off = [
        (f, next_commit(rounds, f.at_s, f"shard-{f.shard}")) for f in storm if f.act != "kill" and f.role == "owner"
    ]
    brokers = [(f, next_commit(rounds, f.over_at_s)) for f in storm if (f.act, f.role) == ("kill", "broker")]
    found = [
        *after("next commit of the shard after its owner was killed", owners, COMMIT_MAX_S),
        *after("next commit of the shard after its owner froze or was cut off", cut_off, None),
        *after("next commit after the broker was up again", brokers, COMMIT_MAX_S),
    ]
    learners = [f for f in storm if (f.act, f.role) == ("kill", "learner")]
    if learners and (one_round := round_s(rounds)) > 0.0:
        waits = [(f, next_commit(rounds, f.at_s, besides=f.who) / one_round) for f in learners]
        found += after(
            "next commit of the others after a learner was killed",
            waits,
            1.0,
            "rounds",
            f"; a round is {one_round:.1f} s",
        )
    return found


def takeovers(extracts: Sequence[Extract]) -> list[Figure]:
    """Return the pace of the learners while a killed owner's shard rests, over that of quiet times, of all storms.

    Only takeovers that have no other fault in or shortly before them count: what a restarting learner or a broker that was
    away takes from the machine is no cost of a takeover.
    """
    found: list[tuple[float, float]] = []
    left_out = 0
    for extract in extracts:
        every = [
            (f, (f.at_s, f.at_s + next_commit(extract.rounds, f.at_s, f"shard-{f.shard}")))
            for f in extract.storm
            if (f.act, f.role) == ("kill", "owner")
        ]
        alone = [
            window for fault, window in every if window[1] < float("inf") and not is_disturbed(extract, window, fault)
        ]
        left_out += len(every) - len(alone)
        found += paces(extract, alone, quiet(extract))
    if not found:
        return []
    pace = sum(taken for taken, _ in found) / sum(expected for _, expected in found)
    ratios = [taken / expected for taken, expected in found]
    sigma = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    how = (
        f"steps of learners that live through one, over theirs in quiet times; {len(found)} windows and learners, "
        f"standard error {sigma:.3f}; {left_out} takeovers with other faults left out"
    )
    return [at_least("storms: pace during a takeover", pace, "ratio", PACE_MIN, how)]


def is_disturbed(extract: Extract, window: Window, besides: Fault) -> bool:
    """Return whether another fault than one was done or held in a window or just before it; a partition does not count."""
    return any(
        fault.at_s < window[1] and settled_s(fault) > window[0]
        for fault in extract.storm
        if fault != besides and fault.act != "partition"
    )


def after(
    name: str, waits: Sequence[tuple[Fault, float]], goal: float | None, unit: str = "s", more: str = ""
) -> list[Figure]:
    """Return the median of some waits and how they are spread."""
    if not waits:
        return []
    found = [wait for _, wait in waits]
    median = statistics.median(found)
    how = f"median of {len(found)}; longest {max(found):.1f} {unit}{more}"
    return [at_most(name, median, unit, goal, how)]


def next_commit(rounds: Sequence[ExtractRound], at_s: float, shard: str = "", besides: str = "") -> float:
    """Return how long after a time the next commit came, of one shard, or with one that is not `besides`; else infinity."""
    return min(
        (
            made.at_s - at_s
            for made in rounds
            if made.at_s > at_s and made.shard.startswith(shard) and any(s.learner != besides for s in made.shares)
        ),
        default=float("inf"),
    )


def round_s(rounds: Sequence[ExtractRound]) -> float:
    """Return the median time between two commits of the same fragment."""
    times: dict[int, list[float]] = defaultdict(list)
    for made in rounds:
        times[made.fragment].append(made.at_s)
    waits = [b - a for found in times.values() for a, b in itertools.pairwise(sorted(found))]
    return statistics.median(waits) if waits else 0.0


def settled_s(fault: Fault) -> float:
    """Return when a fault no longer weighs on the machine: a killed learner imports and compiles for a while."""
    after_s = QUIET_AFTER_LEARNER_S if (fault.act, fault.role) == ("kill", "learner") else QUIET_AFTER_S
    return max(fault.at_s, fault.over_at_s) + after_s


def quiet(extract: Extract) -> list[Window]:
    """Return the times in which no fault was done, held, or just over; a partition holds for long and disturbs one."""
    busy = [(f.at_s, settled_s(f)) for f in extract.storm if f.act != "partition"]
    return gaps(busy, 0.0, extract.course.seconds, QUIET_MIN_S)


def partition(extract: Extract) -> list[Figure]:
    """Return what became of the first contribution per fragment that a partitioned learner got through afterwards."""
    found: list[Figure] = []
    for fault in extract.storm:
        if fault.act != "partition":
            continue
        life = life_at(extract, fault.who, fault.at_s)
        firsts = first_fates(extract, fault.who, int(life.rpartition("/")[2]) if life else -1, fault.over_at_s)
        lasted = f"{fault.who} for {fault.over_at_s - fault.at_s:.0f} s"
        if not firsts:
            found.append(Figure("first fate after a partition", float("inf"), "s", "finite", False, lasted))
            continue
        fates = Counter(fate for _, fate in firsts.values())
        what = ", ".join(f"{fate} {count}" for fate, count in sorted(fates.items()))
        soonest, latest = min(at for at, _ in firsts.values()), max(at for at, _ in firsts.values())
        rows = extract.lives[life]
        how = f"{lasted}; the same life goes on to step {rows[-1][1]}"
        every = f"{len(firsts)} of {extract.fragments} fragments: {what}"
        found += [
            Figure("first fate after a partition", soonest, "s", "finite", True, how),
            fact("last of the first fates after it", latest, "s", every),
        ]
    return found


def life_at(extract: Extract, learner: str, at_s: float) -> str:
    """Return the life that a learner was in at a time, empty when none is known."""
    begun = [
        (rows[0][0], life)
        for life, rows in extract.lives.items()
        if life.rpartition("/")[0] == learner and rows and rows[0][0] <= at_s
    ]
    return max(begun)[1] if begun else ""


def first_fates(extract: Extract, learner: str, incarnation: int, since_s: float) -> dict[int, tuple[float, str]]:
    """Return, per fragment, when after `since_s` the next push of an incarnation got a fate, and which."""
    fates: list[tuple[float, int, str]] = []
    for made in extract.rounds:
        fates += [
            (made.at_s, made.fragment, "merged late" if share.age else "merged")
            for share in made.shares
            if (share.learner, share.incarnation) == (learner, incarnation)
        ]
    fates += [
        (r.at_s, r.fragment, f"refused {r.reason}")
        for r in extract.refusals
        if (r.learner, r.incarnation) == (learner, incarnation)
    ]
    firsts: dict[int, tuple[float, str]] = {}
    for at_s, fragment, fate in sorted(fates):
        if at_s > since_s:
            firsts.setdefault(fragment, (at_s - since_s, fate))
    return firsts


# --- what it cost -------------------------------------------------------------------------------------------------------


def shares(extract: Extract, plain: Extract | None) -> list[Figure]:
    found = [fact("participation", participation(extract), "ratio", "stepping over present time")]
    if plain is not None:
        share = useful_share(extract, plain)
        how = "tokens that entered the model over those possible in the same time undisturbed"
        found.append(fact("useful-step share", share, "ratio", how))
    if plain is not None and extract.course.system == "atoll":
        damped = useful_share(extract, plain, extract.age_damping)
        how = f"the same, with {extract.age_damping:g} per version of age of what was merged late"
        found.append(fact("useful-step share, damped", damped, "ratio", how))
    return found


def quality(extract: Extract, plain: Extract) -> list[Figure]:
    return [
        loss_at_equal(extract, plain),
        final_loss(extract),
        thrown_away(extract, "tokens lost with killed learners", "open when an incarnation died"),
    ]


def loss_at_equal(extract: Extract, plain: Extract) -> Figure:
    loss, losses = loss_beside(extract.report, plain.report)
    return at_most("held-out loss", loss, "ratio", LOSS_MAX, losses)


def thrown_away(extract: Extract, name: str, how: str) -> Figure:
    lost = extract.report["tokens_by_fate"]["lost"] / max(1, extract.report["tokens_trained"])
    return fact(name, lost, "ratio", how)


def final_loss(extract: Extract) -> Figure:
    how = f"the final model, {merged_tokens(extract.report)} tokens merged"
    return fact("final held-out loss", last_loss(extract.report), "bits/byte", how)


def last_loss(report: dict[str, Any]) -> float:
    return float(report["validation"]["final_bits_per_byte"])


# --- plots ------------------------------------------------------------------------------------------------------------------

NAMES = {"atoll": "Atoll", "synchronous": "synchronous baseline"}
Measure = Callable[[Extract, Extract | None], float | None]


def plots(extracts: Sequence[Extract]) -> dict[str, str]:
    def stepping(extract: Extract, _: Extract | None) -> float | None:
        return participation(extract)

    def share(extract: Extract, plain: Extract | None) -> float | None:
        return None if plain is None else useful_share(extract, plain)

    def loss(extract: Extract, _: Extract | None) -> float | None:
        return last_loss(extract.report)

    return {
        "chaos-useful.svg": plot(extracts, share, "useful-step share"),
        "chaos-participation.svg": plot(extracts, stepping, "participation"),
        "chaos-loss.svg": plot(extracts, loss, "held-out bits per byte"),
    }


def plot(extracts: Sequence[Extract], measure: Measure, name: str) -> str:
    """Return one plot against the fault rate, one line per system; several seeds are averaged."""
    undisturbed = plains(extracts)
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for extract in extracts:
        course = extract.course
        if course.kills_min:
            # A gauntlet has a length of its own.
            continue
        value = measure(extract, undisturbed.get((course.system, course.seed)))
        if value is not None:
            found[course.system][course.per_minute].append(value)
    lines = {
        NAMES[system]: [(rate, sum(values) / len(values)) for rate, values in sorted(found[system].items())]
        for system in NAMES
    }
    return line_figure(lines, "faults per minute", name)
