"""Nobody waits for a compiler, what it makes gives the same bits, and a process can end while it works."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from atoll.base.parallel import PART
from atoll.base.user_cache import turn, user_cache
from atoll.codec import kernels as sets
from atoll.codec.formats import F32, INT4, Format
from atoll.codec.kernels import FAST_ELEMENTS, plain_kernels
from atoll.codec.kernels import background as module
from atoll.codec.kernels.background import CompiledLater, ProcessEnds, ends_with_the_process
from atoll.codec.kernels.in_numpy import Kernels
from support.compilers import DEADLINE_S, await_compilers, compiling

WAITED_S = 0.5


@pytest.fixture(autouse=True)
def _nobody_else_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what an earlier test of this process has begun, and take turns with no other process.

    The thread, what it logs, and a turn that somebody else has would count here.
    """
    await_compilers()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_nothing_is_compiled_before_there_is_much_to_do_and_nobody_waits() -> None:
    """Below its worth nothing begins; then a thread compiles, once, while every caller is told to go on."""
    may_end, made = threading.Event(), []

    def make() -> str:
        assert may_end.wait(DEADLINE_S)
        made.append(threading.current_thread().name)
        return "compiled"

    later = CompiledLater("a", make, worth_elements=100)
    with capture_logs() as logs:
        assert [later.found(49), later.found(50)] == [None, None]
        assert compiling() is None
        assert [later.found(1), later.found(1000)] == [None, None]
        assert compiling() is not None
        may_end.set()
        await_compilers()

    assert later.found(1) == "compiled"
    assert later.now() == "compiled"
    assert made == ["atoll-compiler"]
    assert [line["event"] for line in logs] == ["kernels.compiling", "kernels.compiled"]
    assert logs[1]["took_s"] >= 0.0


@pytest.mark.parametrize(("fault", "said"), [(None, "numba is not installed"), (OSError("no LLVM"), "no LLVM")])
def test_without_a_compiler_the_plain_form_goes_on(fault: OSError | None, said: str) -> None:
    """It is told once, with the extra to install where there is one."""

    def make() -> None:
        if fault is not None:
            raise fault

    later: CompiledLater[str] = CompiledLater("a", make, worth_elements=1)
    with capture_logs() as logs:
        assert later.found(1) is None
        await_compilers()
        assert [later.found(1), later.found(1)] == [None, None]

    last = logs[-1]
    assert (last["event"], len(logs)) == ("kernels.not_compiled", 2)
    assert said in last["reason"]
    assert (fault is None) == ("atoll[synchronizer]" in last.get("todo", ""))


def test_a_machine_without_another_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    later = CompiledLater("a", lambda: "compiled", worth_elements=1)
    with capture_logs() as logs:
        assert [later.found(1), later.found(1)] == [None, None]
    assert [line["event"] for line in logs] == ["kernels.not_compiled"]


def test_a_process_that_ends_compiles_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with_the_process()
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    with pytest.raises(ProcessEnds):
        ends_with_the_process()
    later: CompiledLater[None] = CompiledLater("a", ends_with_the_process, worth_elements=1)
    with capture_logs() as logs:
        later.found(1)
        await_compilers()
    assert [line["event"] for line in logs] == ["kernels.compiling"]


def test_a_process_ends_well_while_it_compiles() -> None:
    program = """
from atoll.codec.formats import INT4
from atoll.codec.kernels import background, kernels
for _ in range(background.WORTH_ELEMENTS // (1 << 19)):
    assert kernels(INT4, 1 << 19).name == "plain"
"""
    with_no_cache = {"NUMBA_CACHE_DIR": "/dev/null/none", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=with_no_cache,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_processes_of_a_machine_compile_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another holds the turn, NumPy does the work; then we find what it has made, and our log says what that took."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, made = user_cache("kernels"), threading.Event()
    assert folder is not None

    def make() -> str:
        made.set()
        return "compiled"

    later = CompiledLater("a", make, worth_elements=1)

    with capture_logs() as logs:
        began_s = time.monotonic()
        with turn(folder, patience_s=0.0) as theirs:
            assert later.found(1) is None
            assert compiling() is not None
            assert (theirs, made.is_set(), later.found(1), logs) == (True, False, None, [])
            waited_s = time.monotonic()
            while time.monotonic() < waited_s + WAITED_S:
                time.sleep(WAITED_S / 10)
            waited_s = time.monotonic() - waited_s
        await_compilers()
        took_s = time.monotonic() - began_s

    assert (made.is_set(), later.found(1)) == (True, "compiled")
    assert logs[-1]["event"] == "kernels.compiled"
    assert logs[-1]["took_s"] <= took_s - waited_s + 0.01, "waiting for a turn is no compiling"


def test_whoever_waits_for_the_compiler_takes_a_turn_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers of a test run want the same kernels at once: one compiles them, the others load what it has made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    looked, made = threading.Event(), threading.Event()
    monkeypatch.setattr(module, "ends_with_the_process", looked.set)
    later: CompiledLater[None] = CompiledLater("a", made.set)
    waiting = threading.Thread(target=later.now)

    with turn(user_cache("kernels")):
        waiting.start()
        assert looked.wait(DEADLINE_S)
        assert not made.is_set()
    waiting.join(DEADLINE_S)
    assert made.is_set()


def test_a_process_that_ends_waits_for_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = threading.Event()
    later: CompiledLater[None] = CompiledLater("a", made.set, worth_elements=1)

    with turn(user_cache("kernels")):
        later.found(1)
        monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
        await_compilers()
        assert not made.is_set()


@pytest.mark.parametrize("form", [F32, pytest.param(INT4, marks=pytest.mark.second_tier)])
def test_both_forms_of_a_set_make_the_same_bits_in_turn(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector whose parts are done by one form and then by the other is what either would make alone."""
    monkeypatch.setattr(sets, "_later", {})
    elements = 4 * FAST_ELEMENTS
    vector = np.random.default_rng(3).normal(size=elements).astype(np.float32)
    made: list[tuple[Kernels, bytes, float]] = []
    for change in (False, True):
        codes, scales = (
            np.empty(form.codes_bytes(elements), np.uint8),
            np.empty(form.scales_count(elements), np.float32),
        )
        chosen = sets.fast_kernels(form) if change else sets.kernels(form, elements)
        chosen.quantise(vector, codes, scales)
        made.append((chosen, codes.tobytes() + scales.tobytes(), chosen.squares(codes, scales, 0, elements)))

    assert [each[0].name for each in made] == ["plain", "fast"]
    assert made[0][1:] == made[1][1:]
    assert sets.kernels(form, elements) is made[1][0]


def test_small_vectors_take_what_is_there_and_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "_later", {})
    monkeypatch.setattr(module, "WORTH_ELEMENTS", 1)
    for _ in range(3):
        assert sets.kernels(F32, FAST_ELEMENTS - 1) is plain_kernels(F32)
    assert not any(thread.name == "atoll-compiler" for thread in threading.enumerate())

    made = sets.fast_kernels(F32)
    assert sets.kernels(F32, 1) is made is not plain_kernels(F32)


def test_a_part_counts_and_not_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is asked for once a part: a fragment of a terabyte is not counted whole each time."""
    monkeypatch.setattr(sets, "_later", {})

    assert {sets.kernels(F32, 1 << 40).name for _ in range(module.WORTH_ELEMENTS // PART - 1)} == {"plain"}
    assert compiling() is None
