"""`atoll attribute`: what each learner's part of a retained round was, and what held-out text says of the round without it.

The round is replayed (`atoll.archive.replay`), then merged anew without one learner after the other. For held-out text the
model is put together as it was when the round was made: its fragment before it, after it, or after it without a learner, and
every other fragment as its last round before that moment left it. One fragment of many moves little, so differences are
small; they are of the same text, and exact.
"""

from __future__ import annotations

from pathlib import Path

from atoll.archive.replay import RoundPart, RunReplay
from atoll.base.large_arrays import Vector
from atoll.base.wording import counted
from atoll.cli.output import say
from atoll.cli.replay import open_rounds
from atoll.local.run_settings import read_earlier
from atoll.run.merged_model import assembled
from atoll.settings import load, own_outer
from atoll_learner.process import LearnerWork, limit_threads, prepare_work
from atoll_learner.run_export import work_of

TOKENS_MAX = 131_072


def attribute(
    what: str, archive: str | None, place: tuple[int, int], assignments: list[str] | None, *, held_out: bool
) -> None:
    """Print each learner's part of the round `place` (fragment, version) of a run; with `held_out` what its text says, too.

    Raises:
        SettingsError: there is no such run here.
        CheckpointError: the round is not retained, or is not replayed to the same bits.
        DataError: there is no held-out text of this run here.
    """
    fragment, version = place
    work = _work(what, assignments) if held_out else None
    rounds = open_rounds(what, archive, None, None)
    again = RunReplay(rounds, own_outer(assignments=assignments or []))
    opened = again.opened(fragment, version)
    head = opened.made.head
    say(
        f"round {fragment}/{version} by shard-{opened.made.shard} in epoch {opened.made.epoch}: "
        f"{counted(len(opened.contributions), 'contribution')}, {sum(each.tokens for each in head.included):,} tokens"
    )
    losses: dict[str, float] = {}
    if work is not None:
        from atoll_learner.train import make_evaluator  # noqa: PLC0415  (JAX only after the thread limits are set)

        work = work_of(again.run, work)
        measure = make_evaluator(work.model, work.train, work.shards, TOKENS_MAX)
        until_s = next(
            name.written_at_s
            for name in rounds.rounds(fragment)
            if (name.version, name.digest) == (head.version, head.digest)
        )
        others: dict[int, Vector] = {}
        for other in range(again.run.protocol.fragments):
            if other != fragment:
                say(f"fragment {other}: replayed to that moment …")
                others[other] = again.values(other, until_s)

        def loss(values: Vector) -> float:
            return measure(assembled(again.run.layout, others | {fragment: values}))

        before, after = loss(opened.values), loss(opened.merged()[1])
        say(f"held-out text: {before:.5f} bits per byte before it, {after:.5f} after it ({after - before:+.5f})")
        losses = {learner: loss(opened.merged(learner)[1]) - after for learner in opened.learners}
    for line in table(opened.parts(), losses):
        say(line)


def table(parts: list[RoundPart], losses: dict[str, float]) -> list[str]:
    """Return the parts as lines of a table; `losses` are what bits per byte gain without a learner, if they were measured."""
    names = (
        "learner",
        "pushes",
        "tokens",
        "weight",
        "cosine with merge",
        "step without",
        "its direction",
        "loss without",
    )
    rows = [names[: None if losses else -1]]
    for part in parts:
        row = (
            part.learner,
            str(part.contributions),
            f"{part.tokens:,}",
            f"{part.weight_share:.1%}",
            _number(part.aligned, ".4f"),
            _number(part.step_without, ".1%"),
            _number(part.turned_without, ".4f"),
        )
        rows.append((*row, f"{losses[part.learner]:+.5f}") if losses else row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def _work(what: str, assignments: list[str] | None) -> LearnerWork:
    """Return model and data of a run: as its folder says, where it is one, and else as the settings say."""
    folder, told, fallback = Path(what), list(assignments or []), None
    if folder.is_dir():
        earlier = read_earlier(folder)
        fallback = earlier.fallback(earlier.run, ())
        if (folder / "data" / "meta.json").exists():
            told.append(f"data.dir={folder / 'data'}")
    settings = load(None, told, fallback=fallback).settings
    work = prepare_work(settings)
    limit_threads(settings.learner.threads)
    return work
