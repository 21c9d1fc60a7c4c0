"""`atoll replay`, which does once more what happened, by the same code; and `atoll archive`: what an archive holds of a run.

    atoll replay logs/facts-shard-0-1.jsonl         the last facts of a machine, a line per fact, and where it breaks
    atoll replay runs/demo                          every round that a run has retained, to the same bits (`cli.replay_run`)
    atoll replay demo --archive s3://bucket/runs    the same of a run whose folder is not here

A dump is written when something of ours fails, or on SIGUSR1 (`atoll.base.fact_dumps`). The same code makes the same
decisions, so a bug that a dump holds is seen again, and its mending too.

`atoll archive show` looks at manifests only: it needs no identity, and checks signatures only if it is given one. None of these
verbs needs a broker.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.checkpoints import Manifest, RunCheckpoint
from atoll.archive.object_store import open_archive
from atoll.archive.replay import ReplayedRound, RunReplay
from atoll.archive.rounds import RoundStore, foundings
from atoll.base.errors import CheckpointError, DataError, SettingsError, for_a_terminal
from atoll.base.fact_dumps import DUMP_BYTES_MAX
from atoll.base.files import read_file
from atoll.base.wording import counted
from atoll.cli.options import Assignments, Config, Run
from atoll.cli.output import printable, say
from atoll.keys.identity import read_identity
from atoll.local.own_brokers import RunKeys, keys_of
from atoll.protocol.recorder import Replay
from atoll.run.folder import read_run_file
from atoll.settings import own_outer
from atoll.wire.subjects import is_token

BROKEN = 1
PROGRESS_S: Final = 5.0
SHOWN_PER_FRAGMENT: Final = 20


def replay(  # noqa: PLR0913  (one option each)
    what: Annotated[str, typer.Argument(metavar="RUN|DUMP", help="A run's folder or id; or a dump: facts-….jsonl.")],
    *,
    archive: Annotated[
        str | None, typer.Option(help="Where the run is archived: a folder, file:///folder or s3://bucket/prefix.")
    ] = None,
    fragment: Annotated[int | None, typer.Option(min=0, help="The rounds of this fragment only.")] = None,
    version: Annotated[
        int | None, typer.Option("--round", min=1, help="Only the round that made this version; needs --fragment.")
    ] = None,
    founding: Annotated[
        str | None, typer.Option(help="Which founding of the run, if it was rebuilt.  [default: the newest]")
    ] = None,
    identity: Annotated[Path | None, typer.Option(help="An identity of a locked run, to check signatures.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Of a dump: print the last lines only.")] = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Print what came out; leave with 1 when a machine breaks, or a round differs."""
    if version is not None and fragment is None:
        raise SettingsError("a round of which fragment?", got=f"--round {version}", todo="give --fragment as well")
    if Path(what).is_file() or what.endswith(".jsonl"):
        given = {"archive": archive, "fragment": fragment, "founding": founding, "identity": identity, "config": config}
        given["set"] = assignments[0] if assignments else None
        if named := [f"--{name}" for name, value in given.items() if value is not None]:
            raise SettingsError("a dump is of one machine", got=", ".join(named), allowed="--last")
        replay_dump(Path(what), last)
        return
    if last is not None:
        raise SettingsError("only a dump has last lines", got=f"--last beside run {what}", todo="leave it away")

    wanted = RoundSelection(fragment, version, founding)
    if not replay_run(what, archive, identity, wanted, own_outer(config, assignments or [])):
        raise typer.Exit(BROKEN)


def replay_dump(file: Path, last: int | None) -> None:
    """Print a line per fact with the commands that it leads to; leave with 1 when the machine breaks again."""
    try:
        dump = Replay(read_file(file, DUMP_BYTES_MAX).splitlines())
    except OSError as error:
        raise DataError("cannot read the dump", got=f"{file}: {error.strerror}") from error
    except DataError as error:
        raise DataError(error.what, got=f"{file}: {error.got}", allowed=error.allowed, todo=error.todo) from error
    header = dump.header
    say(
        f"{header.name}: {header.facts} facts, {header.facts_before} before them forgotten; written because {header.why}"
    )
    if dump.lost:
        say(
            f"only {len(dump.facts)} of these facts are here: the last {dump.lost} are missing, so the end is not the end"
        )
    told: deque[str] = deque(maxlen=last)
    broken: Exception | None = None
    try:
        for line in dump.logbook():
            told.append(line)
    except Exception as error:  # noqa: BLE001  (a bug of ours is what a dump holds)
        broken = error
    for line in told:
        say(printable(line))
    if broken is not None:
        say(f"{type(broken).__name__}: {broken}")
        raise typer.Exit(BROKEN)


