r"""What each kind of identity may do on a broker, as subjects.

A learner's own subjects end in its id or contain it at a fixed level (`atoll.wire.subjects`), so its rights are a list of
subjects. Five verbs need five lists, because the broker treats each of them in another way:

* `stores`: messages that a stream keeps; the stream answers each once;
* `tells`: core messages, which nobody answers;
* `asks`: requests to JetStream, answered once;
* `reads`: batched direct gets, answered by many messages;
* `hears`: subjects that are delivered to it.

A `learner` contributes, leases data and keeps its member record. It cannot delete, so chunks that it abandons stay until they
are two hours old. It cannot ask other learners for anything: no subject of another is open to it. A learner that `founds` may
also create the streams of a run and write version 0; whoever may do that is trusted as a synchronizer is. A `reader` reads all
of a run and writes nothing; an `evaluator` also writes events of its measurements. A `synchronizer` owns a run. An `operator`
may do everything in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from atoll.bus.streams import stream_plan
from atoll.wire.subjects import Subjects, matches

Kind = Literal["learner", "synchronizer", "reader", "evaluator", "operator"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ISOLATED: frozenset[Kind] = frozenset({"learner", "reader", "evaluator"})
"""Kinds that have an account of their own: an answer can then reach only who asked (see `atoll.keys.doors`)."""
EVERY_RUN = "*"


@dataclass(frozen=True, slots=True)
class Rights:
    """The subjects of one identity, by what it does with them (see the module)."""

    stores: tuple[str, ...] = ()
    tells: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    hears: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    """Subjects on which processes of this one identity talk to each other."""


def rights_of(kind: Kind, run: str, name: str, *, founds: bool = False) -> Rights:
    """Return the rights of an isolated identity: a learner, a reader or an evaluator."""
    if kind == "learner":
        return _learner(run, name, founds=founds)
    writes = (Subjects(run).event("validation", "*"),) if kind == "evaluator" else ()
    return _reader(run, writes)


def may_write(kind: Kind, run: str, name: str, subject: str, *, founds: bool = False) -> bool:
    """Return whether a message of this identity on `subject` is to be believed: what a reader asks of its signer."""
    return any(matches(pattern, subject) for pattern in _written_by(kind, run, name, founds=founds))


@lru_cache(maxsize=4096)
def _written_by(kind: Kind, run: str, name: str, *, founds: bool) -> tuple[str, ...]:
    if kind == "operator":
        return ("atoll.>",) if run == EVERY_RUN else ()
    s = Subjects(run)
    if kind == "synchronizer":
        return (f"{s.prefix}.>",)
    rights = rights_of(kind, run, name, founds=founds)
    answers = (s.answer,) if kind == "learner" else ()
    return (*rights.stores, *rights.tells, *rights.own, *answers)


def synchronizer_publishes(run: str) -> tuple[str, ...]:
    """Return what a synchronizer of `run` may publish: the run's subjects, and JetStream's for the run's streams."""
    queue = _stream(run, "UPM")
    verbs = ("INFO", "CREATE", "MSG.GET", "PURGE")
    return (
        f"{Subjects(run).prefix}.>",
        "$JS.API.INFO",
        *(f"$JS.API.STREAM.{verb}.{name}" for name in _streams(run) for verb in verbs),
        *(f"$JS.API.DIRECT.GET.{name}" for name in _streams(run)),
        f"$JS.API.CONSUMER.LIST.{queue}",
        *(f"$JS.API.CONSUMER.{verb}.{queue}.>" for verb in ("CREATE", "INFO", "DELETE", "MSG.NEXT")),
        f"$JS.API.CONSUMER.DURABLE.CREATE.{queue}.>",
        f"$JS.ACK.{queue}.>",
    )


def synchronizer_hears(run: str) -> tuple[str, ...]:
    """Return what a synchronizer of `run` may subscribe to, beside its inbox."""
    return (f"{Subjects(run).prefix}.>",)


def _learner(run: str, name: str, *, founds: bool) -> Rights:
    s = Subjects(run)
    founding = (s.run_record, s.head("*"), f"{s.prefix}.gl.c.*.0.>") if founds else ()
    creating = (
        (
            *(f"$JS.API.STREAM.{verb}.{stream}" for stream in _streams(run) for verb in ("CREATE", "INFO")),
            f"$JS.API.STREAM.PURGE.{_stream(run, 'GL')}",
        )
        if founds
        else ()
    )
    return Rights(
        stores=(
            f"{s.prefix}.up.c.{name}.>",
            f"{s.prefix}.up.m.*.*.{name}",
            s.member(name),
            s.data,
            s.event("*", name),
            *founding,
        ),
        tells=(s.beat(name),),
        asks=(
            "$JS.API.INFO",
            *(f"$JS.API.STREAM.MSG.GET.{_stream(run, one)}" for one in ("GL", "ST", "MB")),
            *creating,
        ),
        reads=tuple(f"$JS.API.DIRECT.GET.{_stream(run, one)}" for one in ("GL", "ST", "MB")),
        hears=(s.call("*"), s.tap("gl.head.*"), s.control("all"), s.control(name), s.verdict(name)),
        own=(s.control(name),),
    )


def _reader(run: str, writes: tuple[str, ...]) -> Rights:
    s = Subjects(run)
    kept = ("GL", "MB", "ST", "EV")
    return Rights(
        stores=writes,
        asks=("$JS.API.INFO", *(f"$JS.API.STREAM.MSG.GET.{_stream(run, one)}" for one in kept)),
        reads=tuple(f"$JS.API.DIRECT.GET.{_stream(run, one)}" for one in kept),
        hears=(s.tap(), s.beat("*"), s.presence("*"), s.call("*"), s.control(">")),
    )


def _streams(run: str) -> tuple[str, ...]:
    return tuple(plan.name for plan in stream_plan(run))


def _stream(run: str, kind: str) -> str:
    """Return the name of one stream of a run."""
    return next(name for name in _streams(run) if name.endswith(f"_{kind}"))
