"""`atoll archive show`: the checkpoints that an archive holds of one run or of all. It reads manifests only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.look import say
from atoll.cli.options import Run

if TYPE_CHECKING:
    from atoll.archive.checkpoint_store import CheckpointStore
    from atoll.archive.checkpoints import Manifest, RunCheckpoint


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    archive = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    archive.command(name="show", help="List the checkpoints of an archive: shards, versions, tokens, bytes, times.")(
        show
    )
    app.add_typer(archive, name="archive", help="Look at checkpoints outside the broker.")


def show(
    url: Annotated[str, typer.Argument(help="The archive: a folder, file:///folder or s3://bucket/prefix.")],
    run: Run = None,
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every object too and compare it with its name.")
    ] = False,
) -> None:
    """Print a line per checkpoint and one per shard in it; leave with 2 if there is none."""
    from atoll.archive.checkpoint_store import CheckpointStore  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.archive.object_store import open_archive  # noqa: PLC0415
    from atoll.base.errors import CheckpointError  # noqa: PLC0415

    object_store = open_archive(url)
    found = {name.path.split("/")[0] for name in object_store.names("") if "/" in name.path}
    runs = sorted(found) if run is None else [run]
    if not found & set(runs):
        raise CheckpointError(
            "the archive holds nothing of this run" if run else "there is no archive here",
            got=f"{run or 'no run'} in {url}",
            allowed=", ".join(sorted(found)) or None,
            todo="check the URL and --run",
        )
    for name in runs:
        store = CheckpointStore(object_store, name)
        say(f"run {name}")
        for checkpoint in store.checkpoints():
            for line in lines(store, checkpoint, verify=verify):
                say(line)


def lines(store: CheckpointStore, checkpoint: RunCheckpoint, *, verify: bool) -> list[str]:
    """Return the lines that describe one checkpoint."""
    from atoll.base.errors import CheckpointError  # noqa: PLC0415

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
