"""`atoll why`: what happened in a run and why, in words, from its event log. It changes nothing.

    atoll why                      what stands out, by cause, and the rounds that were long
    atoll why round 3/18           the causal chain of a round, a fragment, a shard, a learner or a contribution
    atoll why --fragment 3         one round of it in full, as `atoll why round 3`
    atoll why goodput              why learners were not stepping all the time
    atoll why behind [LEARNER]     why a learner's contributions come late
    atoll why refused [LEARNER]    why contributions were refused
    atoll why loss                 what happened when the loss rose most
    atoll why grace [FRAGMENT]     what a longer or shorter grace would have given

The ids are those of logs and messages: `3/18` or `commit/3/18` is the round that made version 18 of fragment 3, and
`a/1/3/5` or `push/a/1/3/5` is contribution 5 of learner a, incarnation 1, fragment 3. A shard is `shard-0`, or its number.
Where the event log (`atoll.story`) has no figure, the answers say so.
"""

from __future__ import annotations

from typing import Annotated

import typer

from atoll.base.errors import SettingsError
from atoll.cli.options import Assignments, Broker, Config, Out, Run
from atoll.cli.output import say_lines
from atoll.cli.reading import history_of
from atoll.run.history import History
from atoll.story import questions, telling
from atoll.story.findings import findings
from atoll.story.telling import fragment_story, learner_story, long_rounds, round_story, shard_story

KINDS = ("round", "fragment", "shard", "learner", "contribution")
QUESTIONS = ("goodput", "behind", "refused", "loss", "grace")


def story_lines(history: History, kind: str, name: str) -> list[str]:
    """Return the story of one of `KINDS`.

    Raises:
        SettingsError: the id is not of this kind, or the event log tells of no such thing.
    """
    if kind == "shard":
        shard = f"shard-{name}" if name.isdecimal() else name
        if shard not in history.shards():
            known = ", ".join(history.shards()) or "none yet"
            raise SettingsError("the event log tells of no such shard", got=name, allowed=known)
        return shard_story(history, shard)
    if kind == "learner":
        _check_learner(history, name)
        return learner_story(history, name)
    if kind == "contribution":
        return _contribution_lines(history, name)
    fragment, version = _parse_round_id(kind, name)
    if kind == "round" or history.find(fragment) is None:
        return why_lines(history, fragment, version)
    return fragment_story(history, fragment)


def _parse_round_id(kind: str, name: str) -> tuple[int, int | None]:
    parts = name.removeprefix("commit/").removeprefix("head/").split("/")
    if not all(part.isdecimal() for part in parts) or len(parts) > (2 if kind == "round" else 1):
        allowed = "FRAGMENT/VERSION, as 3/18, or FRAGMENT for its newest" if kind == "round" else "its number"
        raise SettingsError(f"not the id of a {kind}", got=name, allowed=allowed)
    return int(parts[0]), int(parts[1]) if len(parts) > 1 else None


def _check_learner(history: History, name: str) -> None:
    if name not in history.learner_names():
        known = ", ".join(history.learner_names()) or "nobody yet"
        raise SettingsError("the event log tells of no such learner", got=name, allowed=known)


def _contribution_lines(history: History, name: str) -> list[str]:
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


def why(  # noqa: PLR0913  (one option each)
    question: Annotated[
        str | None,
        typer.Argument(
            help="round, fragment, shard, learner or contribution; goodput, behind, refused, loss or grace.  "
            "[default: what stands out]"
        ),
    ] = None,
    about: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="FRAGMENT/VERSION; FRAGMENT; shard-0; a learner; LEARNER/INCARNATION/FRAGMENT/PUSH. Of a question: a "
            "learner (behind, refused) or a fragment (grace).  [default: all]",
        ),
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
    if version is not None and fragment is None:
        raise SettingsError("a version of which fragment?", got=f"--version {version}", todo="give --fragment as well")
    if question is not None and question not in (*KINDS, *QUESTIONS):
        raise SettingsError("no such question", got=question, allowed=", ".join((*KINDS, *QUESTIONS)))
    if question in KINDS and about is None:
        raise SettingsError(
            f"which {question}?", got=f"why {question}", allowed=f"why {question} ID", todo="see --help"
        )
    if question is not None and fragment is not None:
        raise SettingsError(
            "one round, or a question?", got=f"{question} and --fragment {fragment}", todo="ask one after the other"
        )
    history, _ = history_of("why", out, run, broker, config, assignments)
    if question is None:
        lines = why_lines(history, fragment, version)
    elif question in KINDS:
        lines = story_lines(history, question, about or "")
    else:
        lines = answer_lines(history, question, about)
    say_lines(lines)


def answer_lines(history: History, question: str, about: str | None) -> list[str]:
    """Return the answer to one of `QUESTIONS`.

    Raises:
        SettingsError: the event log tells of no such learner or fragment.
    """
    if question in ("goodput", "loss"):
        if about is not None:
            raise SettingsError(f"`why {question}` is about the whole run", got=about, todo="leave it away")
        return questions.goodput(history) if question == "goodput" else questions.loss(history)
    if question == "grace":
        if about is not None and not about.isdecimal():
            raise SettingsError("`why grace` is about a fragment", got=about, allowed="its number")
        return questions.grace(history, None if about is None else int(about))
    if about is not None:
        _check_learner(history, about)
    return questions.behind(history, about) if question == "behind" else questions.refused(history, about)


def why_lines(history: History, fragment: int | None, version: int | None) -> list[str]:
    """Return what there is to say of one round, or what stands out, with the rounds that are long.

    Raises:
        SettingsError: there is no such round.
    """
    if fragment is None:
        standing = [line for found in findings(history) for line in found.lines(history.clock)]
        return [*standing, "", *long_rounds(history)] if standing else long_rounds(history)
    found = history.find(fragment, version)
    if found is not None:
        lines = round_story(history, found)
        still = history.waiting(fragment, found.round.version + 1) if version is None else None
        return lines if still is None else [*lines, "", f"the next round still waits: {still.why} ({still.cause_id})"]
    still = history.waiting(fragment, version or 1)
    if still is not None:
        return [f"fragment {fragment}: version {version or 1} is not there yet; {still.why} ({still.cause_id})"]
    raise _no_such_round(history, fragment, version)


def _no_such_round(history: History, fragment: int, version: int | None) -> SettingsError:
    there = [line.round.version for line in history.rounds if line.round.fragment == fragment]
    fragments = sorted({line.round.fragment for line in history.rounds})
    if not there and fragments:
        return SettingsError(
            "the event log tells of no round of this fragment",
            got=fragment,
            allowed=f"fragments {fragments[0]} to {fragments[-1]}",
        )
    return SettingsError(
        "the event log tells of no such round",
        got=f"fragment {fragment}, version {'newest' if version is None else version}",
        allowed=f"versions {min(there)} to {max(there)}" if there else None,
        todo="a round that has not ended is told by its shard's log (round.waiting)",
    )
