"""Errors: the tree, what a message says, the extra that is named, and how a script ends that catches none."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from atoll.base import errors, extras
from atoll.base.errors import AtollError, BusError, EnvironmentFault, ProtocolMisuse, UserError
from atoll.base.exits import run_guarded

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AtollError)]


def test_message_has_one_line_per_known_part() -> None:
    error = AtollError("quorum is out of range", got=3, allowed="1..2", todo="lower it")

    assert str(error).splitlines() == [
        "quorum is out of range",
        "  got:     3",
        "  allowed: 1..2",
        "  to do:   lower it",
    ]


@pytest.mark.parametrize("got", [0, "", False, 0.0])
def test_falsy_values_are_shown(got: object) -> None:
    assert f"got:     {got}" in str(AtollError("wrong", got=got))


def test_exit_codes_tell_person_machine_and_bug_apart() -> None:
    """2 for what the person can change, 3 for the machine or network, 1 for the rest; inherited by every kind."""
    expected = {
        kind: 2 if issubclass(kind, UserError) else 3 if issubclass(kind, EnvironmentFault) else 1 for kind in ALL
    }

    assert {kind: kind.exit_code for kind in ALL} == expected


def test_branches_do_not_overlap() -> None:
    """Catching what the bus answers never swallows a bug of ours or a user's mistake."""
    for kind in (UserError, EnvironmentFault, ProtocolMisuse):
        assert not issubclass(kind, BusError)
        assert not issubclass(BusError, kind)


PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def asking(package: str, name: str) -> ModuleNotFoundError:
    try:
        exec(f"raise ModuleNotFoundError(name={package!r})", {"__name__": name})  # noqa: S102  (a frame of another module)
    except ModuleNotFoundError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("package", "asked_by", "extra"),
    [
        ("jax.numpy", "atoll.client.join", "island"),
        ("jax", "atoll_learner.train", "learner"),
        ("jax", "atoll_simulator.learner", "simulator"),
        ("orbax.checkpoint", "atoll_learner.checkpoints", "learner"),
        ("optax", "atoll.merge.outer", "learner"),
        ("tokenizers", "atoll_learner.data.tokenizer", "bpe"),
        ("pyarrow", "atoll_learner.data.sources", "parquet"),
        ("numba", "atoll.codec.kernels.compiled", "synchronizer"),
        ("uvicorn", "atoll_monitor.http_server", "monitor"),
        ("opentelemetry.sdk", "atoll_monitor.traces", "traces"),
    ],
)
def test_the_smallest_extra_is_named(package: str, asked_by: str, extra: str) -> None:
    told = extras.missing_extra(asking(package, asked_by))

    assert told is not None
    assert told.todo == f"pip install 'atoll[{extra}]'"
    assert package.partition(".")[0] in told.what
    assert extra in tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def test_what_no_extra_brings_stays_an_error_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """A package that nobody declared is a bug: it shows its traceback. One of an extra is told, and ends with 2."""
    with pytest.raises(ModuleNotFoundError):
        run_guarded(lambda: __import__("no_such_package_of_anybody"))

    def needs() -> None:
        raise asking("pyarrow", "atoll_learner.data.sources")

    with pytest.raises(SystemExit) as left:
        run_guarded(needs)
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].strip() == "to do:   pip install 'atoll[parquet]'"


DEADLINE_S = 240.0


