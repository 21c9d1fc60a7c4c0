"""`reference/claims.md`: what every field that comes from outside a process is used for, checked against, and can cost.

The rule behind the table: **a claim may cost its claimant alone**. `ROOTS` are what travels or lies somewhere: messages,
records, events, ledgers and the archive. `fields_without_a_row` walks their schemas, so a new field has no row until somebody
has thought about it. Whoever may write a root follows from the rights of identities (`atoll.keys.rights`): what a lie may
cost the run stands only on subjects that no learner, reader, evaluator, region or premerger may write.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from atoll.archive.checkpoints import CheckpointObject, Manifest, Piece
from atoll.archive.rounds import Anchor, RetainedFold, RetainedRound
from atoll.client.driver import HeadTap
from atoll.keys.rights import ISOLATED, Kind, may_write, premerger_of
from atoll.keys.signatures import Voucher
from atoll.model.layout import FrozenLeaf, Layout, Slice, TensorSpec
from atoll.protocol.data import DataGrant, DataLedger, DataShare
from atoll.protocol.events import GraceWindow, Names, Opening, RoundReasons
from atoll.protocol.ledger import Account, FormerLives, FragmentLedger, LearnerReport, Ledger, SettledPushes
from atoll.protocol.quarantine import Measure
from atoll.protocol.settings import ProtocolSettings
from atoll.run.folder import SavedEvent
from atoll.wire import events
from atoll.wire import messages as wire
from atoll.wire.blobs import BlobRef
from atoll.wire.events import EVALUATOR, EventWriter
from atoll.wire.messages import RegionAnswer, RegionAsk, WeighedPush
from atoll.wire.subjects import Subjects
from atoll.wire.traffic import LinkTraffic

Schema = type[msgspec.Struct]


class Cost(enum.Enum):
    """Whom a lie in a field may cost something."""

    NOBODY = "nobody: no rule reads it"
    CLAIMANT = "its claimant"
    RUN = "the run, whose operator trusts the writer"
    OTHERS = "others"


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """One row: some fields of a struct, who uses them, against what they are verified, and whom a lie costs."""

    fields: tuple[str, ...]
    use: str
    verified: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class OutsideSchema:
    """Something that a process reads and did not write: its subject in a run of `subjects`, or where it lies."""

    schema: Schema
    subject: str
    where: str


def row(fields: str, use: str, verified: str, cost: Cost) -> ClaimRow:
    """Return a row of fields whose names stand in one text."""
    return ClaimRow(tuple(fields.split()), use, verified, cost)


def every(use: str, verified: str, cost: Cost) -> tuple[ClaimRow, ...]:
    """Return the one row of a struct whose fields are all alike; it names none."""
    return (ClaimRow((), use, verified, cost),)


S: Final = Subjects("run")
NAME: Final = "a"
WRITER_NAMES: Final[Mapping[EventWriter, str]] = {
    "learner": NAME,
    "synchronizer": NAME,
    "shard": "shard-0",
    "evaluator": EVALUATOR,
}
ROOTS: Final = (
    OutsideSchema(wire.RunRecord, S.run_record, "`gl.run`"),
    OutsideSchema(wire.Head, S.head(0), "`gl.head.<fragment>`"),
    OutsideSchema(wire.Lease, S.lease(0), "`gl.lease.<shard>`"),
    OutsideSchema(FragmentLedger, f"{S.ledger_stem(0, '1.a')}.0", "`st.b.<fragment>`"),
    OutsideSchema(wire.Contribution, S.contribution(0, 0, NAME), "`up.m.<shard>.<fragment>.<learner>`"),
    OutsideSchema(wire.Beat, S.beat(NAME), "`hb.<learner>`, `up.m.<shard>.bye.<learner>`"),
    OutsideSchema(wire.Member, S.member(NAME), "`mb.learner.<learner>`"),
    OutsideSchema(DataLedger, S.data, "`mb.data`"),
    OutsideSchema(wire.Call, S.call("0"), "`call.<fragment>`"),
    OutsideSchema(wire.Verdict, S.verdict(NAME), "`ctl.<learner>.verdict`"),
    OutsideSchema(wire.Control, S.control("all"), "`ctl.<who>`"),
    OutsideSchema(wire.StateOffer, "", "the answer to `ctl.<who>`"),
    OutsideSchema(wire.Presence, S.presence("h"), "`sy.<host>`"),
    OutsideSchema(RegionAsk, S.premerge("eu"), "`pm.<region>`"),
    OutsideSchema(RegionAnswer, S.premerge_answer("eu", "n"), "`pm.<region>.<nonce>`"),
    OutsideSchema(wire.Event, S.event("joined", NAME), "`ev.<kind>.<who>`"),
    *(
        OutsideSchema(schema, S.event(kind, writer), f"`ev.{kind}`")
        for kind, schema in events.EVENTS.items()
        for writer in (WRITER_NAMES[schema.writer],)
    ),
    OutsideSchema(HeadTap, S.tap("gl.head.0"), "`tap.gl.head.<fragment>`"),
    OutsideSchema(Manifest, "", "the archive"),
    OutsideSchema(RetainedRound, "", "the archive"),
    OutsideSchema(SavedEvent, "", "a file of events that a person names"),
    OutsideSchema(Voucher, "", "behind every signed message"),
)
"""Everything that is read and was written elsewhere."""

_KEY_ONLY = "only a synchronizer's key may write it; epochs and compare-and-set fence a former owner"
_FOUNDER = "only a founder's or synchronizer's key may write it; `RunRecord.fault` and the bounds of each setting"
_SHARD_ONLY = "only a synchronizer's key may write it, below `shard-<number>`"
_SHOWN = "its types and bounds; `event_of` refuses another's name and kind"
_TOTALS = f"{_SHOWN}; views and reports take what can be since the founding, and cut a farewell to that"
_SIZES = "the layout of the run record: sizes, slices and digest of what is read"

_ROWS: Final[Mapping[Schema, tuple[ClaimRow, ...]]] = {
    wire.RunRecord: (
        row("run nonce schema", "tells runs, foundings and wire versions apart", _FOUNDER, Cost.RUN),
        row("layout protocol seed frozen bulk data_blocks", "what all processes do", _FOUNDER, Cost.RUN),
        row("closing", "learners leave", _FOUNDER, Cost.RUN),
        row("founder founded_at_s model data rebuilt", "for people, and for the names of archives", _FOUNDER, Cost.RUN),
    ),
    Layout: (
        row(
            "tensors fragments direct by_value",
            "where each parameter travels",
            "`Layout.fault`; a joiner compares it with its own parameters",
            Cost.RUN,
        ),
    ),
    TensorSpec: (
        row(
            "name shape dtype", "where each parameter travels", "a joiner compares it with its own parameters", Cost.RUN
        ),
    ),
    Slice: (row("tensor start stop", "where each parameter travels", "`Layout.fault`", Cost.RUN),),
    FrozenLeaf: (
        row("name digest", "a joiner's frozen leaves are the founder's", "the joiner's own leaves", Cost.RUN),
    ),
    ProtocolSettings: (
        row(
            "outer",
            "what steps from a merged pseudo-gradient to new values",
            "a fixed list (`OUTERS`), whose one argument is `outer_lr`; other code runs only where the host's own "
            "`protocol.outer` names the same",
            Cost.RUN,
        ),
        row(
            " ".join(name for name in ProtocolSettings.__struct_fields__ if name != "outer"),
            "what all processes do",
            "`check`: the bounds of each",
            Cost.RUN,
        ),
    ),
    wire.Rebuilt: every("how far learners and readers go back after a rebuild", _FOUNDER, Cost.RUN),
    wire.Head: (
        row(
            "fragment version epoch nonce layout schema",
            "which version is visible",
            f"{_KEY_ONLY}; a head below what a process holds is refused",
            Cost.RUN,
        ),
        row(
            "keyframe key_version digest deltas state fragment_ledger",
            "where its values, state and ledger are",
            f"{_KEY_ONLY}; {_SIZES}",
            Cost.RUN,
        ),
        row(
            "included tokens_merged tokens_counted superseded cause_id",
            "for people, retention and garbage collection",
            _KEY_ONLY,
            Cost.RUN,
        ),
    ),
    wire.Delta: (row("version nonce chunks size_bytes digest", "where a delta is", _SIZES, Cost.RUN),),
    wire.Included: every("for people, replay and the report", _KEY_ONLY, Cost.RUN),
    BlobRef: (
        row(
            "stem chunks size_bytes digest",
            "where the bytes are",
            "the layout, before anything is read; the digest of what was read; a learner's stem is its own",
            Cost.CLAIMANT,
        ),
    ),
    wire.Contribution: (
        row(
            "learner incarnation fragment",
            "whose push it is",
            "the subject, which the broker lets its learner alone write; the member record",
            Cost.CLAIMANT,
        ),
        row("push", "its fate is kept once", "the fragment ledger; numbers of one incarnation only", Cost.CLAIMANT),
        row(
            "base_version",
            "its age, and so its weight",
            "the shard's own version: a later one is refused, an older one is late",
            Cost.CLAIMANT,
        ),
        row(
            "tokens steps",
            "its weight; what its merge counts towards the target",
            "the pace and the batch that the run allows, by the shard's clock; the others' tokens per step",
            Cost.CLAIMANT,
        ),
        row(
            "trained_tokens",
            "its account",
            "the pace and the batch that the run allows; it counts nothing towards the target",
            Cost.CLAIMANT,
        ),
        row("norms", "bounds while it is read", "the norms that the shard computes", Cost.CLAIMANT),
        row("layout run_nonce schema", "it fits this founding", "the run record", Cost.CLAIMANT),
        row(
            "blob frame",
            "its pseudo-gradient",
            "size, digest, finite values; its length by the others' and the parameter's own",
            Cost.CLAIMANT,
        ),
        row(
            "final",
            "nothing of it follows, and no round waits for more",
            "one for each incarnation and fragment, and nothing after it",
            Cost.CLAIMANT,
        ),
        row("loss cause_id sent_at_s notes", "for people", "its types and bounds", Cost.NOBODY),
    ),
    wire.PushNotes: every("for people", "its types and bounds", Cost.NOBODY),
    wire.Beat: (
        row(
            "learner incarnation run_nonce schema",
            "who is live",
            "the subject; the member record; the run record",
            Cost.CLAIMANT,
        ),
        row(
            "state",
            "whether rounds wait for it",
            "the shard's clock: who is silent is not waited for; a farewell ends its own life alone",
            Cost.CLAIMANT,
        ),
        row(
            "step step_s",
            "the pace of the run",
            "the shard's clock, from its member record on; the lower median over learners that contribute",
            Cost.CLAIMANT,
        ),
        row(
            "tokens pushed superseded refused_local",
            "its account",
            "the pace and the batch that the run allows, from its member record on; what shards merged and refused of it; "
            "a farewell is cut to that",
            Cost.CLAIMANT,
        ),
        row("run_tokens", "a reason to read the leases", "the leases", Cost.CLAIMANT),
        row("at_s", "for people", "it is at most the reader's time of its arrival", Cost.CLAIMANT),
        row("tokens_per_s loss overhead lag_versions moved", "for people", "its types and bounds", Cost.NOBODY),
    ),
    LinkTraffic: every("for people", "its types and bounds", Cost.NOBODY),
    wire.Member: (
        row(
            "learner incarnation nonce schema left",
            "which life of an id is the present one",
            "the subject; compare-and-set",
            Cost.CLAIMANT,
        ),
        row(
            "region",
            "who folds what it sends",
            "a region's synchronizer must answer; else the shard reads it itself",
            Cost.CLAIMANT,
        ),
        row("host pid claimed_at_s software", "for people", "its types and bounds", Cost.NOBODY),
    ),
    wire.Lease: (
        row("shard epoch nonce run_nonce epoch_max released to schema", "who owns a shard", _KEY_ONLY, Cost.RUN),
        row("ledger closed", "how far the run is, and that it is over", _KEY_ONLY, Cost.RUN),
        row("host pid", "for people", _KEY_ONLY, Cost.NOBODY),
    ),
    Ledger: every("how far the run is; fates", _KEY_ONLY, Cost.RUN),
    Account: every(
        "fates", "both sides of an account are kept by different processes; `settle` compares them", Cost.RUN
    ),
    FormerLives: every(
        "which lives have a fate, and the fates of all that are over",
        "the accounts that the shard itself has folded; each fragment's ledger has the part of its fragment",
        Cost.RUN,
    ),
    FragmentLedger: every(
        "which contributions have a fate, and the measures of the judge",
        f"{_KEY_ONLY}; the digest in the head",
        Cost.RUN,
    ),
    SettledPushes: every("which contributions have a fate", "the digest in the head", Cost.RUN),
    LearnerReport: every("fates", "the digest in the head", Cost.RUN),
    Measure: every("what is too long", "the digest in the head; the shard measured it itself", Cost.RUN),
    DataLedger: every(
        "who reads which blocks",
        "`DataLedger.fault`, `fault_at`; the blocks that the run record says; room left in every counter",
        Cost.OTHERS,
    ),
    DataGrant: every("who reads which blocks", "a holder that misses its unit trains on with another", Cost.OTHERS),
    DataShare: every("for people", "its types and bounds", Cost.NOBODY),
    wire.Call: (
        row(
            "fragment version attempt schema",
            "a learner answers",
            "the heads that the learner reads; looks in vain come ever more rarely",
            Cost.RUN,
        ),
        row("run_tokens", "the learning rate between two looks at the leases", "the leases", Cost.RUN),
    ),
    wire.Verdict: every("a learner counts a refusal, and says it", _KEY_ONLY, Cost.RUN),
    wire.Presence: (
        row(
            "name wants owns leaving schema",
            "which host hands a shard to which",
            f"{_KEY_ONLY}; the lease decides",
            Cost.RUN,
        ),
        row("host pid moved software", "for people", _KEY_ONLY, Cost.NOBODY),
    ),
    wire.Control: (
        row("verb sender schema", "a reason to read the run record, or to answer", "the run record", Cost.RUN),
    ),
    wire.StateOffer: (
        row(
            "learner incarnation run_nonce schema",
            "whose optimizer state it is",
            "the run record; only where the broker is open",
            Cost.RUN,
        ),
        row("steps tokens run_tokens", "how old it is", "its types and bounds", Cost.RUN),
        row(
            "blob", "a first optimizer state", "the borrower's own tree: names, shapes, dtypes, finite values", Cost.RUN
        ),
    ),
    wire.Event: (
        row(
            "kind who schema",
            "whose event it is",
            "the subject, which the broker lets its writer alone write",
            Cost.CLAIMANT,
        ),
        row(
            "at_s",
            "who was silent, what came first, how long it took",
            "the broker's time of storage: not later, and at most five seconds earlier",
            Cost.CLAIMANT,
        ),
        row("fields", "for people", "the schema of its kind", Cost.CLAIMANT),
    ),
    RegionAsk: every("what a region's synchronizer adds up", _KEY_ONLY, Cost.RUN),
    WeighedPush: every("what a region's synchronizer adds up", _KEY_ONLY, Cost.RUN),
    RegionAnswer: (
        row(
            "done reason missing schema",
            "whether the shard waits, and what it reads itself",
            "time: a region that does not answer is passed over",
            Cost.CLAIMANT,
        ),
        row(
            "norm blob lengths",
            "the sum of its region's learners",
            "size, digest, finite values and lengths of the sum; who is too long is read apart",
            Cost.CLAIMANT,
        ),
    ),
    events.RoundEvent: every("report, page, metrics", _SHARD_ONLY, Cost.RUN),
    events.Contributor: every("report, page, metrics", _SHARD_ONLY, Cost.RUN),
    RoundReasons: every("`atoll why`", _SHARD_ONLY, Cost.RUN),
    Opening: every("`atoll why`", _SHARD_ONLY, Cost.RUN),
    Names: every("`atoll why`", _SHARD_ONLY, Cost.RUN),
    GraceWindow: every("`atoll why`", _SHARD_ONLY, Cost.RUN),
    events.WaitingEvent: every("`atoll why`", _SHARD_ONLY, Cost.RUN),
    events.RefusedEvent: (row("refusals", "report, page, metrics", _SHARD_ONLY, Cost.RUN),),
    events.RefusedContribution: every("report, page, metrics", _SHARD_ONLY, Cost.RUN),
    events.JunkEvent: every("report, page, metrics", _SHARD_ONLY, Cost.RUN),
    events.FilledEvent: every("page, `why`", _SHARD_ONLY, Cost.RUN),
    events.QuarantinedEvent: every("status, page, `why`", _SHARD_ONLY, Cost.RUN),
    events.ServingEvent: every("story, page", _SHARD_ONLY, Cost.RUN),
    events.LedgerEvent: every("report, fates", _SHARD_ONLY, Cost.RUN),
    events.JoinedEvent: every("its own curve and lives", _SHOWN, Cost.CLAIMANT),
    events.RecoveredEvent: every("its own story", _SHOWN, Cost.CLAIMANT),
    events.LeftEvent: every("its own curve and sums", _TOTALS, Cost.CLAIMANT),
    events.MovedEvent: every("its own traffic", _SHOWN, Cost.CLAIMANT),
    events.HostedEvent: every("traffic and presence of a synchronizer; `why`", _KEY_ONLY, Cost.RUN),
    events.SampleEvent: every("its own curve and sums", _TOTALS, Cost.CLAIMANT),
    events.ValidationEvent: every(
        "the curve of the merged model", "only an evaluator's key may write it", Cost.CLAIMANT
    ),
    events.EvaluatedEvent: every("a person's own measures", "only an evaluator's key may write it", Cost.CLAIMANT),
    HeadTap: (row("fragment version", "a reason to read the head", "the head", Cost.RUN),),
    Manifest: every(
        "a run is rebuilt from it",
        "its seal: a digest, and where the run has identities the signature of a synchronizer; `oversized`",
        Cost.RUN,
    ),
    Piece: (
        row(
            "head frame state fragment_ledger",
            "a run is rebuilt from it",
            "the digests of what it names; the layout",
            Cost.RUN,
        ),
    ),
    CheckpointObject: (row("digest size_bytes", "where the bytes are", "size and digest of what was read", Cost.RUN),),
    RetainedRound: every("a round is made once more", "its seal; the digest of the values that it made", Cost.RUN),
    RetainedFold: every("a round is made once more", "the digest of the values that the round made", Cost.RUN),
    Anchor: (row("frame state", "a round is made once more", "their digests", Cost.RUN),),
    SavedEvent: (row("subject event", "a saved run is told", "`event_of` and the schema of its kind", Cost.CLAIMANT),),
    Voucher: every("who signed a message", "the signature of the operator's root key", Cost.CLAIMANT),
}
CLAIMS: Final[Mapping[Schema, tuple[ClaimRow, ...]]] = {
    schema: tuple(claim if claim.fields else replace(claim, fields=schema.__struct_fields__) for claim in claims)
    for schema, claims in _ROWS.items()
}
"""Every field of every root, and of what is inside."""

KNOWN: Final = {DataLedger, DataGrant}
"""Where a lie does cost others, said on the page and in `docs/explanation/locked-door.md`: all learners write the one record
of data leases."""


def schemas_of(kind: Any) -> Iterator[Schema]:  # noqa: ANN401  (any node of msgspec.inspect)
    """Yield a struct and every struct inside it, from msgspec's description of its type."""
    pending, seen = [msgspec.inspect.type_info(kind)], set[Schema]()
    while pending:
        node = pending.pop()
        if isinstance(node, msgspec.inspect.StructType):
            if node.cls in seen:
                continue
            seen.add(node.cls)
            yield node.cls
            pending += [each.type for each in node.fields]
        pending += [getattr(node, name) for name in ("item_type", "key_type", "value_type") if hasattr(node, name)]
        pending += [each for name in ("types", "item_types") for each in getattr(node, name, None) or ()]


