"""The table of goodput: systems by fleet sizes, several seeds each, over worker processes.

A cell is one system (`rigid`, `elastic` or a number of learners) on so many chips, simulated once per seed by a pure function,
so the table is the same for any number of workers. Cells of one fleet size and seed suffer the same failures: rows differ in
the system, not in luck. The interval beside each mean is Student's, for 95 %, over the seeds.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TypeVar

from atoll.base.errors import EnvironmentFault, SettingsError
from atoll.base.files import write_whole
from atoll.base.wording import DAY_S, check_within, count
from atoll_simulator import confidence
from atoll_simulator.fleet.chance import Engine, slowest_mean
from atoll_simulator.fleet.chips import Chips, Lived, Rigid
from atoll_simulator.fleet.parameters import FleetParameters, split

RIGID = "rigid"
ELASTIC = "elastic"
ROWS = (RIGID, ELASTIC, "2", "4", "8", "16")
COLUMNS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
LEARNERS_MAX = 4096
CHIPS_MAX = 100_000_000
SEEDS_MAX = 1000
FAILURES_MAX = 50_000_000
WORKERS_PER_CORE = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation: a system on so many chips, for so long, from one seed."""

    fleet: FleetParameters
    system: str
    chips: int
    days: float
    seed: int


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """A mean over seeds and half the width of its 95 % interval (None for one seed, which has none)."""

    mean: float
    half: float | None


@dataclass(frozen=True, slots=True)
class FleetCell:
    """The results of several seeds for one system on so many chips; shares of 1, counts per seed.

    `used_chips` are those in whole slices of the learners; all shares are of them.
    """

    system: str
    chips: int
    used_chips: int
    goodput: SeedSpread
    uptime: SeedSpread
    stalled: float
    missing: float
    pace: float
    failures: float
    stalls: float


def learners_of(system: str) -> int:
    """Return M for a system's name."""
    return 1 if system in (RIGID, ELASTIC) else int(system)


def simulate(job: Job) -> Lived:
    """Simulate one cell from one seed."""
    engine = Engine()
    if job.system == RIGID:
        world: Chips | Rigid = Rigid(engine, job.fleet, job.chips, job.seed)
    else:
        world = Chips(engine, job.fleet, job.chips, learners_of(job.system), job.seed)
    gc.disable()  # there are no cycles here, and the collector would scan millions of small tuples in vain
    try:
        engine.run(job.days * DAY_S)
    finally:
        gc.enable()
    return world.lived()


def table(
    fleet: FleetParameters,
    systems: Sequence[str],
    sizes: Sequence[int],
    *,
    seeds: Sequence[int],
    days: float,
    workers: int = 0,
) -> list[FleetCell]:
    """Return every cell, row by row; `workers` processes work on it, one per core when 0, none but ours when 1."""
    check(fleet, systems, sizes, seeds, days)
    jobs = [Job(fleet, system, chips, days, seed) for system in systems for chips in sizes for seed in seeds]
    lived = run(jobs, workers)
    count = len(seeds)
    return [_cell(jobs[i], lived[i : i + count]) for i in range(0, len(jobs), count)]


def run(jobs: Sequence[Job], workers: int = 0) -> list[Lived]:
    """Simulate all jobs, the longest first, and return their results in the order of the jobs."""
    wanted = workers_for(len(jobs), workers)
    if wanted == 1:
        return [simulate(job) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda i: -jobs[i].chips * jobs[i].days)
    others = set(active_children())
    with ProcessPoolExecutor(wanted, get_context("spawn")) as pool:
        try:
            with _uninterrupted():
                futures = {i: pool.submit(simulate, jobs[i]) for i in order}
            return [futures[i].result() for i in range(len(jobs))]
        except KeyboardInterrupt:
            # Not cancelled: a pool without workers fails its remaining jobs, and breaks on cancelled ones.
            for child in set(active_children()) - others:
                child.terminate()
            raise
        except BrokenProcessPool as error:
            raise EnvironmentFault(
                "a process that simulated for us was killed",
                todo="see whether memory ran out; --workers 1 needs no other processes",
            ) from error


def workers_for(jobs: int, workers: int) -> int:
    """Return how many processes work on so many jobs: as many as asked for, one per core when 0, a few per core at most."""
    cores = os.cpu_count() or 1
    return min(workers or cores, WORKERS_PER_CORE * cores, jobs)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C for a moment; processes started meanwhile never receive it, so we end them."""
    held: list[int] = []
    # The mask is for those processes, which inherit it. It holds nothing back from us: the system hands the signal to any
    # thread without the mask, such as one of linear algebra, and Python runs the handler in the main thread all the same.
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt


def check(
    fleet: FleetParameters, systems: Sequence[str], sizes: Sequence[int], seeds: Sequence[int], days: float
) -> None:
    """Raise `SettingsError` for a table that cannot be simulated, or not in a reasonable time."""
    fleet.check()
    check_within("--days", days, 1e-4, 36_500.0)
    check_within("--seeds", len(seeds), 1, SEEDS_MAX)
    for system in systems:
        for chips in sizes:
            split(chips, learners_of(system), fleet.slice_chips)
    count = len(systems) * len(seeds)
    todo = "take fewer --days or --seeds, or a longer --mtbi-days"
    affordable(sum(sizes) * count, days * DAY_S, fleet, FAILURES_MAX, todo)


def affordable(chips: int, time_s: float, fleet: FleetParameters, failures_max: int, todo: str) -> None:
    """Raise `SettingsError`, with `todo`, when so many chips have more failures in that time than can be simulated."""
    failures = chips * time_s / fleet.mtbi_s
    if failures > failures_max:
        raise SettingsError(
            "there are too many failures to simulate",
            got=f"about {failures:.3g}",
            allowed=f"{failures_max:,}",
            todo=todo,
        )


def systems_in(text: str) -> tuple[str, ...]:
    """Return systems from 'rigid,elastic,2,8'."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    for word in words:
        number = int(word) if re.fullmatch(r"\d{1,9}", word) else 0
        if word not in (RIGID, ELASTIC) and not 1 <= number <= LEARNERS_MAX:
            raise SettingsError(
                "--rows names no system", got=word, allowed=f"rigid, elastic, or learners from 1 to {LEARNERS_MAX}"
            )
    return _distinct("--rows", [word if word in (RIGID, ELASTIC) else str(int(word)) for word in words])


