r"""The rights of each kind of identity on a broker, as subjects.

Five verbs need five lists, because the broker treats each of them in another way:

* `stores`: messages that a stream keeps; the stream answers each once;
* `tells`: core messages, which nobody answers;
* `asks`: requests to JetStream, answered once;
* `reads`: batched direct gets, answered by many messages;
* `hears`: subjects that are delivered to it.

A `learner` contributes, leases data and keeps its member record, on subjects that contain its id. One that `founds` may also
create the streams of a run and write version 0; whoever may do that is trusted as a synchronizer is. A `reader` reads all of a
run and writes nothing; an `evaluator` also writes events of its measurements. A `synchronizer` owns a run. An `operator` may do
everything in every run.

A `region` is the broker of a region (`atoll.bus.regions`): at the hub it may do what learners and readers of its run may do
together, and copy the global stream. Nothing that it writes itself is believed. It writes for those learners alone that the
roll does not place elsewhere (`carried`). A `premerger` is the synchronizer of a region: it hears what shards ask its region,
answers, stores sums, and reads what they are made of. The name of each says which region is its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal, get_args

from atoll.base.errors import SettingsError
from atoll.bus.regions import HUB_DOMAIN
from atoll.bus.streams import kept_plan, live_plan, stream_plan
from atoll.wire.events import EVALUATOR, kinds_of
from atoll.wire.subjects import REGION_NAMES, SUM, Subjects, is_region_name, matches, token

Kind = Literal["learner", "synchronizer", "reader", "evaluator", "region", "premerger", "operator"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ISOLATED: frozenset[Kind] = frozenset({"learner", "reader", "evaluator", "premerger"})
"""Kinds that have an account of their own wherever they connect: an answer can then reach only who asked (`atoll.keys.doors`).
A region has one at the hub."""
EVERY_RUN = "*"
_NOT_A_LEARNER: Final = re.compile(rf"all|bye|{EVALUATOR}|{SUM}|shard-[0-9]+")
"""Words in the place of a learner's name: commands go to `all` and `shard-0`, events come from shards and evaluators, chunks
are of sums."""
_PREMERGER: Final = "-premerge"


def check_name(kind: Kind, run: str, name: str) -> None:
    """Raise `SettingsError` unless an identity of this kind can have this name: its rights would be another's."""
    token(name, "name of an identity")
    if kind != "operator" or run != EVERY_RUN:
        token(run, "run id")
    if kind == "learner" and _NOT_A_LEARNER.fullmatch(name):
        raise SettingsError(
            "no learner can have this name: it means others in the subjects of a run",
            got=name,
            allowed=f"a name other than all, bye, {EVALUATOR}, {SUM} and shard-<number>",
            todo="choose another name for the learner",
        )
    if kind == "premerger" and not is_region_name(premerged(name)):
        raise SettingsError(
            "the name of a premerger says whose sums it may send",
            got=name,
            allowed=f"REGION{_PREMERGER}, for example {premerger_of('eu')}; a region has {REGION_NAMES}",
            todo="name it after its region",
        )


def premerger_of(region: str) -> str:
    """Return the name of the identity of a region's synchronizer."""
    return f"{region}{_PREMERGER}"


def premerged(name: str) -> str:
    """Return the region whose synchronizer has an identity of this name, empty if it is no such name."""
    return name.removesuffix(_PREMERGER) if name.endswith(_PREMERGER) else ""


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
    """Return the rights of an isolated identity: a learner, a reader, an evaluator or a premerger; of a region at the hub."""
    if kind == "region":
        return _region(run, name, founds=founds)
    if kind == "learner":
        return _learner(run, name, founds=founds)
    if kind == "premerger":
        return _premerger(run, premerged(name))
    s = Subjects(run)
    return _reader(run, tuple(s.event(one, EVALUATOR) for one in kinds_of("evaluator")) if kind == "evaluator" else ())


def may_write(kind: Kind, run: str, name: str, subject: str, *, founds: bool = False) -> bool:
    """Return whether a message of this identity on `subject` is to be believed: what a reader asks of its signer."""
    return any(matches(pattern, subject) for pattern in _written_by(kind, run, name, founds=founds))


