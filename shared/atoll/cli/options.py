"""Options that several verbs share, spelled once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

Config = Annotated[Path | None, typer.Option(help="A TOML file of settings.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="One setting, as a.b=c; repeatable.")]
Out = Annotated[Path | None, typer.Option(help="The folder of a run of `atoll up`, in place of --run and --broker.")]
Run = Annotated[str | None, typer.Option(help="Run id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
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
    from atoll.settings import FlagText  # noqa: PLC0415  (a verb loads what it needs when it runs)

    named = {name.replace("__", "."): value for name, value in flags.items() if value is not None}
    given = [FlagText(_FLAGS.get(name, f"--{name.split('.')[-1]}"), name, value) for name, value in named.items()]
    return [*(assignments or []), *given]


def run_flags(
    assignments: list[str] | None,
    corpus: list[Path] | None = None,
    throttle: list[str] | None = None,
    via: list[str] | None = None,
    **flags: object,
) -> tuple[str, ...]:
    """Return what `with_flags` does, and the values of the flags of `atoll up` and `atoll sim train` that are repeated.

    Raises:
        SettingsError: a text is not `name=value`.
    """
    from atoll.bus.options import ADDRESSES  # noqa: PLC0415
    from atoll.settings import FlagText  # noqa: PLC0415

    given = with_flags(assignments, up__corpus=[str(path) for path in corpus or ()] or None, **flags)
    for flag, texts, allowed in (("throttle", throttle, "learner=factor"), ("via", via, f"name={ADDRESSES}")):
        given += [FlagText(f"--{flag}", f"up.{flag}.{name}", value) for name, value in _pairs(flag, texts, allowed)]
    return tuple(given)


def _pairs(flag: str, texts: list[str] | None, allowed: str) -> Iterator[tuple[str, str]]:
    from atoll.base.errors import SettingsError, redact  # noqa: PLC0415

    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name or "." in name:
            raise SettingsError(f"--{flag} is wrong", got=redact(text), allowed=allowed, todo="see --help")
        yield name, value