def fields_without_a_row(roots: tuple[OutsideSchema, ...] = ROOTS) -> list[str]:
    """Return the fields that travel and have no row, the rows of fields that there are not, and fields with two rows."""
    reached = {schema for root in roots for schema in schemas_of(root.schema)}
    faults = [f"{schema.__name__} does not travel" for schema in CLAIMS if schema not in reached]
    for schema in reached:
        named = [name for claim in CLAIMS.get(schema, ()) for name in claim.fields]
        faults += [f"{schema.__name__}.{name} has no row" for name in schema.__struct_fields__ if name not in named]
        faults += [f"{schema.__name__}.{name} is no field" for name in named if name not in schema.__struct_fields__]
        faults += [f"{schema.__name__}.{name} has two rows" for name in set(named) if named.count(name) > 1]
    return sorted(faults)


def writers_of(root: OutsideSchema) -> list[Kind]:
    """Return the kinds of participants that a run with strangers may have and that may write a root on its subject."""
    names: dict[Kind, str] = dict.fromkeys((*ISOLATED, "region"), NAME) | {
        "premerger": premerger_of("eu"),
        "region": "eu",
    }
    return [kind for kind, name in names.items() if root.subject and may_write(kind, "run", name, root.subject)]


def costs_to_others(roots: tuple[OutsideSchema, ...] = ROOTS) -> list[str]:
    """Return the fields in which somebody who is not trusted with the run may lie at the cost of others."""
    open_to_strangers = {
        schema: root for root in roots if writers_of(root) for schema in schemas_of(root.schema) if schema not in KNOWN
    }
    return sorted(
        f"{root.where}: {schema.__name__}.{name}"
        for schema, root in open_to_strangers.items()
        for claim in CLAIMS.get(schema, ())
        if claim.cost in (Cost.RUN, Cost.OTHERS)
        for name in claim.fields
    )


