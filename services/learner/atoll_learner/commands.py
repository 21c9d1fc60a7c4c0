"""The learner's verbs: `learner`, `evaluate`, `export`, `attribute`, and `data` with its own. They load nothing early."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from atoll.cli.options import Assignments, Broker, Config, Run, with_flags

HELD_OUT_BYTES_FEW: Final = 16 << 10
"""Of less held-out text bits per byte are told with a warning."""
NICE: Final = 5
"""Niceness of evaluators, behind processes that train."""


def register(app: typer.Typer) -> None:
    """Add this service's verbs to the command line."""
    app.command(name="learner", help="Train one replica as an island of a run.", rich_help_panel="run")(learn)
    app.command(
        name="evaluate", help="Follow a run and measure its merged model on held-out text.", rich_help_panel="watch"
    )(evaluate)
    app.command(
        name="export", help="Write the merged model as safetensors, with a sample of its text.", rich_help_panel="keep"
    )(export)
    app.command(
        name="attribute",
        help="Say what each learner's part of a retained round was, and of the round without it.",
        rich_help_panel="understand",
    )(attribute)
    data = typer.Typer(help="Token shards.", no_args_is_help=True)
    data.command(name="prepare", help="Turn text, jsonl or parquet into token shards.")(prepare_text)
    data.command(name="mix", help="Mix folders of token shards by weight.")(mix)
    data.command(name="show", help="Say what a folder of token shards holds, and check that it is whole.")(show)
    app.add_typer(data, name="data", rich_help_panel="run")


