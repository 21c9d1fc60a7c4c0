"""A token source of a person's own: batches from its windows, going on after a restart, its mistakes told; Grain as one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.base.errors import DataError, SettingsError
from atoll_learner.data.token_source import UNIT, SourceFeed, SourceRequest, start_of

ROOT = Path(__file__).parents[2]
MODULE = """
import numpy as np

def counting(request):
    for number in range(request.start, 10):
        yield np.arange(number, number + request.sequence + 1)

def bad(request):
    yield {wrong}

def raising(request):
    raise OSError("no such disk")

def raising_later(request):
    yield list(range(9))
    raise OSError("the disk is gone")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def module(folder: Path, wrong: str = "None") -> str:
    name = f"sources_{abs(hash((folder, wrong)))}"
    (folder / f"{name}.py").write_text(MODULE.format(wrong=wrong), encoding="utf-8")
    return name


def never() -> bool:
    return False


def feed(source: str, start: int = 0, batch: int = 2) -> SourceFeed:
    return SourceFeed(source, SourceRequest("a", 3, 8, 256, start), batch)


def test_batches_are_the_windows_in_order_and_a_restart_goes_on(folder: Path) -> None:
    name = f"{module(folder)}:counting"
    first = feed(name, batch=3)
    one, two = first.next(never), first.next(never)
    kept = first.cursor
    assert not first.close(1.0)

    again = feed(name, start_of(kept), batch=3)
    three, end = again.next(never), again.next(never)

    assert kept == {UNIT: (6, 1 << 53)}
    for number, batch in enumerate((one, two, three)):
        assert batch is not None
        assert batch.dtype == np.int32
        assert batch[:, 0].tolist() == [3 * number, 3 * number + 1, 3 * number + 2]
    assert end is None


def test_a_learner_that_shall_end_waits_for_no_window(folder: Path) -> None:
    """`give_up` is asked before each; a cursor of leased blocks is no place in a source."""
    assert feed(f"{module(folder)}:counting").next(lambda: True) is None
    assert start_of({(0, 0, 1): (5, 24), (1, 64, 128): (3, 9)}) == start_of({}) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[1, 2, 3]", "int64 (3,)"),
        ("np.zeros(9)", "float64 (9,)"),
        ("np.full(9, 256)", "tokens 256..256"),
        ("np.full(9, -1)", "tokens -1..-1"),
        ("'text'", "<U4 ()"),
    ],
)
def test_a_window_that_is_none_is_refused(folder: Path, wrong: str, said: str) -> None:
    with pytest.raises(DataError, match="returned no window") as refused:
        feed(f"{module(folder, wrong)}:bad").next(never)

    assert said in str(refused.value)
    assert "integers (9,), tokens 0..255" in str(refused.value)


def test_a_source_that_fails_or_does_not_exist_is_named(folder: Path) -> None:
    name = module(folder)
    with pytest.raises(DataError, match="OSError: no such disk"):
        feed(f"{name}:raising")
    later = feed(f"{name}:raising_later")
    with pytest.raises(DataError, match="the disk is gone"):
        later.next(never)
    with pytest.raises(SettingsError, match=r"data\.source names what its module has not"):
        feed(f"{name}:nothing")


def test_grain_gives_each_learner_its_own_order_and_goes_on_at_any_window(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEXTS", str(folder))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for number in range(5):
        (folder / f"{number}.md").write_text(f"text {number}, " * 30, encoding="utf-8")

    def batches(learner: str, start: int, count: int) -> list[list[list[int]]]:
        one = SourceFeed("grain_source:windows", SourceRequest(learner, 3, 8, 256, start), 4)
        found = [one.next(never) for _ in range(count)]
        return [batch.tolist() for batch in found if batch is not None]

    whole = batches("a", 0, 100)

    assert len(whole) == 100
    assert batches("a", 60, 5) == whole[15:20]
    assert batches("b", 0, 5) != whole[:5]