def page() -> str:
    """Return the page: one table for each struct, roots first."""
    parts = ["# Claims", INTRODUCTION]
    roots = {root.schema: root for root in ROOTS}
    for schema, claims in CLAIMS.items():
        root = roots.get(schema)
        parts.append(f"## {schema.__name__}")
        if root is not None:
            writers = writers_of(root)
            who = (
                f"besides a synchronizer a {' or a '.join(writers)} may write it"
                if writers
                else "no learner, reader, evaluator, region or premerger may write it"
            )
            parts.append(f"{root.where[:1].upper()}{root.where[1:]}" + (f"; {who}." if root.subject else "."))
        rows = [
            f"| {', '.join(f'`{name}`' for name in claim.fields)} | {claim.use} | {claim.verified} | {claim.cost.value} |"
            for claim in claims
        ]
        parts.append("\n".join(["| field | used for | verified against | a lie costs |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """\
What comes from outside a process is a claim, and **a claim may cost its claimant alone**. Each field of each message,
record, event, ledger and archive has a row here, from the table in the code; a new field without a row fails the tests, and
so does one in which a learner, a reader, an evaluator, a region or a premerger may lie at the cost of others. One exception
is known: all learners write the record of data leases, so one of them can have blocks read twice, or by nobody. Who may
write what holds behind a [locked door](../explanation/locked-door.md); an open broker believes everybody who reaches it."""
