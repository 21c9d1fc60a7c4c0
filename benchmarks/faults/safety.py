"""What must be zero or exact in a run whatever happens, from its extract. Pure.

The event log has one line per commit, written after it; an owner that is killed between the two leaves a commit without a
line, and one that is frozen or cut off between the two writes its line late. So versions are judged by their heads as
well, as far as somebody read them while they were the newest, and their order by the heads alone. Every count that must
hold is made from two sides that do not know of each other:

    per incarnation and fragment   tokens that the ledgers give a fate  =  tokens of the distinct pushes with a fate
    per fragment                   tokens merged by the head  =  by the ledgers  =  of the distinct contributions merged
    per incarnation that left      tokens pushed  =  tokens settled

A contribution that is merged twice has its tokens twice in the first two of each, and once in the last: it is seen even
where neither event log nor head told of one of the two commits. What a push was worth is heard from its tap or read from a
commit; where nobody heard of one, the first line is an inequality, and how often that was is said.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

from benchmarks.faults.extracts import FORMER, Booked, Extract, ExtractRound, ExtractShare, Made, numbers
from benchmarks.lib.results import Figure

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
    late = sum(later < former for made in told_versions(extract).values() for former, later in pairwise(made))
    return [
        zero("versions made twice or out of order", forks(extract, merges), "versions", seen),
        zero("contributions merged twice", twice, "pushes", f"{len(pushes)} contributions in {len(merges)} commits"),
        *fates(extract),
        multiplicity(extract, merges),
        merged_alike(extract, merges),
        *unheard(extract),
        *report(extract),
        Figure("commits without a line on the event log", float(silent), "commits", "", None, died),
        Figure("lines that came late", float(late), "lines", "", None, "their owner was away between commit and line"),
    ]


def zero(name: str, count: int, unit: str, how: str) -> Figure:
    """Return a figure that must be zero."""
    return Figure(name, float(count), unit, "0", count == 0, how)


def key_of(share: ExtractShare) -> Key:
    """Return which push of whom a share is."""
    return share.learner, share.incarnation, share.push


def commits(extract: Extract) -> dict[tuple[int, int], list[list[ExtractShare]]]:
    """Return, by fragment and version, every different list of contributions that a head or the event log gives it."""
    found: dict[tuple[int, int], dict[frozenset[Key], list[ExtractShare]]] = defaultdict(dict)
    every: list[Made | ExtractRound] = [*extract.made, *extract.rounds]
    for made in every:
        if made.version > 0:
            found[made.fragment, made.version].setdefault(frozenset(map(key_of, made.shares)), made.shares)
    return {version: list(told.values()) for version, told in found.items()}


def told_versions(extract: Extract) -> dict[int, list[int]]:
    """Return the versions of each fragment in the order in which the event log tells of them."""
    versions: dict[int, list[int]] = defaultdict(list)
    for line in extract.rounds:
        versions[line.fragment].append(line.version)
    return versions


def forks(extract: Extract, merges: dict[tuple[int, int], list[list[ExtractShare]]]) -> int:
    """Return how many versions were made again: by the event log, by two heads, told of differently by both, or after later."""
    again = sum(len(made) - len(set(made)) for made in told_versions(extract).values())
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
        Figure("stored and not heard of", float(silent), "pushes", "", None, away),
        Figure("push numbers without a sound or a fate", float(skipped), "pushes", "", None, given_up),
    ]


def report(extract: Extract) -> list[Figure]:
    """Return whether the run's own report gives every token one fate, and isolates nobody."""
    said = extract.report
    exact = bool(said["fates_exact"] and sum(said["tokens_by_fate"].values()) == said["tokens_trained"])
    isolated = said.get("quarantined", [])
    what = json.dumps(said["tokens_by_fate"])
    what += "".join(f"; {error}" for error in said.get("fates_errors", [])[:4])
    return [
        Figure("every token has one fate", float(exact), "exact", "1", exact, what),
        zero("honest learners isolated", len(isolated), "learners", json.dumps(isolated)),
    ]