@dataclass(frozen=True, slots=True)
class RoundSelection:
    """Which rounds: None stands for all fragments, all versions, the newest founding."""

    fragment: int | None = None
    version: int | None = None
    founding: str | None = None


def replay_run(what: str, archive: str | None, identity: Path | None, wanted: RoundSelection, own_outer: str) -> bool:
    """Replay rounds and say what came out; return whether all of them are identical.

    Raises:
        SettingsError: there is no such run here, or no such fragment; or its outer optimizer is code, and not `own_outer`.
        CheckpointError: nothing of it was retained, or no such round.
    """
    began_s = time.monotonic()
    rounds = open_rounds(what, archive, identity, wanted.founding)
    again = RunReplay(rounds, own_outer)
    there = again.run.protocol.fragments
    if wanted.fragment is not None and wanted.fragment >= there:
        raise SettingsError("the run has no such fragment", got=wanted.fragment, allowed=f"0 to {there - 1}")
    say(f"run {again.run.run}, founding {rounds.origin}: {rounds.size_bytes():,} bytes retained")
    made: list[ReplayedRound] = []
    for fragment in range(there) if wanted.fragment is None else (wanted.fragment,):
        found = _replay_fragment(again, fragment, wanted.version)
        made += found
        if wanted.version is None:
            _say_fragment(fragment, found)
    if not made:
        raise CheckpointError(
            "no such round is retained",
            got=f"fragment {wanted.fragment}, version {wanted.version}" if wanted.version else again.run.run,
            todo="was the run trained with archive.contributions=true? `atoll replay` without --round lists what is there",
        )
    if wanted.version is not None:
        _say_round(made[-1])
    same = sum(each.identical for each in made)
    took_s = time.monotonic() - began_s
    facts = sum(tenure.facts for tenure in again.tenures.values())
    contributions = counted(sum(len(each.pushes) for each in made), "contribution")
    say(
        f"{counted(len(made), 'round')} replayed, {same} identical, in {took_s:.1f} s: {contributions}, "
        f"{counted(facts, 'fact')} of {counted(len(again.tenures), 'tenure')}, {again.bytes_read:,} bytes read"
    )
    return same == len(made)


def open_rounds(what: str, archive: str | None, identity: Path | None, origin: str | None) -> RoundStore:
    """Return the store of retained rounds that is meant."""
    run, archive, identity = _locate_run(what, archive, identity)
    store = open_archive(archive)
    signatures = None if identity is None else read_identity(identity).signatures()
    there = foundings(store, run)
    if not there or (origin is not None and origin not in there):
        raise CheckpointError(
            "no rounds of this run are retained here" if not there else "no such founding is retained",
            got=f"{run} in {archive}" if not there else origin,
            allowed=", ".join(there) or None,
            todo=None if there else "train it with archive.contributions=true",
        )
    return RoundStore(store, run, origin or there[-1], signatures)


def _locate_run(what: str, archive: str | None, identity: Path | None) -> tuple[str, str, Path | None]:
    folder = Path(what)
    file = read_run_file(folder) if folder.is_dir() else None
    if file is not None:
        keys = keys_of(folder)
        archive = archive or str(file.settings.get("archive.url") or folder / "archive")
        return file.run, archive, identity or (None if keys is None else Path(RunKeys(keys, file.run).operator))
    if archive is None or not is_token(what):
        raise SettingsError(
            "neither a dump nor the folder of a run",
            got=what,
            allowed="facts-….jsonl, the --out of an `atoll up`, or a run id with --archive",
        )
    return what, archive, identity


def _replay_fragment(again: RunReplay, fragment: int, version: int | None) -> list[ReplayedRound]:
    found: list[ReplayedRound] = []
    said_s = time.monotonic()
    for made in again.fragment(fragment, version):
        found.append(made)
        if time.monotonic() - said_s > PROGRESS_S:
            said_s = time.monotonic()
            say(f"fragment {fragment}: version {made.version} …")
    return found if version is None else [made for made in found if made.version == version]


def _say_fragment(fragment: int, found: list[ReplayedRound]) -> None:
    if not found:
        say(f"fragment {fragment}: no round is retained")
        return
    contributions = counted(sum(len(made.pushes) for made in found), "contribution")
    differing = [made for made in found if not made.identical]
    how = "all identical" if not differing else f"{len(found) - len(differing)} identical"
    versions = f"versions {found[0].version} to {found[-1].version}"
    say(f"fragment {fragment}: {counted(len(found), 'round')}, {versions}, {contributions}: {how}")
    for made in differing[:SHOWN_PER_FRAGMENT]:
        _say_round(made)
    if (left_out := len(differing) - SHOWN_PER_FRAGMENT) > 0:
        say(f"  and {counted(left_out, 'more round differs', 'more rounds differ')}")


