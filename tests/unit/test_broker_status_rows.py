"""What is made of the answers of nodes: rolls told apart, nodes without a route named, and nonsense passed over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.bus.interface import NodeStatus
from atoll.bus.nats.administration import parse_node_status
from atoll.cli.broker import rows_of
from atoll.keys.roll import KeyEntry, Roll, RollEntry, RollStamp, read_tags, stamp_of, stamp_tags

KEY = "U" + "A" * 55
OLD, NEW = RollStamp(100, "0" * 8), RollStamp(200, "1" * 8)


def node(name: str, *peers: str, roll: RollStamp | None = NEW) -> NodeStatus:
    worn_tags = () if roll is None else (f"roll:{roll.changed_s}-{roll.digest}", "atoll:1.2.3")
    return NodeStatus(name, "2.15.1", worn_tags, peers, 3, 60.0)


def faults(*nodes: NodeStatus, greeted: dict[str, str] | None = None, ours: RollStamp | None = None) -> dict[str, Any]:
    found = rows_of({} if greeted is None else greeted, nodes, ours)
    return {row.node or row.address: list(row.faults) for row in found if row.faults}


def test_nodes_that_agree_have_no_faults() -> None:
    assert faults(node("a", "b"), node("b", "a"), greeted={"h:1": "a", "h:2": "b"}) == {}
    assert faults(node("a")) == {}
    (row,) = rows_of({"h:1": "a"}, [node("a")])
    assert (row.address, row.atoll, row.roll_changed_s, row.roll_digest) == ("h:1", "1.2.3", 200, "1" * 8)


def test_the_roll_that_was_changed_last_is_the_newest() -> None:
    assert faults(node("a", "b", roll=OLD), node("b", "a")) == {"a": ["old roll"]}
    assert faults(node("a"), ours=RollStamp(300, "2" * 8)) == {"a": ["old roll"]}
    assert faults(node("a"), ours=OLD) == {}
    assert "does not say which roll" in faults(node("a", roll=None))["a"][0]


def test_nodes_that_are_not_connected_are_named() -> None:
    """One that the others lack, one that only its address shows, one that is named and silent, and an address of nobody."""
    found = faults(node("a", "b", "d"), node("b", "a"), greeted={"h:1": "a", "h:2": "b", "h:3": "c", "h:4": ""})

    assert found == {
        "a": ["no route to c"],
        "b": ["no route to c", "no route to d"],
        "c": ["it runs, and the others do not hear it"],
        "d": ["it does not answer"],
        "h:4": ["nobody answers here"],
    }


def entry(name: str, made_at_s: float, **more: Any) -> RollEntry:  # noqa: ANN401  (as `RollEntry`)
    return RollEntry(name, "learner", "r", (KeyEntry(KEY, made_at_s),), **more)


def test_a_stamp_changes_with_the_roll_and_is_read_tags() -> None:
    rolls = [
        Roll(),
        Roll((entry("ada", 5.0),)),
        Roll((entry("ada", 5.0, founds=True),)),
        Roll((entry("ada", 5.0, revoked_at_s=9.0),)),
        Roll((entry("ada", 5.0), entry("bob", 7.0))),
    ]
    stamps = [stamp_of(roll) for roll in rolls]

    assert [stamp.changed_s for stamp in stamps] == [0, 5, 5, 9, 7]
    assert len({stamp.digest for stamp in stamps}) == len(rolls)
    assert stamp_of(Roll((entry("ada", 5.0),))) == stamps[1]
    for stamp in stamps:
        line = stamp_tags(stamp, "0.2.0rc1")
        assert read_tags(json.loads(line.removeprefix("server_tags: "))) == (stamp, "0.2.0rc1")
    assert read_tags(["roll:x", "atoll:", "gpu"]) == (None, "")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"server": 3}', b'{"server": {"name": 4}}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_answer_is_passed_over(data: bytes) -> None:
    assert parse_node_status(data) is None


def test_an_answer_with_odd_fields_is_taken_as_far_as_it_goes() -> None:
    answer = {"server": {"name": "a", "tags": 7, "time": "x"}, "statsz": {"routes": "x", "connections": "many"}}
    assert parse_node_status(json.dumps(answer).encode()) == NodeStatus("a", "", (), (), 0, 0.0)
    full = {
        "server": {"name": "a", "ver": "2.15.1", "tags": ["t"], "time": "2026-11-25T13:00:10.123456789Z"},
        "statsz": {
            "start": "2026-11-25T13:00:00.123456789Z",
            "connections": 2,
            "routes": [{"name": "b"}, {"name": "b"}],
        },
    }
    assert parse_node_status(json.dumps(full).encode()) == NodeStatus("a", "2.15.1", ("t",), ("b",), 2, 10.0)