def learn(
    learner: Annotated[str | None, typer.Option("--id", help="This learner's id.")] = None,
    profile: Annotated[str | None, typer.Option(help="Folder for a profile of some steps, for Perfetto.")] = None,
    run: Run = None,
    broker: Broker = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Train until the run's token target is reached or the process is told to drain (SIGTERM)."""
    from atoll.base.extras import require  # noqa: PLC0415  (a verb loads what it needs when it runs)

    require("flax", "learner", "`atoll learner`")
    from atoll.settings import load  # noqa: PLC0415
    from atoll_learner.process import train  # noqa: PLC0415

    flags = with_flags(assignments, learner__id=learner, learner__profile=profile, run=run, broker__url=broker)
    train(load(config, flags).settings)


def evaluate(  # noqa: PLR0913, PLR0917  (one option each)
    every_s: Annotated[float, typer.Option("--every", min=0.5, help="Seconds between two evaluations.")] = 20.0,
    cores_max: Annotated[
        float | None,
        typer.Option(min=0.001, help="Pause longer, so that in the mean this much of a core is used at most."),
    ] = None,
    own: Annotated[
        str,
        typer.Option("--with", help="module:function of yours that gets the merged parameters and returns numbers."),
    ] = "",
    like: Annotated[
        str,
        typer.Option(help="With --with: module:attribute, a pytree (or a function that returns it) to put them into."),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option("--export", help="At the end of the run, or when told to stop, write the model to this folder."),
    ] = None,
    run: Run = None,
    broker: Broker = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Publish the merged model's bits per byte, or numbers of yours, on the event log until told to stop (SIGTERM)."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.base.exits import note_term  # noqa: PLC0415
    from atoll.base.extras import require  # noqa: PLC0415

    if like and not own:
        raise SettingsError("--like is for a function of yours", got=like, todo="name the function with --with")
    if out is not None and own:
        todo = "leave --export away, and use `atoll export`"
        raise SettingsError("--export is for the reference model", got=f"--with {own}", todo=todo)
    if not own:  # a function of somebody's own needs what it needs
        require("flax", "learner", "`atoll evaluate`")
    # Before anything is loaded: learners of this machine begin at the same time, and a short run may be over when it is.
    os.nice(NICE)
    is_told = (lambda: False) if out is None else note_term()
    from atoll.settings import load  # noqa: PLC0415
    from atoll_learner.evaluate import MeasuringPace, follow  # noqa: PLC0415

    pace = MeasuringPace(every_s) if cores_max is None else MeasuringPace(every_s, cores_max)
    settings = load(config, with_flags(assignments, run=run, broker__url=broker)).settings
    follow(settings, pace, own, like, out, is_told=is_told)


def export(
    out: Annotated[Path, typer.Option(help="Folder for model.safetensors, sample.txt and validation.json.")],
    run: Run = None,
    broker: Broker = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Write the merged model of a run as it stands now."""
    from atoll.settings import load  # noqa: PLC0415
    from atoll_learner.run_export import export_run  # noqa: PLC0415

    export_run(load(config, with_flags(assignments, run=run, broker__url=broker)).settings, out)


def attribute(
    what: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its id with --archive.")],
    *,
    fragment: Annotated[int, typer.Option(min=0, help="The fragment.")],
    version: Annotated[int, typer.Option("--round", min=1, help="The version that the round made.")],
    archive: Annotated[
        str | None, typer.Option(help="Where the run is archived: a folder, file:///folder or s3://bucket/prefix.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Measure held-out text, too: of the reference model, with its data here.")
    ] = False,
    assignments: Assignments = None,
) -> None:
    """Print a line per learner of one round of a run that was trained with archive.contributions."""
    from atoll.base.extras import require  # noqa: PLC0415

    if held_out:
        require("flax", "learner", "`atoll attribute --held-out`")
    from atoll_learner.attribute import attribute as told  # noqa: PLC0415

    told(what, archive, (fragment, version), assignments, held_out=held_out)


def prepare_text(  # noqa: PLR0913  (one option each)
    out: Annotated[Path, typer.Option(help="Folder for the token shards.")],
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(help="Text files or folders, .jsonl, .parquet or .arrow; text and .jsonl also as .gz or .zst."),
    ] = None,
    *,
    stdlib: Annotated[bool, typer.Option("--stdlib", help="Use the Python standard library's own source.")] = False,
    bpe: Annotated[int, typer.Option(help="Train a byte-pair vocabulary of this size; 0: plain bytes.")] = 0,
    validation: Annotated[float, typer.Option(help="Share of documents held out.")] = 0.05,
    block_tokens: Annotated[int, typer.Option(help="Tokens per leased block.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the split and the order.")] = 0,
    field: Annotated[str, typer.Option(help="Field of a jsonl line, or column of a table, that is the text.")] = "text",
    suffix: Annotated[
        list[str] | None, typer.Option(help="Further files that are text in a folder, as .html; repeatable.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json to use, or a model's folder with one; no vocabulary is trained."),
    ] = None,
    separator: Annotated[
        str, typer.Option(help="Its token that stands between documents; a usual one is found by itself.")
    ] = "",
) -> None:
    """Write token shards, held-out text and meta.json to a folder, and say what came of it and how fast."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import track  # noqa: PLC0415

    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.base.exits import leave_in_order_on_term  # noqa: PLC0415
    from atoll.base.wording import as_size  # noqa: PLC0415
    from atoll_learner.data.prepare import describe, prepare  # noqa: PLC0415
    from atoll_learner.data.sources import Reading, files_of, stdlib_files  # noqa: PLC0415
    from atoll_learner.data.tokenizer import Vocabulary  # noqa: PLC0415

    if bpe and tokenizer is not None:
        raise SettingsError("a vocabulary is either given or trained", got="--bpe and --tokenizer", todo="use one")
    leave_in_order_on_term()
    console, began_s = Console(stderr=True), time.monotonic()
    reading = Reading(field, frozenset(f".{each.lstrip('.')}" for each in suffix or ()))
    files = [*(stdlib_files() if stdlib else []), *(files_of(inputs or [], reading) if inputs or not stdlib else [])]

    def progress(paths: Iterable[Path]) -> Iterable[Path]:
        return track(list(paths), description="preparing", console=console, disable=not sys.stderr.isatty())

    meta = prepare(
        files,
        out,
        vocabulary=bpe if tokenizer is None else Vocabulary.of(tokenizer, separator),
        validation=validation,
        block_tokens=block_tokens,
        seed=seed,
        reading=reading,
        progress=progress,
    )
    console.print(describe(meta, out), soft_wrap=True, markup=False)
    size, took_s = sum(file.stat().st_size for file in files), time.monotonic() - began_s
    console.print(f"{as_size(size)} in {took_s:.1f} s, {as_size(round(size / took_s))}/s", soft_wrap=True, markup=False)
    if meta.validation_bytes < HELD_OUT_BYTES_FEW:
        reason = f"only {as_size(meta.validation_bytes)} are held out, so bits per byte say little"
        console.print(f"{reason}; a larger --validation holds out more", soft_wrap=True, markup=False)


def mix(
    parts: Annotated[list[str], typer.Argument(help="folder=weight, at least two.")],
    out: Annotated[Path, typer.Option(help="Folder for the mixture.")],
) -> None:
    """Write a folder from which learners read the parts in shares of their weights."""
    from rich.console import Console  # noqa: PLC0415

    from atoll.base.exits import leave_in_order_on_term  # noqa: PLC0415
    from atoll_learner.data import mixture  # noqa: PLC0415
    from atoll_learner.data.prepare import describe  # noqa: PLC0415

    leave_in_order_on_term()
    meta = mixture.mix(mixture.weights_of(parts), out)
    Console(stderr=True).print(describe(meta, out), soft_wrap=True, markup=False)


def show(folder: Annotated[Path, typer.Argument(help="Folder with token shards.")]) -> None:
    """Print the description of the token shards; leave with 2 when they are damaged."""
    from rich.console import Console  # noqa: PLC0415

    from atoll_learner.data.prepare import describe  # noqa: PLC0415
    from atoll_learner.data.shards import TokenShards  # noqa: PLC0415

    Console().print(describe(TokenShards(folder).meta, folder), soft_wrap=True, markup=False)
