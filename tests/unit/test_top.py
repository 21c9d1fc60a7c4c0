"""`atoll top` on a terminal, with Textual's pilot: what is shown on a narrow and on a wide terminal, and the keys."""

from __future__ import annotations

from typing import Any

import pytest
from textual.widgets import DataTable, Static

from atoll.base.errors import INTERRUPTED
from atoll.local.console import ConsolePicture
from atoll.local.console_app import LEFT, HelpScreen, TopApp
from atoll.local.console_tables import PANELS, TopMoment, fitting_columns
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History
from atoll.run.process_views import Noted
from atoll.wire.events import QuarantinedEvent
from atoll.wire.messages import Beat, LearnerState, Presence
from atoll.wire.traffic import LinkTraffic
from support.events import event, heartbeat

NOW_S = 100.0
WALL_S = 10_100.0
NARROW, WIDE = (60, 20), (160, 48)
PROTOCOL = ProtocolSettings(fragments=4, shards=2, quorum=2, silence_s=5, interval_steps=100, tokens_target=2_000_000)
REASON = "not_finite: a value of its update is not a number"


def beat(learner: str, step: int, at_s: float, *, loss: float, state: LearnerState = "training") -> Beat:
    moved = LinkTraffic(payload_up=10, payload_down=20, wire_up=1500 * step, wire_down=3000 * step)
    paced = {"step": step, "step_s": 0.125, "tokens": step * 1000, "tokens_per_s": 8000.0 + step}
    known = {"incarnation": 1 if learner == "learner-1" else 2, "state": state, "at_s": at_s, "loss": loss}
    return heartbeat(learner, **paced, **known, overhead=0.021, lag_versions=1, moved=moved)


def told_run() -> History:
    """Return a run of two learners and two shards, one of each killed and back, with a learner in quarantine."""
    view = History()
    for name, life, at_s in (("learner-1", 1, 10_000.0), ("learner-2", 1, 10_001.0), ("learner-2", 2, 10_040.0)):
        view.on_event(event("joined", name, at_s, incarnation=life))
    view.on_event(event("serving", "shard-0", 10_000.0, epoch=1, versions={0: 0}, host="h", pid=7))
    for version in range(1, 6):
        for fragment in range(4):
            at_s = 10_010.0 + 10 * version + fragment
            names = ("learner-1", "learner-2") if version < 4 else ("learner-1",)
            share = [{"learner": n, "incarnation": 1, "age": 0, "tokens": 500, "weight": 0.5} for n in names]
            view.on_event(
                event(
                    "round",
                    f"shard-{fragment % 2}",
                    at_s,
                    fragment=fragment,
                    version=version,
                    contributors=share,
                    tokens=1000,
                    quorum_wait_s=0.25,
                    waited_s=0.75,
                    merge_s=0.03,
                    commit_s=0.01,
                    end="all answered",
                    live=2,
                )
            )
    view.on_event(event("serving", "shard-0", 10_080.0, epoch=2, versions={0: 5}, host="h", pid=9))
    view.on_event(
        event("quarantined", "shard-1", 10_090.0, learner="learner-3", incarnation=1, offences=3, reason=REASON)
    )
    view.on_event(event("validation", "evaluator", 10_091.0, run_tokens=500_000, bits_per_byte=3.214))
    for second in (98.0, 99.0):
        view.on_beat(beat("learner-1", 400 + int(second), 10_000.0 + second, loss=2.75), second)
        view.on_beat(beat("learner-2", 100 + int(second), 10_000.0 + second, loss=3.5), second)
        view.on_presence(Presence(name="p", host="h", pid=9, wants=(), owns=(0,)), second)
        view.on_presence(Presence(name="q", host="h", pid=8, wants=(), owns=(1,)), second)
    return view


def moment_of(view: History, now_s: float = NOW_S, *, unanswered_s: float = 0.0) -> TopMoment:
    picture = ConsolePicture(view, "demo", PROTOCOL, 0.0, now_s)
    return TopMoment(picture, WALL_S - NOW_S + now_s, unanswered_s=unanswered_s)


