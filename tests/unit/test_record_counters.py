"""Numbers in records that their readers count on from: a value that is taken has a successor, and others are no record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import msgspec.inspect
import pytest

from atoll.archive.checkpoints import Part, due_number
from atoll.base.errors import PeerMisbehaved, ProtocolMisuse
from atoll.base.quantities import COUNT_MAX, COUNTED_SHARE
from atoll.protocol.data import DataGrant, DataLedger
from atoll.wire.messages import RECORDS, Head, Lease, Member, decode, encode
from support.founded_run import run_record

GOLDEN: Final = json.loads((Path(__file__).parents[1] / "golden" / "messages.json").read_text(encoding="utf-8"))
NUMBERS: Final = (
    *("epoch", "version", "incarnation", "renewals", "attempt", "push", "generation", "revision", "checkpoint"),
)
"""Words in the names of fields that count something up."""
NOT_COUNTED_FROM: Final = {
    ("Delta", "version"): "what a head names is read, never continued",
    ("Head", "key_version"): "the same",
    ("Included", "incarnation"): "whose contribution it was",
    ("Included", "push"): "which contribution it was",
    ("Included", "base_version"): "what it was made from",
    ("DataGrant", "epoch"): "the ledger's own epoch is counted, and a unit is of none above it",
    ("DataGrant", "incarnation"): "whose unit it is; a member record says which is next",
    ("DataShare", "epoch"): "which epoch is summed up",
    ("ProtocolSettings", "keyframe_versions"): "a setting",
    ("ProtocolSettings", "average_versions"): "a setting",
    ("Rebuilt", "checkpoint"): "from which checkpoint a run was rebuilt",
    ("Rebuilt", "generation"): "saturates",
    ("Account", "pushed"): "a sum of tokens, which saturates",
    ("Rebuilt", "checkpoint_at_s"): "a moment",
    ("Rebuilt", "versions"): "a sum for people",
}


def structs_in(kind: Any) -> Iterator[msgspec.inspect.StructType]:  # noqa: ANN401  (a type as msgspec sees it)
    if isinstance(kind, msgspec.inspect.StructType):
        yield kind
        for field in kind.fields:
            yield from structs_in(field.type)
    for name in ("type", "item_type", "value_type"):
        if hasattr(kind, name):
            yield from structs_in(getattr(kind, name))
    for each in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
        yield from structs_in(each)


def is_counted(field: msgspec.inspect.Field) -> bool:
    return isinstance(field.type, msgspec.inspect.Metadata) and bool((field.type.extra or {}).get("counted"))


def test_every_number_of_a_record_that_may_be_counted_up_is_marked_or_has_a_reason() -> None:
    undecided = {
        (struct.cls.__name__, field.name)
        for record in RECORDS
        for struct in structs_in(msgspec.inspect.type_info(record))
        for field in struct.fields
        if any(word in field.name for word in NUMBERS) and not is_counted(field)
    } - NOT_COUNTED_FROM.keys()

    assert undecided == set()


LEDGER: Final = DataLedger(
    blocks=8, epoch=3, next_position=4, grants=(DataGrant(epoch=3, start=0, stop=4, learner="a", incarnation=1),)
)
EXAMPLES: Final[tuple[msgspec.Struct, ...]] = (
    decode(Head, GOLDEN["Head"].encode()),
    decode(Member, GOLDEN["Member"].encode()),
    decode(Lease, GOLDEN["Lease"].encode()),
    LEDGER,
    LEDGER.grants[0],
)
COUNTERS: Final = [
    (example, field.name, field.type.type.le)
    for example in EXAMPLES
    for field in msgspec.inspect.type_info(type(example)).fields  # type: ignore[attr-defined]
    if is_counted(field)
]


@pytest.mark.parametrize(
    ("example", "name", "bound"), COUNTERS, ids=lambda value: getattr(value, "__name__", str(value))[:24]
)
def test_a_counter_that_is_read_can_be_counted_on_and_a_larger_one_is_no_record(
    example: msgspec.Struct, name: str, bound: int
) -> None:
    last = bound // COUNTED_SHARE

    def written(number: int) -> tuple[type[msgspec.Struct], bytes]:
        changed = msgspec.structs.replace(example, **{name: number})
        record = (
            msgspec.structs.replace(LEDGER, epoch=3, grants=(changed,)) if isinstance(changed, DataGrant) else changed
        )
        return type(record), encode(record)

    kind, data = written(last)
    assert decode(kind, data)
    kind, data = written(last + 1)
    with pytest.raises(PeerMisbehaved, match="after which there is none"):
        decode(kind, data)
    with pytest.raises(ProtocolMisuse):
        written(bound + 1)


def test_the_number_of_a_checkpoint_is_not_counted_on_from_one_that_cannot_be() -> None:
    """The name of an object in an archive says it, and anybody with the archive's key may write one."""
    run = run_record("r")
    origin = f"{int(run.founded_at_s * 1000):014d}-0000-{run.nonce}"

    def part(number: int) -> Part:
        return Part(origin, number, 0, 1, 1, final=False, opened=False, path="p")

    now_s, every_s = run.founded_at_s + 100.0, 10
    assert due_number(run, 0, [part(500)], now_s, every_s) == 510
    assert due_number(run, 0, [part(COUNT_MAX)], now_s, every_s) == due_number(run, 0, [], now_s, every_s)
    last = due_number(run, 0, [part(COUNT_MAX // COUNTED_SHARE)], now_s, every_s)
    assert last <= COUNT_MAX
