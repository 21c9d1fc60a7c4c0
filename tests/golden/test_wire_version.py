"""The bytes of messages, as they were written when each was young: today's code reads and writes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import PeerMisbehaved
from atoll.protocol.data import DataLedger
from atoll.wire import messages
from atoll.wire.messages import SCHEMA_NEWEST, RunRecord, decode, encode, oldest_of

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "messages.json").read_text(encoding="utf-8"))
"""Each message, by its name."""


def kind_of(name: str) -> Any:  # noqa: ANN401  (a class of messages)
    return getattr(messages, name.partition(" ")[0], DataLedger)


@pytest.mark.parametrize("schema", [SCHEMA_NEWEST, SCHEMA_NEWEST + 1])
def test_a_release_speaks_the_version_of_the_release_before_it(monkeypatch: pytest.MonkeyPatch, schema: int) -> None:
    """A run keeps the version of its founding, also in the hands of a process that could found a newer one."""
    monkeypatch.setattr(messages, "SCHEMA_NEWEST", SCHEMA_NEWEST + 1)
    founded = GOLDEN["RunRecord"].replace(f'"schema":{SCHEMA_NEWEST}', f'"schema":{schema}')
    record = decode(RunRecord, founded.encode())

    assert record.schema == schema
    assert decode(RunRecord, encode(record)) == record


def only_known(written: Any, known: Any) -> Any:  # noqa: ANN401  (any JSON)
    """Return what was written without the fields of later releases, wherever they stand."""
    if not isinstance(known, dict):
        return written
    return {name: only_known(written[name], value) for name, value in known.items()}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_message_is_read_and_written_as_it_was(name: str) -> None:
    """What was there stays, byte for byte; a field of a later release may stand beside it, also among a run's settings."""
    written = json.loads(encode(decode(kind_of(name), GOLDEN[name].encode())))
    known = json.loads(GOLDEN[name])
    assert json.dumps(only_known(written, known)) == json.dumps(known)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_field_that_is_new_is_passed_over(name: str) -> None:
    later = json.dumps({**json.loads(GOLDEN[name]), "told_by_a_later_release": [1, 2]}).encode()
    assert decode(kind_of(name), later) == decode(kind_of(name), GOLDEN[name].encode())


@pytest.mark.parametrize("todo", ["upgrade this process", "upgrade who wrote it"])
@pytest.mark.parametrize("name", [name for name, text in GOLDEN.items() if "schema" in json.loads(text)])
def test_another_version_is_refused_by_number(name: str, todo: str) -> None:
    schema = SCHEMA_NEWEST + 1 if todo == "upgrade this process" else oldest_of(kind_of(name).__name__) - 1
    told = json.dumps({**json.loads(GOLDEN[name]), "schema": schema}).encode()
    with pytest.raises(
        PeerMisbehaved, match=f"a {kind_of(name).__name__} of a wire version that this Atoll does not speak"
    ) as refused:
        decode(kind_of(name), told)
    assert todo in str(refused.value)
    assert str(schema) in str(refused.value)
