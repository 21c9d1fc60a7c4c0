"""`atoll why`: what stands out in a run, why its rounds waited, and the five usual questions. It changes nothing.

    atoll why                      what stands out, by cause, and the rounds that were long
    atoll why --fragment 3         one round of it in full, as `atoll story round 3`
    atoll why goodput              why learners were not stepping all the time
    atoll why behind [LEARNER]     why a learner's contributions come late
    atoll why refused [LEARNER]    why contributions were refused
    atoll why loss                 what happened when the loss rose most
    atoll why grace [FRAGMENT]     what a longer or shorter grace would have given

The answers rest in the event log (`atoll.story`); where that has no figure, they say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.histories import history_of, tell
from atoll.cli.options import Assignments, Broker, Config, Run
from atoll.cli.reading import Out

if TYPE_CHECKING:
    from atoll.story.history import History

QUESTIONS = ("goodput", "behind", "refused", "loss", "grace")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        name="why",
        help="Say what stands out in a run and why its rounds waited; or answer: goodput, behind, refused, loss, grace.",
    )(why)


def why(  # noqa: PLR0913  (one option each)
    question: Annotated[
        str | None, typer.Argument(help="goodput, behind, refused, loss or grace.  [default: what stands out]")
    ] = None,
    about: Annotated[
        str | None, typer.Argument(help="A learner (behind, refused) or a fragment (grace).  [default: all]")
    ] = None,
    *,
    fragment: Annotated[int | None, typer.Option(min=0, help="Tell one round of this fragment in full.")] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="The version that the round made.  [default: the newest]")
    ] = None,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Read a run's event log and answer from it."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415  (a verb loads what it needs when it runs)

    if version is not None and fragment is None:
        raise SettingsError("a version of which fragment?", got=f"--version {version}", todo="give --fragment as well")
    if question is not None and question not in QUESTIONS:
        raise SettingsError("no such question", got=question, allowed=", ".join(QUESTIONS))
    if question is not None and fragment is not None:
        raise SettingsError(
            "one round, or a question?", got=f"{question} and --fragment {fragment}", todo="ask one after the other"
        )
    history = history_of("why", out, run, broker, config, assignments)
    tell(lines(history, fragment, version) if question is None else answer(history, question, about))


def answer(history: History, question: str, about: str | None) -> list[str]:
    """Return the answer to one of `QUESTIONS`.

    Raises:
        SettingsError: the event log tells of no such learner or fragment.
    """
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.story import questions  # noqa: PLC0415

    if question in ("goodput", "loss"):
        if about is not None:
            raise SettingsError(f"`why {question}` is about the whole run", got=about, todo="leave it away")
        return questions.goodput(history) if question == "goodput" else questions.loss(history)
    if question == "grace":
        if about is not None and not about.isdecimal():
            raise SettingsError("`why grace` is about a fragment", got=about, allowed="its number")
        return questions.grace(history, None if about is None else int(about))
    if about is not None and about not in history.learners():
        raise SettingsError(
            "the event log tells of no such learner", got=about, allowed=", ".join(history.learners()) or "nobody yet"
        )
    return questions.behind(history, about) if question == "behind" else questions.refused(history, about)


def lines(history: History, fragment: int | None, version: int | None) -> list[str]:
    """Return what there is to say of one round, or what stands out, with the rounds that are long.

    Raises:
        SettingsError: there is no such round.
    """
    from atoll.base.errors import SettingsError  # noqa: PLC0415
    from atoll.story.findings import findings  # noqa: PLC0415
    from atoll.story.telling import long_rounds, round_story  # noqa: PLC0415

    if fragment is None:
        standing = [line for found in findings(history) for line in found.lines(history.clock)]
        return [*standing, "", *long_rounds(history)] if standing else long_rounds(history)
    found = history.find(fragment, version)
    if found is not None:
        told = round_story(history, found)
        still = history.waiting(fragment, found.round.version + 1) if version is None else None
        return told if still is None else [*told, "", f"the next round still waits: {still.why} ({still.cause_id})"]
    still = history.waiting(fragment, version or 1)
    if still is not None:
        return [f"fragment {fragment}: version {version or 1} is not there yet; {still.why} ({still.cause_id})"]
    there = [line.round.version for line in history.rounds if line.round.fragment == fragment]
    fragments = sorted({line.round.fragment for line in history.rounds})
    if not there and fragments:
        raise SettingsError(
            "the event log tells of no round of this fragment",
            got=fragment,
            allowed=f"fragments {fragments[0]} to {fragments[-1]}",
        )
    raise SettingsError(
        "the event log tells of no such round",
        got=f"fragment {fragment}, version {'newest' if version is None else version}",
        allowed=f"versions {min(there)} to {max(there)}" if there else None,
        todo="a round that has not ended is told by its shard's log (round.waiting)",
    )
