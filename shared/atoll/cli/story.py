"""`atoll story`: the causal chain of a round, a fragment, a shard, a learner or a contribution, in words, from the event log.

The ids are those of logs and messages: `3/18` or `commit/3/18` is the round that made version 18 of fragment 3, and
`a/1/3/5` or `push/a/1/3/5` is contribution 5 of learner a, incarnation 1, fragment 3. A shard is `shard-0`, or its number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.histories import history_of, tell
from atoll.cli.options import Assignments, Broker, Config, Run
from atoll.cli.reading import Out

if TYPE_CHECKING:
    from atoll.story.history import History

KINDS = ("round", "fragment", "shard", "learner", "contribution")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="story", help="Tell what happened to a round, fragment, shard, learner or contribution, and why.")(
        story
    )


def story(  # noqa: PLR0913  (one option each)
    kind: Annotated[str, typer.Argument(help="round, fragment, shard, learner or contribution.")],
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="FRAGMENT/VERSION; FRAGMENT; shard-0; a learner; LEARNER/INCARNATION/FRAGMENT/PUSH."
        ),
    ],
    *,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Read a run's event log and tell one part of it."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415  (a verb loads what it needs when it runs)

    if kind not in KINDS:
        raise SettingsError("no story of this kind", got=kind, allowed=", ".join(KINDS))
    tell(told(history_of("story", out, run, broker, config, assignments), kind, name))


def told(history: History, kind: str, name: str) -> list[str]:
    """Return the story of one of `KINDS`.

    Raises:
        SettingsError: the id is not of this kind, or the event log tells of no such thing.
    """
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.cli.why import lines  # noqa: PLC0415
    from atoll.story.telling import fragment_story, learner_story, shard_story  # noqa: PLC0415

    if kind == "shard":
        shard = f"shard-{name}" if name.isdecimal() else name
        if shard not in history.shards():
            known = ", ".join(history.shards()) or "none yet"
            raise SettingsError("the event log tells of no such shard", got=name, allowed=known)
        return shard_story(history, shard)
    if kind == "learner":
        if name not in history.learners():
            known = ", ".join(history.learners()) or "nobody yet"
            raise SettingsError("the event log tells of no such learner", got=name, allowed=known)
        return learner_story(history, name)
    if kind == "contribution":
        return _contribution(history, name)
    parts = name.removeprefix("commit/").removeprefix("head/").split("/")
    if not all(part.isdecimal() for part in parts) or len(parts) > (2 if kind == "round" else 1):
        allowed = "FRAGMENT/VERSION, as 3/18, or FRAGMENT for its newest" if kind == "round" else "its number"
        raise SettingsError(f"not the id of a {kind}", got=name, allowed=allowed)
    fragment, version = int(parts[0]), int(parts[1]) if len(parts) > 1 else None
    if kind == "round" or history.find(fragment) is None:
        return lines(history, fragment, version)
    return fragment_story(history, fragment)


def _contribution(history: History, name: str) -> list[str]:
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.story import telling  # noqa: PLC0415

    learner, *numbers = name.removeprefix("push/").split("/")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):  # incarnation, fragment, push
        raise SettingsError(
            "not the id of a contribution", got=name, allowed="LEARNER/INCARNATION/FRAGMENT/PUSH, as a/1/3/5"
        )
    incarnation, fragment, push = (int(number) for number in numbers)
    for line, share in history.contributions(learner):
        if (share.incarnation, line.round.fragment, share.push) == (incarnation, fragment, push):
            return telling.contribution_story(history, line, share)
    if refused := telling.refused_story(history, learner, incarnation, fragment, push):
        return refused
    raise SettingsError(
        "the event log tells of no such contribution",
        got=name,
        allowed="one that was merged or refused",
        todo="one that was superseded, is queued, or died with its learner is in no event: see `atoll fates`",
    )
