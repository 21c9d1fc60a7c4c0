"""JSON and TOML become typed values, in any number of threads, or one kind of error."""

from __future__ import annotations

import subprocess
import sys
import unicodedata

import msgspec
import pytest

from atoll.base.parsing import DEPTH_MAX, convert, parsed, parsed_toml
from atoll.base.quantities import Text
from atoll.wire.messages import encode
from support.founded_run import run_record

DEADLINE_S = 120.0
PROCESSES = 4
"""Without the lock about two in five end by a segmentation fault."""
MEET_AT_ONCE = """
import sys, threading
from atoll.wire.messages import RunRecord, decode
data = sys.stdin.buffer.read()
sys.setswitchinterval(1e-6)
gate = threading.Barrier(8)

def meet():
    gate.wait()
    assert decode(RunRecord, data).run == "demo"

threads = [threading.Thread(target=meet) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


UNSEEN = ("Cc", "Cf", "Zl", "Zp")
"""Control and format characters (zero-width ones, byte order marks, turns of direction, tags), ends of lines."""


def test_a_text_holds_nothing_that_nobody_sees() -> None:
    unseen = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in UNSEEN]

    for one in unseen:
        for text in (one, f"a{one}", f"{one}b", f"a{one}b"):
            with pytest.raises(msgspec.ValidationError):
                convert(text, Text)


def test_a_text_may_be_of_any_script() -> None:
    for text in (
        *("", "block_0/attention.wq", "Größe 3 µs", "e\u0301", "שלום", "سلام", "模型 一", "नमस्ते", "🚀", "a\u00a0b"),
    ):
        assert convert(text, Text) == text


def test_threads_may_meet_a_type_at_once() -> None:
    data = encode(run_record("demo"))
    for _ in range(PROCESSES):
        done = subprocess.run(
            [sys.executable, "-c", MEET_AT_ONCE], input=data, capture_output=True, timeout=DEADLINE_S, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_what_is_no_json_is_one_kind_of_error() -> None:
    for data, kind in ((b'"\xff"', str), (b"[" * 100_000, list), (b"{}", int)):
        with pytest.raises(msgspec.MsgspecError):
            parsed(data, kind)
    with pytest.raises(msgspec.ValidationError):
        convert({}, int)


@pytest.mark.parametrize(
    "text",
    [
        "a = ",
        f"a = {'9' * 5000}",
        f"a = {'[' * 5000}{']' * 5000}",
        f"{'a.' * 1500}a = 1",
        f"{'a.' * DEPTH_MAX}a = 1",
        f"a = {'[' * DEPTH_MAX}{']' * DEPTH_MAX}",
    ],
    ids=["no TOML", "digits", "lists", "dotted keys", "one table too many", "one list too many"],
)
def test_what_cannot_be_held_is_a_value_error(text: str) -> None:
    """A recursion without end would be a traceback for a slip of the pen."""
    with pytest.raises(ValueError, match=r"."):
        parsed_toml(text)


def test_what_people_write_is_read() -> None:
    assert parsed_toml("[[a.b]]\nc = [1, [2]]\n") == {"a": {"b": [{"c": [1, [2]]}]}}
    assert parsed_toml(f"{'a.' * (DEPTH_MAX - 1)}a = 1")
