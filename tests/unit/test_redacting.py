"""No message shows a password that stands in a URL, and the parts of an error survive being shown."""

from __future__ import annotations

import json

import pytest

from atoll.base.errors import SettingsError, parts_of
from atoll.base.wording import redact, redact_json


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
    """Of each one; a password may hold a slash."""
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
