"""Options that several verbs share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

Config = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="One setting, as a.b=c; repeatable.")]
Run = Annotated[str | None, typer.Option(help="Run id.")]
Broker = Annotated[
    str | None,
    typer.Option(help="URL of a running broker, nats://host:port; of a cluster several, separated by commas."),
]

# What the verbs that make a whole run share: `atoll up` and `atoll sim train`.
Learners = Annotated[int | None, typer.Option(help="How many learners.  [default: 3]")]
Shards = Annotated[int | None, typer.Option(help="How many synchronizer shards.  [default: 2]")]
Standbys = Annotated[int | None, typer.Option(help="How many more processes stand by for each shard.  [default: 0]")]
Corpus = Annotated[
    list[Path] | None, typer.Option(help="Text to train on; repeatable.  [default: Python's own source]")
]
Throttle = Annotated[list[str] | None, typer.Option(help="Slow a learner down, as learner-3=5; repeatable.")]
Via = Annotated[
    list[str] | None,
    typer.Option(
        help="Let one process reach the broker through a relay of yours, as learner-1=nats://host:port; repeatable."
    ),
]
Like = Annotated[
    Path | None, typer.Option(help="Begin a new run, set as the one of this report.json, run.json or folder was.")
]


# The flags of settings whose last word is not the flag's name.
_FLAGS: Final = {"broker.url": "--broker", "learner.id": "--id", "protocol.tokens_target": "--tokens"}


def with_flags(assignments: list[str] | None, **flags: object) -> list[str]:
    """Return the `--set` texts followed by those of `flags` that were given; `__` in a name stands for a dot.

    Flags come last and so win over `--set`, which wins over the environment and the file.
    """
    from atoll.settings.sources import FlagText  # noqa: PLC0415  (a verb loads what it needs when it runs)

    named = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    given = [FlagText(_FLAGS.get(name, f"--{name.rpartition('.')[2]}"), name, value) for name, value in named.items()]
    return [*(assignments or []), *given]