def sizes_in(text: str) -> tuple[int, ...]:
    """Return numbers of chips from '150k,1.2M'."""
    return _distinct("--chips", [size_in(word.strip()) for word in text.split(",") if word.strip()])


def size_in(word: str) -> int:
    """Return a number of chips from '150k', '1.2M' or '4096'."""
    try:
        chips = count(word, "--chips")
    except SettingsError:
        chips = 0
    if not 1 <= chips <= CHIPS_MAX:
        raise SettingsError("--chips is no number of chips", got=word, allowed="1 to 100M, as 4096, 150k or 1.2M")
    return chips


def size_text(chips: int) -> str:
    """Return a number of chips in a short form."""
    for scale, unit in ((1_000_000, "M"), (1_000, "k")):
        if chips >= scale:
            return f"{chips / scale:g}{unit}"
    return str(chips)


def spread(values: Sequence[float]) -> SeedSpread:
    """Return mean and half the width of Student's 95 % interval."""
    found = confidence.spread(values)
    return SeedSpread(found.mean, None if found.count == 1 else found.half)


def per_cent(share: SeedSpread) -> str:
    """Return a share in per cent with its interval; a dash if there is only one seed."""
    return f"{100 * share.mean:.1f} ± " + ("-" if share.half is None else f"{100 * share.half:.1f}")


def _distinct(name: str, found: list[T]) -> tuple[T, ...]:
    if not found or len(set(found)) < len(found):
        raise SettingsError(f"{name} wants at least one, and each once", got=", ".join(map(str, found)) or "nothing")
    return tuple(found)


def _cell(job: Job, lived: Sequence[Lived]) -> FleetCell:
    count = len(lived)
    whole = split(job.chips, learners_of(job.system), job.fleet.slice_chips)
    return FleetCell(
        system=job.system,
        chips=job.chips,
        used_chips=job.chips if job.system == RIGID else whole * learners_of(job.system) * job.fleet.slice_chips,
        goodput=spread([one.goodput for one in lived]),
        uptime=spread([one.uptime for one in lived]),
        stalled=sum(one.stalled for one in lived) / count,
        missing=sum(one.missing for one in lived) / count,
        pace=1.0 / (1.0 + job.fleet.slice_cv * slowest_mean(whole)),
        failures=sum(one.failures for one in lived) / count,
        stalls=sum(one.stalls for one in lived) / count,
    )


# --- answers ---------------------------------------------------------------------------------------------------------------


def goodput_tables(cells: Sequence[FleetCell]) -> str:
    """Return goodput and uptime as two tables in per cent, each with the 95 % interval over the seeds."""
    parts = []
    for what in ("goodput", "uptime"):
        columns = list(dict.fromkeys(cell.chips for cell in cells))
        lines = [f"{what + ', %':<12}" + "".join(f"{size_text(chips):>14}" for chips in columns)]
        for system in dict.fromkeys(cell.system for cell in cells):
            row = [cell for cell in cells if cell.system == system]
            lines.append(f"{_name(system):<12}" + "".join(f"{per_cent(getattr(cell, what)):>14}" for cell in row))
        parts.append("\n".join(lines))
    if any(cell.system == RIGID for cell in cells):
        parts.append(
            f"{_name(RIGID)}: spares take the place of what failed at once and are not counted; `atoll plan` counts them"
        )
    if any(cell.used_chips < cell.chips for cell in cells):
        least = min(cells, key=lambda cell: cell.used_chips / cell.chips)
        parts.append(
            f"shares are of the chips in whole slices: {least.used_chips} of {least.chips} in {_name(least.system)}, or more"
        )
    return "\n\n".join(parts)


def write_answer(folder: Path, name: str, **said: object) -> Path:
    """Write the question and the result to `name`.json in `folder`, and return its path."""
    path = folder / f"{name}.json"
    try:
        write_whole(path, (json.dumps(said, indent=2, default=_plain) + "\n").encode())
    except OSError as error:
        raise SettingsError("a result cannot be written", got=path, todo=f"see to it ({error.strerror})") from error
    return path


def folder_for(out: str | None, name: str) -> Path | None:
    """Return the folder for the file `name`, created if needed; raise `SettingsError` if it cannot be written there."""
    if out is None:
        return None
    if not out.strip():
        raise SettingsError(
            "--out names no folder", got=repr(out), todo="name one, or leave --out away; . is this folder"
        )
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise SettingsError(
            "--out is no folder that can be written", got=out, todo=f"choose another ({error.strerror})"
        ) from error
    if (folder / name).is_dir():
        raise SettingsError(
            "--out holds a folder where a file is to be", got=folder / name, todo="choose another folder"
        )
    return folder


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def _name(system: str) -> str:
    return f"M = {system}" if system.isdigit() else f"1 {system}"
