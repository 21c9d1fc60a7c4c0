"""`atoll archive`: the checkpoints that an archive holds of one run or of all (`show`), and signatures for them (`sign`).

`show` looks at manifests only. It needs no identity, and checks signatures only if it is given one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.checkpoints import Manifest, RunCheckpoint
from atoll.archive.object_store import open_archive
from atoll.base.errors import CheckpointError, SettingsError, for_a_terminal
from atoll.cli.options import Run
from atoll.cli.output import say
from atoll.keys.identity import read_identity
from atoll.wire.subjects import is_token

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