@lru_cache(maxsize=4096)
def _written_by(kind: Kind, run: str, name: str, *, founds: bool) -> tuple[str, ...]:
    if kind == "operator":
        return ("atoll.>",) if run == EVERY_RUN else ()
    s = Subjects(run)
    if kind == "region":
        return ()
    if kind == "synchronizer":
        return (f"{s.prefix}.>",)
    rights = rights_of(kind, run, name, founds=founds)
    answers = (s.answer,) if kind == "learner" else ()
    return (*rights.stores, *rights.tells, *rights.own, *answers)


def region_publishes(rights: Rights) -> tuple[str, ...]:
    """Return what a region with these rights may send over its link, in JetStream's words for who is behind a leaf."""
    return (*rights.stores, *rights.tells, *(far(subject) for subject in (*rights.asks, *rights.reads)))


def carried(rights: Rights, run: str, region: str, learners: Sequence[str], *, founds: bool = False) -> Rights:
    """Return what of a region's rights the hub takes: for these learners what they may write, and nothing for any other.

    Its account imports these subjects. Its link may still send on whole subtrees (`region_publishes`): permissions of a link
    stand until the leaf connects again, and imports follow the roll at once.
    """
    s = Subjects(run)
    evaluator, premerger = rights_of("evaluator", run, EVALUATOR), _premerger(run, region)
    own = (
        subject
        for one in learners
        for subject in (f"{s.prefix}.up.c.{one}.>", f"{s.prefix}.up.m.*.*.{one}", s.member(one), s.event("*", one))
    )
    return replace(
        rights,
        stores=(*evaluator.stores, *premerger.stores, s.data, *((f"{s.prefix}.gl.>",) if founds else ()), *own),
        tells=(*premerger.tells, s.region_answer(region, "*"), *(s.beat(one) for one in learners)),
    )


def region_hears(rights: Rights) -> tuple[str, ...]:
    """Return what the hub may send to a region with these rights over its link: what is heard there, and answers."""
    return (*rights.hears, "_R_.>", "$JSC.>")


def at_leaf(run: str, rights: Rights, domain: str) -> Rights:
    """Return the rights that an identity has at the leaf of a region, where the run's streams are behind `HUB_DOMAIN`.

    It may also read the mirror, leave in the outbox what it may send, and let the chunks of its contributions stay there.
    """
    s = Subjects(run)
    later = tuple(s.outbox(domain, subject) for subject in rights.stores if _may_wait(s, subject))
    stays = tuple(s.kept(domain, subject) for subject in rights.stores if _may_stay(s, subject))
    kept = (_stream(run, "GL"), f"atoll_{run}_OUT")

    def there(subject: str) -> str:
        # Messages only: who founds a run asks the hub for the stream itself.
        if subject.endswith(f".GET.{_stream(run, 'UPC')}"):
            return subject.replace(_stream(run, "UPC"), kept_plan(run, domain).name)
        return far(subject)

    return Rights(
        stores=(*rights.stores, *later, *stays),
        tells=rights.tells,
        asks=(
            *(there(subject) for subject in _without_names(run, rights.asks)),
            # Without this one, nats-server 2.15 answers the others with "JetStream not enabled for account".
            "$JS.API.INFO",
            *(f"$JS.API.STREAM.INFO.{stream}" for stream in kept),
            f"$JS.API.STREAM.MSG.GET.{kept[0]}",
            s.region(domain),
        ),
        reads=(*(there(subject) for subject in rights.reads), f"$JS.API.DIRECT.GET.{kept[0]}"),
        hears=rights.hears,
        own=rights.own,
    )


def far(subject: str) -> str:
    """Return a subject of JetStream's API as who is behind a leaf addresses the hub by it; others unchanged."""
    return subject.replace("$JS.API.", f"$JS.{HUB_DOMAIN}.API.", 1)


def _may_wait(s: Subjects, subject: str) -> bool:
    return subject.startswith((f"{s.prefix}.up.", f"{s.prefix}.ev."))


def _may_stay(s: Subjects, subject: str) -> bool:
    return subject.startswith(f"{s.prefix}.up.c.") and not subject.startswith(f"{s.prefix}.up.c.{SUM}.")


def _without_names(run: str, asks: tuple[str, ...]) -> tuple[str, ...]:
    """Return requests without the one that names the chunks which others are storing, unless they create that stream.

    A region may write for learners of which the roll does not say where they are. It may not know the nonce of a push.
    """
    create, names = (f"$JS.API.STREAM.{verb}.{_stream(run, 'UPC')}" for verb in ("CREATE", "INFO"))
    return asks if create in asks else tuple(subject for subject in asks if subject != names)