def lines_of(app: TopApp) -> list[str]:
    return ["".join(part.text for part in strip).rstrip() for strip in app.screen._compositor.render_strips()]


def first_column(app: TopApp) -> list[str]:
    table = app.query_one(DataTable)
    return [str(table.get_row_at(n)[0]).strip() for n in range(table.row_count)]


@pytest.mark.parametrize("size", [NARROW, WIDE])
async def test_everything_that_matters_is_on_the_screen_whole(size: tuple[int, int]) -> None:
    """Numbers, tabs, the table and the keys; every cell that is shown is there to its last letter."""
    view = told_run()
    app = TopApp(lambda: moment_of(view))
    async with app.run_test(size=size) as pilot:
        for number, (name, panel) in enumerate(PANELS.items(), 1):
            await pilot.press(str(number))
            await pilot.pause()
            screen = lines_of(app)
            text = "\n".join(screen)
            assert len(screen) == size[1]
            assert all(len(line) <= size[0] for line in screen)
            for word in (
                "demo: training",
                "3.214",
                "of 2M",
                "goodput",
                "training 2 of 2",
                "commits 20",
                f"{number} {name}",
            ):
                assert word in text, (name, word)
            assert all(key in screen[-1] for key in ("1-6", "Tab", "↑↓", "sort", "help", "quit")), screen[-1]
            made = panel(moment_of(view))
            assert made.rows
            for row in made.rows[:4]:
                line = next(line for line in screen if row.cells[0].text in line and row.cells[1].text in line)
                assert [n for n in fitting_columns(made, size[0]) if f" {row.cells[n].text} " not in f" {line} "] == []


async def test_keys_turn_panels_and_sort_rows() -> None:
    """Tab goes round, s takes the next column, S the other direction, and the cursor stays on its row."""
    view = told_run()
    app = TopApp(lambda: moment_of(view))
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("down")
        for _ in range(5):
            await pilot.press("s")
        assert first_column(app) == ["learner-1", "learner-2"], "by loss"
        await pilot.press("S")
        assert first_column(app) == ["learner-2", "learner-1"]
        assert "loss ▼" in "\n".join(lines_of(app))
        await pilot.pause()
        assert "learner-2:" in str(app.query_one("#detail", Static).content)
        await pilot.press("shift+tab")
        await pilot.pause()
        assert "last reason" in "\n".join(lines_of(app))
        await pilot.press("tab", "tab", "tab")
        await pilot.pause()
        assert first_column(app) == ["p0", "p1", "p2", "p3"]


async def test_it_is_left_by_q_and_by_ctrl_c_and_helps() -> None:
    """Help is closed by the keys that closed nothing else; both ends have their code."""
    for key, code in (("q", LEFT), ("ctrl+c", INTERRUPTED)):
        app = TopApp(lambda: moment_of(History()))
        async with app.run_test(size=NARROW) as pilot:
            await pilot.pause()
            assert "No learner has joined yet." in "\n".join(lines_of(app))
            await pilot.press("question_mark")
            await pilot.pause()
            assert isinstance(app.screen, HelpScreen)
            assert "sort by the next column" in "\n".join(lines_of(app))
            await pilot.press("escape")
            await pilot.press(key)
        assert app.return_value == code


async def test_what_a_peer_wrote_cannot_steer_the_terminal() -> None:
    """No event with an escape sequence is taken; if one were, it would be shown and not obeyed."""
    view = told_run()
    fields: dict[str, Any] = {"learner": "b", "incarnation": 1, "offences": 3, "reason": "bad\x1b[2Jword"}
    view.on_event(event("quarantined", "shard-1", 10_092.0, **fields))
    assert view.strange["shard-1"].count == 1
    view.quarantined.append(Noted(10_092.0, "shard-1", QuarantinedEvent(**fields)))
    app = TopApp(lambda: moment_of(view))
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("6")
        await pilot.pause()
        text = "\n".join(lines_of(app))

    assert "word" in text
    assert "\x1b" not in text