def ends(program: str, **environment: str) -> tuple[int, str]:
    """Run a script and return its exit code and what it wrote to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stderr


WRONG = "from atoll.base.errors import *; raise "


def test_a_mistake_ends_a_script_with_its_message() -> None:
    code, said = ends("import atoll; atoll.join(3, run='r', learner='a', params={})")

    assert code == 1
    assert said.splitlines() == [
        "atoll: broker has a wrong type",
        "  got:     broker = '3' (int)",
        "  allowed: the broker's URL, or a coroutine function that opens a bus",
        "  to do:   correct broker",
    ]


def test_in_a_thread_the_message_names_the_thread() -> None:
    code, said = ends(
        "import atoll, threading\ndef work():\n    raise atoll.SettingsError('wrong', todo='mend it')\n"
        "threading.Thread(target=work, name='worker').start()"
    )

    assert code == 0
    assert said.splitlines() == ["atoll: wrong", "  to do:   mend it", "  in:      thread worker"]


def test_control_characters_are_written_out() -> None:
    program = "atoll.SettingsError('no such leaf', got='\\x1b[2Jw\\r\\x9b1m\\u202e\\tä')"
    told = ["atoll: no such leaf", r"  got:     \x1b[2Jw\r\x9b1m\u202e\tä"]

    assert ends(f"import atoll; raise {program}")[1].splitlines() == told
    guarded = (
        f"import atoll\nfrom atoll.base.exits import run_guarded\ndef call():\n    raise {program}\nrun_guarded(call)"
    )
    assert ends(guarded)[1].splitlines() == told


def test_a_group_of_our_errors_is_told_as_its_messages() -> None:
    """As a task group raises them; one with an error of somebody else shows its traceback."""
    inner = "ExceptionGroup('inside', [StorageFull('full', todo='make room')])"
    code, said = ends(f"{WRONG}ExceptionGroup('two', [SettingsError('wrong'), {inner}])")

    assert (code, said.splitlines()) == (1, ["atoll: wrong", "atoll: full", "  to do:   make room"])
    for other in ("ValueError('theirs')", "ProtocolMisuse('ours')"):
        assert "Traceback" in ends(f"{WRONG}ExceptionGroup('two', [SettingsError('wrong'), {other}])")[1]


@pytest.mark.parametrize(
    ("program", "environment"),
    [
        ("import atoll; raise ValueError('theirs')", {}),
        (f"{WRONG}ProtocolMisuse('a bug of ours')", {}),
        (f"{WRONG}SettingsError('asked for')", {"ATOLL_TRACEBACK": "1"}),
        ("import atoll, threading\nthreading.Thread(target=lambda: 1 / 0).start()", {}),
    ],
)
def test_everything_else_shows_its_traceback(program: str, environment: dict[str, str]) -> None:
    assert "Traceback (most recent call last)" in ends(program, **environment)[1]


def test_a_hook_that_a_program_has_set_before_stays() -> None:
    before = (
        "import sys, threading\nsys.excepthook = threading.excepthook = lambda *a: print('mine', file=sys.stderr)\n"
    )
    after = (
        "import atoll, sys\nformer = sys.excepthook\n"
        "sys.excepthook = lambda *a: (print('mine', file=sys.stderr), former(*a))\n"
    )
    error = "raise atoll.SettingsError('wrong')"

    assert ends(f"{before}import atoll\n{error}")[1].splitlines() == ["mine"]
    assert ends(f"{after}{error}")[1].splitlines() == ["mine", "atoll: wrong"]


def test_importing_atoll_loads_next_to_nothing() -> None:
    code, said = ends(
        "import sys, atoll; sys.exit(str({'numpy', 'structlog', 'jax', 'msgspec', 'asyncio'} & set(sys.modules) or ''))"
    )

    assert (code, said.strip()) == (1, "")


@pytest.mark.parametrize(
    ("error", "code", "what"),
    [("SettingsError('wrong', todo='mend it')", 2, "wrong"), ("ValueError('a bug')", 1, "a bug")],
)
def test_a_program_that_is_to_log_json_ends_in_json(error: str, code: int, what: str) -> None:
    """Also before it has a log: the last word is one line, a bug's traceback is a field of it."""
    program = (
        f"from atoll.base.errors import *\nfrom atoll.base.exits import run_guarded\ndef call():\n    raise {error}\n"
    )
    left, said = ends(f"{program}run_guarded(call)", ATOLL_LOG__FORMAT="json")
    told = json.loads(said)

    assert (left, told["event"], told["what"], told["exit_code"]) == (code, "process.failed", what, code)
    assert ("Traceback" in told.get("exception", "")) == (code == 1)


PROGRAM = """
import atexit, sys, threading, time
from atoll.base.exits import end_as_python_does, run_guarded, run_program

class Kept:
    def __del__(self):
        sys.stderr.write("collected ")

kept = Kept()

def work():
    time.sleep(0.05)
    sys.stderr.write("thread ")

def call():
    atexit.register(sys.stderr.write, "handler ")
    threading.Thread(target=work).start()
    sys.stderr.write("call ")
    END

run_program(lambda: run_guarded(call))
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, "call thread handler "),
        ("sys.exit()", 0, "call thread handler "),
        ("sys.exit(3)", 3, "call thread handler "),
        ("sys.exit('no')", 1, "call no\nthread handler collected "),
    ],
)
def test_a_program_ends_without_collecting_its_objects(end: str, code: int, said: str) -> None:
    """Threads and handlers come to their end first; what has an end that only Python tells ends as Python does."""
    assert ends(PROGRAM.replace("END", end)) == (code, said)


@pytest.mark.parametrize("gone", ["sys.stdout = None", "sys.stdout.close()"])
def test_a_program_without_its_output_ends_all_the_same(gone: str) -> None:
    """As one is started with `>&-`, or whose plug-in has closed it."""
    code, said = ends(PROGRAM.replace("END", f"{gone}; sys.exit(2)"))

    assert (code, "Traceback" in said) == (2, False)


FULL_ELSEWHERE = """
import errno, io, sys
from atoll.base.exits import run_guarded
def call():
    print("RESULT")
    raise OSError(errno.ENOSPC, "No space left on device", "/data/x")
REPLACED
run_guarded(call)
"""


@pytest.mark.parametrize(("replaced", "said"), [("", "RESULT\n"), ("sys.stdout = io.StringIO()", "")])
def test_what_was_printed_before_a_disk_was_full_is_not_lost(replaced: str, said: str) -> None:
    """It is another disk than that of standard output, which may be no file of the system's at all."""
    place = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-c", FULL_ELSEWHERE.replace("REPLACED", replaced)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=place)

    assert (done.returncode, done.stdout) == (3, said)
    assert done.stderr.startswith("atoll: no room is left")
    assert "/data/x" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_command_whose_output_has_no_room_ends_in_words() -> None:
    """The disk is full, which is no bug of ours; Python's own complaint at the end is left out, too."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "atoll.cli", "config", "--describe"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "atoll: no room is left for what this command writes",
        "  got:     standard output, or a file",
        "  to do:   free space, or write elsewhere",
    ]