def synchronizer_publishes(run: str) -> tuple[str, ...]:
    """Return what a synchronizer of `run` may publish: the run's subjects, and JetStream's for the run's streams."""
    queue = _stream(run, "UPM")
    verbs = ("INFO", "CREATE", "UPDATE", "MSG.GET", "PURGE")
    return (
        f"{Subjects(run).prefix}.>",
        "$JS.API.INFO",
        *(f"$JS.API.STREAM.{verb}.{name}" for name in _streams(run) for verb in verbs),
        *(f"$JS.API.DIRECT.GET.{name}" for name in _streams(run)),
        f"$JS.API.CONSUMER.LIST.{queue}",
        *(f"$JS.API.CONSUMER.{verb}.{queue}.>" for verb in ("CREATE", "INFO", "DELETE", "MSG.NEXT")),
        f"$JS.API.CONSUMER.DURABLE.CREATE.{queue}.>",
        f"$JS.ACK.{queue}.>",
        # On a cluster it keeps the leaders together (`atoll.bus.nats.provision`).
        *(f"$JS.API.STREAM.LEADER.STEPDOWN.{name}" for name in _streams(run)),
        f"$JS.API.CONSUMER.LEADER.STEPDOWN.{queue}.>",
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
            *(s.event(kind, name) for kind in kinds_of("learner")),
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


def _region(run: str, name: str, *, founds: bool) -> Rights:
    """Return what all learners, readers and evaluators of a run and the premerger of region `name` may do together.

    It reads no contributions, which are at the leaf, and may copy the global stream. The hub tells a leaf of a subscription
    only if the leaf may send on all that it covers, so what streams keep is whole subtrees here.
    """
    learner, evaluator = _learner(run, "*", founds=founds), rights_of("evaluator", run, "*")
    premerger, stream, s = _premerger(run, name), _stream(run, "GL"), Subjects(run)
    kinds = ("UPC", "UPM", "MB", "EV", *(("GL",) if founds else ()))
    copying = (
        *(f"$JS.API.{call}" for call in (f"STREAM.INFO.{stream}", f"CONSUMER.CREATE.{stream}")),
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.FC.{stream}.>",
    )
    return Rights(
        stores=tuple(subject for plan in stream_plan(run) if plan.name.endswith(kinds) for subject in plan.subjects),
        tells=(*learner.tells, *premerger.tells, s.region_answer(name, "*")),
        asks=_without_names(run, tuple(dict.fromkeys((*learner.asks, *evaluator.asks, *copying)))),
        reads=tuple(dict.fromkeys((*learner.reads, *evaluator.reads))),
        hears=tuple(
            dict.fromkeys(
                (*learner.hears, *evaluator.hears, *premerger.hears, s.region_kept(name), f"{s.region_copy(name)}.>")
            )
        ),
    )


def _premerger(run: str, region: str) -> Rights:
    s, reads = Subjects(run), ("GL", "ST", "UPC")
    return Rights(
        stores=(f"{s.prefix}.up.c.{SUM}.*.{region}.>",),
        tells=(s.premerge_answer(region, "*"),),
        asks=("$JS.API.INFO", *(f"$JS.API.STREAM.MSG.GET.{_stream(run, one)}" for one in reads)),
        reads=tuple(f"$JS.API.DIRECT.GET.{_stream(run, one)}" for one in reads),
        hears=(s.premerge(region),),
    )


def _reader(run: str, writes: tuple[str, ...]) -> Rights:
    s = Subjects(run)
    kept = ("GL", "MB", "ST", "EV", "LV")
    return Rights(
        stores=writes,
        asks=(
            "$JS.API.INFO",
            *(f"$JS.API.STREAM.MSG.GET.{_stream(run, one)}" for one in kept),
            # How full each stream is (`atoll.bus.nats.administration`): numbers, and nothing of what they keep.
            *(f"$JS.API.STREAM.INFO.{stream}" for stream in _streams(run)),
        ),
        reads=tuple(f"$JS.API.DIRECT.GET.{_stream(run, one)}" for one in kept),
        hears=(s.tap(), s.beat("*"), s.presence("*"), s.call("*"), s.control(">")),
    )


def _streams(run: str) -> tuple[str, ...]:
    return tuple(plan.name for plan in (*stream_plan(run), live_plan(run)))


def _stream(run: str, kind: str) -> str:
    return next(name for name in _streams(run) if name.endswith(f"_{kind}"))