def _say_round(made: ReplayedRound) -> None:
    how = "identical" if made.identical else "differs"
    contributions = counted(len(made.pushes), "contribution")
    say(f"  round {made.fragment}/{made.version}, epoch {made.epoch}, {contributions}: {how}")
    for difference in made.differences:
        say("    " + printable(str(difference)))
    if made.identical:
        say(f"    values {made.digest}")


verbs = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@verbs.command(name="show")
def show(
    url: Annotated[str, typer.Argument(help="The archive: a folder, file:///folder or s3://bucket/prefix.")],
    run: Run = None,
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every object too and compare it with its name.")
    ] = False,
    identity: Annotated[
        Path | None,
        typer.Option(help="An identity of the run: show only what its shards signed, as a rebuilding sees it."),
    ] = None,
) -> None:
    """List the checkpoints of an archive: shards, versions, tokens, bytes, times."""
    signatures = None
    if identity is not None:
        signatures = read_identity(identity).signatures()
    object_store = open_archive(url)
    folders = {name.path.split("/")[0] for name in object_store.names("") if "/" in name.path}
    found = {folder for folder in folders if is_token(folder)}
    for folder in sorted(folders - found):
        say(f"not a run: {for_a_terminal(folder)}")
    runs = sorted(found) if run is None else [run]
    if not found & set(runs):
        raise CheckpointError(
            "the archive holds nothing of this run" if run else "there is no archive here",
            got=f"{run or 'no run'} in {url}",
            allowed=", ".join(sorted(found)) or None,
            todo="check the URL and --run",
        )
    for name in runs:
        store = CheckpointStore(object_store, name, signatures)
        say(f"run {name}")
        for checkpoint in store.checkpoints():
            for line in lines(store, checkpoint, verify=verify):
                say(line)


@verbs.command(name="sign")
def sign(
    url: Annotated[str, typer.Argument(help="The archive: a folder, file:///folder or s3://bucket/prefix.")],
    *,
    run: Annotated[str, typer.Option(help="The run whose checkpoints are signed.")],
    identity: Annotated[
        Path, typer.Option(help="The identity that signs: an operator's, or a synchronizer's of the run.")
    ],
) -> None:
    """Sign what an open run archived, so that a locked run may be rebuilt from it."""
    held = read_identity(identity)
    held.check_run(run)
    if held.kind not in ("operator", "synchronizer"):
        raise SettingsError(
            "nobody would believe these signatures",
            got=f"the identity of {held.kind} {held.name!r}",
            allowed="an operator, or a synchronizer of the run",
            todo="give the operator's identity (--identity KEYS/identities/operator.toml)",
        )
    object_store = open_archive(url)
    store = CheckpointStore(object_store, run, held.signatures())
    parts = store.parts()
    if not parts:
        raise CheckpointError(
            "the archive holds nothing of this run", got=f"{run} in {url}", todo="check the URL and --run"
        )
    signed = 0
    for part in parts:
        try:
            store.endorse(part)
        except CheckpointError as error:
            say(f"not signed: {error.what}: {error.got}")
        else:
            signed += 1
            if part.opened:
                say(f"signed, too: shard {part.shard} goes on in epoch {part.epoch}, from checkpoint {part.number} on")
    say(f"signed {signed} of {len(parts)} manifests of run {run} as {held.kind} {held.name}")


def lines(store: CheckpointStore, checkpoint: RunCheckpoint, *, verify: bool) -> list[str]:
    """Return the lines that describe one checkpoint."""
    state = "complete" if checkpoint.complete else f"lacks shards {', '.join(map(str, checkpoint.missing))}"
    shards = []
    for shard, part in sorted(checkpoint.parts.items()):
        try:
            manifest = store.read(part)
            if verify:
                for found in manifest.objects.values():
                    store.get_object(shard, found)
        except CheckpointError as error:
            state = "damaged"
            shards.append(f"    shard {shard}  DAMAGED: {error.what}: {error.got}")
        else:
            shards.append(shard_line(manifest, at_number=checkpoint.number))
    return [f"  checkpoint {checkpoint.number:>8}  {state}  founding {checkpoint.founding}", *shards]


def shard_line(manifest: Manifest, at_number: int) -> str:
    """Return the line that describes one shard's part of a checkpoint."""
    versions = [piece.head.version for piece in manifest.pieces]
    size = sum(found.size_bytes for found in manifest.objects.values())
    made = datetime.fromtimestamp(manifest.made_at_s, UTC).isoformat(timespec="seconds")
    tail = (
        ""
        if not manifest.final
        else " finished"
        if manifest.number == at_number
        else f" finished at checkpoint {manifest.number}"
    )
    return (
        f"    shard {manifest.shard}  epoch {manifest.epoch}  versions {min(versions)}..{max(versions)}  "
        f"{manifest.tokens:,} tokens  {size:,} bytes  {made}{tail}"
    )
