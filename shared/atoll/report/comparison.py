"""Runs beside each other, one row a run: of reports (`atoll report compare`), and of runs as `atoll dashboard` knows them.

The report of a baseline lacks some figures: they are None, and a table shows a dash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from atoll.base.errors import SettingsError
from atoll.base.files import read_file
from atoll.base.parsing import parsed

REPORT_BYTES_MAX: Final = 64 << 20
Name = Annotated[str, Meta(max_length=1000)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Figure = Annotated[float, Meta(ge=0.0, le=2.0**63)]


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """The figures of a run that are compared.

    Attributes:
        path: the report that was read; empty for a run that was not read from one.
        ended: how it ended, or its state while it goes on.
        bits_per_byte: of the merged model at the end, on held-out text.
        goodput: share of the learners' time spent stepping, 0..1.
        bytes_per_token: wire of the learners' links, both ways, over the tokens trained.
        faults: learners and shards that were lost, and incarnations put into quarantine.
        model: the size of the reference model by its name, or its layers and width.
        optimizer, rate, schedule: of the reference learner; its rate is that after the warm-up.
    """

    path: str
    run: str
    ended: str
    clock: str
    tokens: int | None
    wall_s: float | None
    tokens_per_s: float | None = field(init=False)
    bits_per_byte: float | None
    goodput: float | None
    bytes_per_token: float | None
    commits: int | None
    learners: int
    faults: int | None
    model: str | None = None
    optimizer: str | None = None
    rate: float | None = None
    schedule: str | None = None

    def __post_init__(self) -> None:
        # Less than a millisecond is no time to train in.
        timed_s = self.wall_s if self.wall_s is not None and self.wall_s > 1e-3 else None
        speed = None if self.tokens is None or timed_s is None else round(self.tokens / timed_s, 3)
        object.__setattr__(self, "tokens_per_s", speed)


class Validation(msgspec.Struct):
    """Evaluation of the merged model."""

    final_bits_per_byte: Figure | None = None


class Moved(msgspec.Struct):
    """The compared figure of the links' ledger."""

    bytes_per_token: Figure | None = None


class ComparedSettings(msgspec.Struct):
    """The compared settings."""

    size: Name | None = msgspec.field(default=None, name="model.size")
    layers: Count | None = msgspec.field(default=None, name="model.layers")
    width: Count | None = msgspec.field(default=None, name="model.width")
    optimizer: Name | None = msgspec.field(default=None, name="train.optimizer")
    rate: Figure | None = msgspec.field(default=None, name="train.rate")
    schedule: Name | None = msgspec.field(default=None, name="train.schedule")

    @property
    def model(self) -> str | None:
        """Return the model's layers and width, which need not be those of its size; None of a loop of somebody's own."""
        if self.layers is None or self.width is None:
            return self.size
        return f"{self.layers} x {self.width}"


class ReportFigures(msgspec.Struct):
    """The compared part of a `report.json`, within bounds: the file may be anybody's."""

    tokens_trained: Count
    run: Name = ""
    ended: Name = "unknown"
    clock: Name = "wall"
    wall_s: Figure | None = None
    validation: Validation | None = None
    goodput: Figure | None = None
    moved: Moved | None = None
    commits: Count | None = None
    learners: list[msgspec.Raw] = []
    faults: Count | None = None
    settings: ComparedSettings | None = None


def read_report(path: Path) -> tuple[Path, ReportFigures]:
    """Return the file and the figures of a report: `path` is a run's folder, or the report itself.

    Raises:
        SettingsError: there is no report, or it is none of ours.
    """
    file = path / "report.json"
    try:
        try:
            data = read_file(file, REPORT_BYTES_MAX)
        except NotADirectoryError:
            file = path
            data = read_file(file, REPORT_BYTES_MAX)
        return file, parsed(data, ReportFigures)
    except FileNotFoundError as error:
        raise SettingsError(
            "there is no report",
            got=path,
            allowed="the folder of a run that has ended, or its report.json",
            todo="`atoll up` and `atoll sim` write one when the run ends (Ctrl-C, or `--minutes`), nothing else does; "
            "of any other run `atoll status`, `fates`, `why` and `dashboard` have the facts (--run, --broker)",
        ) from error
    except OSError as error:
        raise SettingsError(
            "this report cannot be read", got=f"{file}: {error.strerror}", todo="give another"
        ) from error
    except msgspec.MsgspecError as error:
        raise SettingsError(
            "this is not a report of a run", got=f"{file}: {error}", allowed="what `atoll up` or `atoll sim` writes"
        ) from error


def with_distinct_names(rows: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the rows with names that differ: runs of one name are called by their folders, and where those agree by paths.

    Every simulated run is called `sim`, and so are most runs that were tried one after the other.
    """
    folders = [Path(row.path).absolute().parent.name for row in rows]
    by_folder = _renamed(rows, [row.run for row in rows], folders)
    return _renamed(by_folder, [row.run for row in by_folder], [row.path for row in rows])


def _renamed(rows: Sequence[ComparedRun], names: Sequence[str], others: Sequence[str]) -> list[ComparedRun]:
    count = Counter(names)
    return [
        replace(row, run=other if count[name] > 1 else name)
        for row, name, other in zip(rows, names, others, strict=True)
    ]


def comparison_row(path: Path, report: ReportFigures) -> ComparedRun:
    """Return the row of a report."""
    settings = report.settings or ComparedSettings()
    return ComparedRun(
        path=str(path),
        run=report.run,
        ended=report.ended,
        clock=report.clock,
        tokens=report.tokens_trained,
        wall_s=report.wall_s,
        bits_per_byte=None if report.validation is None else report.validation.final_bits_per_byte,
        goodput=report.goodput,
        bytes_per_token=None if report.moved is None else report.moved.bytes_per_token,
        commits=report.commits,
        learners=len(report.learners),
        faults=report.faults,
        model=settings.model,
        optimizer=settings.optimizer,
        rate=settings.rate,
        schedule=settings.schedule,
    )
