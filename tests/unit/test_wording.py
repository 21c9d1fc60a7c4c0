"""Numbers with their nouns, lists cut short, and no password in any message."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from atoll.base.errors import SettingsError, parts_of, redact, redact_json
from atoll.base.wording import counted, few
from atoll.protocol.events import NAMED_MAX, Names
from atoll.run.decisions import list_names


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nats://user:SECRET@host:4222", "nats://***@host:4222"),
        ("nats://user:SEC/RET@host:99999999", "nats://***@host:99999999"),
        ("tls://a:SECRET@one:1,tls://b:SECRET@two:2", "tls://***@one:1,tls://***@two:2"),
        ("nats://one:1,nats://u:SECRET@two:2", "nats://one:1,nats://***@two:2"),
        ("nats://u:SEC@RET@host", "nats://***@host"),
        ("nats://host:4222", "nats://host:4222"),
        ("u:SEC/RET@host:4222", "***@host:4222"),
        ("no address: 'u:SECRET@host', or u:SECRET@host", "no address: '***@host', or ***@host"),
        ("at 12:30 nobody, s3://b/x, a: b", "at 12:30 nobody, s3://b/x, a: b"),
        (("nats://one:1", "nats://u:SECRET@two:2"), ("nats://one:1", "nats://***@two:2")),
        ("['nats://one:1','nats://u:SECRET@two:2']", "['nats://one:1','nats://***@two:2']"),
        ("write to a@b.c", "write to a@b.c"),
        (7, 7),
    ],
)
def test_the_user_part_of_a_url_is_struck_out(text: object, shown: object) -> None:
    assert redact(text) == shown


def test_a_long_text_is_gone_through_once() -> None:
    """A peer's name may be all slashes: with a look back from each, this would take an hour."""
    assert redact("//" * 200_000) == "//" * 200_000
    assert redact("a:" * 200_000) == "a:" * 200_000
    assert redact("//a" * 200_000 + "@") == "//***@"


def test_a_dump_shows_no_password_and_stays_json() -> None:
    told = {"reason": 'nats://u:SEC"RET@host is away', "who": "a@b"}

    assert json.loads(redact_json(json.dumps(told).encode())) == told | {"reason": "nats://***@host is away"}


def test_an_error_shows_no_password_whoever_raised_it() -> None:
    error = SettingsError(
        "no address", got="nats://u:SECRET@h", allowed="nats://u:SECRET@h", todo="see nats://u:SECRET@h"
    )

    assert "SECRET" not in f"{error} {error.parts()}"


def test_the_parts_of_an_error_are_read_back_from_its_text() -> None:
    error = SettingsError("wrong\nin two lines", got="this", todo="that\nand that")

    assert parts_of(f"atoll: {error}") == error.parts()
    assert parts_of("Traceback\n  line") == {"what": "Traceback\n  line"}
    assert parts_of("") == {"what": ""}


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds"), (1_234_567, "1,234,567 rounds")]
)
def test_only_one_is_one(number: int, told: str) -> None:
    assert counted(number, "round") == told


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (["a", "b", "c"], "a, b and 1 more"),
        (map(str, range(2000)), "0, 1 and 1,998 more"),
    ],
)
def test_a_long_list_is_cut_and_what_is_left_out_is_counted(names: Iterable[str], told: str) -> None:
    assert few(names, 2) == told


def test_a_list_that_was_cut_before_says_how_many_there_were() -> None:
    assert few(["a", "b"], 2, of=7) == "a, b and 5 more"
    assert few(["a", "b"], 2, of=2) == "a, b"
    assert list_names(Names.of(map(str, range(NAMED_MAX + 3)))).endswith(" and 3 more")
    assert not list_names(Names.of([]))
