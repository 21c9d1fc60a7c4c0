"""`python -m schedules`: play schedules from seeds until one fails, the time is up or enough are played.

    --minutes M, --schedules N   how long, or how many (default: 200 schedules)
    --first S                    the first seed; the others follow it
    --resume FILE                go on where the campaign in FILE ended, with the same sources, and write down how far it came
    --results                    write the figures to `build/results/dst.json`, with --hostile to `dst-hostile.json`, and so on
    --hostile                    only schedules with hostile peers (also for --seed)
    --replicated                 only schedules with a broker of several nodes, whose streams lose their leaders (likewise)
    --seed S [--only 3,7,12]     play this one schedule, or only some of its happenings, and print its whole log
    --mutants [NAME]             plant each known bug, or one, and show what it takes to catch it

Leaves with 0 when all held, 1 after broken safety, 4 when something that must happen did not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from atoll.base.machine import commit
from benchmarks.lib.harness import Figure, count, fact, natural, positive, write, zero
from schedules.faults import KINDS, REPLICATED, Beside
from schedules.long_campaign import PART, Campaign, MixedSources, begun, resumed, save
from schedules.minimise import minimised
from schedules.mutants import MUTANTS, Caught, hunt
from schedules.schedule import Outcome, draw, play

CHUNK = 10
SHOWN_LINES = 30
SAY_S = 10.0
SCHEDULES = 200
MUTANTS_MAX = 400
EXIT = {"": 0, "safety": 1, "liveness": 4}
COVERED = (
    *KINDS,
    *REPLICATED,
    *("proposals committed late", "deliveries repeated", "crashes of hosts", "crashes of learners"),
    *("crashes at an await", "freezes", "lost up", "lost down", "answers lost", "messages doubled"),
    *("requests sent again", "requests given up", "lost writes found", "records of a former connection"),
    *("compare-and-sets refused", "acknowledged chunks lost", "refused for want of room"),
    *("redeliveries by silence", "deliveries repeated", "acks of removed readers"),
    *("readers that found themselves removed", "contributions of another founding", "blobs of several pieces"),
    *("uploads resumed", "tenures", "fences", "commits", "commits of several", "merged late", "keyframes"),
    *("versions by delta alone", "versions computed again", "pushes", "last pushes", "contributions settled"),
    *("residuals checked", "changes of the data ledger", "data units inherited", "starts from a checkpoint"),
    *("starts from a peer's state", "starts afresh", "ids taken over", "stores lost", "rebuilds"),
    *("fragments rebuilt", "lives", "farewells", "callbacks"),
)
"""What is counted: schedules in which nothing goes wrong would hold everything as well."""


def chunk(first: int, count: int, *, beside: Beside = "") -> tuple[int, float, Counter[str], list[Outcome]]:
    """Play some schedules; return how many, the seconds of a core, what happened, and the failures."""
    tally, failures = Counter[str](), list[Outcome]()
    gc.collect()
    gc.freeze()  # a schedule collects its own garbage, and need not look at the interpreter's
    began_s = time.process_time()
    for number in range(count):
        outcome = play(first + number, beside=beside)
        tally.update(outcome.tally)
        if outcome.violation:
            failures.append(outcome)
    return count, time.process_time() - began_s, tally, failures


def _chunks(first: int, schedules: int, until_s: float) -> Iterator[tuple[int, int]]:
    """Yield seeds and counts until there are enough, or the time is up."""
    given = 0
    while given < schedules and time.monotonic() < until_s:
        count = min(CHUNK, schedules - given)
        yield first + given, count
        given += count


def play_part(done: Campaign, schedules: int, until_s: float, workers: int) -> list[Outcome]:
    """Play the next schedules on `workers` processes, say now and then how far it has come, and return the failures.

    After a failure no chunk begins, and those that have begun are played to their end: every seed up to the last is played.
    """
    began_s = said_s = time.monotonic()
    wanted = _chunks(done.next, schedules, until_s)
    total, core_s, tally, failures = 0, 0.0, Counter[str](), list[Outcome]()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        under_way: set[Future[tuple[int, float, Counter[str], list[Outcome]]]] = set()
        while True:
            while not failures and len(under_way) < 2 * workers and (next_one := next(wanted, None)) is not None:
                under_way.add(pool.submit(chunk, *next_one, beside=done.beside))
            if not under_way:
                break
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in ended:
                count, used_s, happened, failed = future.result()
                total, core_s = total + count, core_s + used_s
                tally.update(happened)
                failures += failed
            if time.monotonic() - said_s >= SAY_S:
                said_s = time.monotonic()
                say(progress(done.schedules + total, total / (said_s - began_s), tally))
    failures.sort(key=lambda each: each.seed)
    done.add(total, core_s, tally, failures)
    say(progress(done.schedules, total / max(time.monotonic() - began_s, 1e-9), tally))
    return failures


def campaign(chosen: argparse.Namespace) -> int:
    """Play schedules, print what was covered, and a failure if there is one; return the exit code."""
    beside = _beside(chosen)
    done = (
        begun(chosen.first, beside=beside)
        if chosen.resume is None
        else resumed(chosen.resume, chosen.first, beside=beside)
    )
    until_s = time.monotonic() + 60.0 * chosen.minutes if chosen.minutes else math.inf
    last = (
        done.schedules + chosen.schedules
        if chosen.schedules
        else math.inf
        if chosen.minutes
        else done.schedules + SCHEDULES
    )
    failures: list[Outcome] = []
    if chosen.resume is not None:
        save(chosen.resume, done)  # a place that cannot be written to is found before hours of playing
    while not failures and done.schedules < last and time.monotonic() < until_s:
        failures = play_part(done, int(min(PART, last - done.schedules)), until_s, chosen.workers)
        if chosen.resume is not None:
            save(chosen.resume, done)
    say(covered(Counter(done.tally)))
    if chosen.results:
        write(f"dst-{beside}" if beside else "dst", done.first, figures_of(done))
    for failure in failures[1:]:
        say(f"{failure.kind} violated in seed {failure.seed} as well: {failure.what}")
    say(told(failures[0], beside=beside) if failures else f"schedules: all held (seeds up to {done.next - 1})")
    failed = f"{len(done.failures)} failed" if done.failures else "none failed"
    say(f"schedules: {done.schedules} of sources {done.sources} are played, from seed {done.first} on; {failed}")
    return EXIT[failures[0].kind] if failures else 0


# --- what is said ---------------------------------------------------------------------------------------------------------


def figures_of(done: Campaign) -> list[Figure]:
    """Return what a campaign did, as figures."""
    failed = len(done.failures)
    how = "; ".join(
        [f"seeds {done.first} to {done.next - 1}", *(f"seed {each.seed}: {each.what}" for each in done.failures)]
    )
    per_core = done.schedules / max(done.core_s, 1e-9)
    covered_by = [fact(name, done.tally.get(name, 0), "", "over all schedules") for name in COVERED]
    return [
        Figure("schedules played", done.schedules, "schedules", "no violation", not failed, how),
        zero("violations", failed, "", how),
        fact("schedules per second of one core", per_core, "per s", f"{done.core_s:.0f} s of cores"),
        *covered_by,
    ]


def progress(total: int, rate: float, tally: Counter[str]) -> str:
    return (
        f"{total} schedules, {rate:.1f} per s; "
        f"{tally['callbacks']} callbacks, {tally['commits']} commits, {tally['tenures']} tenures"
    )


def covered(tally: Counter[str]) -> str:
    """Return what happened in all schedules together, as a table."""
    return "\n".join(f"  {name:<40} {tally[name]:>12}" for name in COVERED)


def told(failure: Outcome, *, beside: Beside = "") -> str:
    """Return all that is needed to see a failure again: seed, commit, command, and the happenings that it needs."""

    def breaks(only: frozenset[int]) -> bool:
        return play(failure.seed, only=only, beside=beside).what == failure.what

    needed = minimised(failure.happenings, breaks)
    log = play(failure.seed, only=needed, log=True, beside=beside).log
    numbers = ",".join(str(number) for number in sorted(needed)) or "none"
    return "\n".join(
        [
            *(f"  | {line[:240]}" for line in log[-SHOWN_LINES:]),
            f"{failure.kind} violated in seed {failure.seed}, commit {commit()}:",
            failure.violation,
            f"{len(needed)} of {len(failure.happenings)} happenings are needed:",
            *(f"  {each.told()}" for each in failure.happenings if each.number in needed),
            f"the whole schedule: make dst SEED={failure.seed}{f' {beside.upper()}=1' if beside else ''}",
            f"the small one:      PYTHONPATH=tests .venv/bin/python -m schedules --seed {failure.seed} --only {numbers}"
            + (f" --{beside}" if beside else ""),
        ]
    )


def replay(seed: int, only: frozenset[int] | None, *, beside: Beside) -> int:
    """Play one schedule, print its log and how it ended; return the exit code."""
    drawn = {each.number for each in draw(seed, beside=beside).happenings}
    if only is not None and not only <= drawn:
        unknown = ", ".join(map(str, sorted(only - drawn)))
        say(f"seed {seed} has no happening {unknown}: it has {', '.join(map(str, sorted(drawn))) or 'none'}")
        return 2
    outcome = play(seed, only=only, log=True, beside=beside)
    say("\n".join(outcome.log))
    say(covered(outcome.tally))
    for each in outcome.happenings:
        say(f"  {each.told()}")
    say(f"seed {seed}: {outcome.kind + ' violated: ' + outcome.violation if outcome.violation else 'all held'}")
    return EXIT[outcome.kind]


def mutants_table(first: int, schedules_max: int, name: str) -> int:
    """Hunt every mutant, or one, print a line for each, and return 1 if one got away."""
    say(f"{'mutant':<44} {'schedules':>9} {'seconds':>8}  what caught it")
    found: list[Caught] = []
    for mutant in MUTANTS if name == "all" else [name]:
        found.append(hunt(mutant, first, schedules_max))
        one = found[-1]
        say(f"{mutant:<44} {one.schedules:>9} {one.took_s:>8.1f}  {one.kind}: {one.what or 'NOT CAUGHT'}")
    return int(not all(one.what for one in found))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m schedules", description="Deterministic simulation of a run.")
    parser.add_argument("--minutes", type=positive, help="how long to play")
    parser.add_argument("--schedules", type=count, help=f"how many to play (default {SCHEDULES})")
    parser.add_argument("--first", type=natural, default=0, help="the first seed (default 0)")
    parser.add_argument("--hostile", action="store_true", help="only schedules with hostile peers")
    parser.add_argument("--replicated", action="store_true", help="only schedules whose streams lose their leaders")
    parser.add_argument("--seed", type=natural, help="play this one schedule and print its whole log")
    parser.add_argument("--only", type=_numbers, help="with --seed: only these happenings, 'none' for none")
    parser.add_argument("--resume", type=Path, help="go on with the campaign in this file")
    parser.add_argument("--results", action="store_true", help="write the figures to build/results/dst.json")
    parser.add_argument("--mutants", nargs="?", const="all", choices=["all", *MUTANTS], metavar="NAME")
    parser.add_argument("--workers", type=count, default=os.cpu_count() or 1, help="processes (default: one per core)")
    chosen = parser.parse_args(arguments)
    if chosen.hostile and chosen.replicated:
        parser.error("--hostile and --replicated are two campaigns: give one of them")
    if chosen.seed is not None:
        return replay(chosen.seed, chosen.only, beside=_beside(chosen))
    if chosen.mutants is not None:
        return mutants_table(chosen.first, chosen.schedules or MUTANTS_MAX, chosen.mutants)
    try:
        return campaign(chosen)
    except MixedSources as error:
        say(str(error))
        return 2


def _beside(chosen: argparse.Namespace) -> Beside:
    return "hostile" if chosen.hostile else "replicated" if chosen.replicated else ""


def _numbers(text: str) -> frozenset[int]:
    return frozenset() if text == "none" else frozenset(int(number) for number in text.split(","))
