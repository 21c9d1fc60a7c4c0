"""The output of `atoll up` while it works: a live picture on a terminal, plain lines elsewhere.

`RunConsole` is the interface. On a terminal a stage is a moving bar with its elapsed time, and training is a picture that
is redrawn in place. Elsewhere a stage is one line at its beginning and one at its end, and training is a status line every
ten seconds. Both draw from a `ConsolePicture` and know nothing else.
"""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from atoll.base.clock import Clock
from atoll.base.exits import silence_stdout
from atoll.base.logs import get
from atoll.base.wording import as_duration, as_size, counted
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History
from atoll.run.links import byte_ledger, name_of, total
from atoll.run.process_views import Hearing, HostView
from atoll.run.standing import late_after_s, making_of
from atoll.wire.traffic import LinkTraffic, TrafficMeter

log = get(__name__)

STATUS_EVERY_S: Final = 10.0
FRAGMENTS_SHOWN: Final = 48
WIDE: Final = 100
_HEADINGS: Final = (
    "process",
    "state",
    "life",
    "step",
    "loss",
    "tokens/s",
    "lag",
    "overhead",
    "up/s",
    "down/s",
    "up",
    "down",
)
_ONLY_WIDE: Final = ("life", "overhead")


@dataclass(frozen=True, slots=True)
class ConsolePicture:
    """A run at one moment: `now_s` by the clock of the view's arrivals, `began_s` likewise.

    `began_s` is when the process that draws began to listen. `run_s` is the age of the run for a process that came later,
    such as a watcher; None for the process that began the run. `virtual` says that all times are of a simulated run.
    """

    view: History
    run: str
    protocol: ProtocolSettings
    began_s: float
    now_s: float
    run_s: float | None = None
    virtual: bool = False

    @property
    def target(self) -> int:
        """Return the tokens that the run is to train, 0 without a bound."""
        return self.protocol.tokens_target

    @property
    def silence_s(self) -> float:
        """Return after how long a learner no longer counts as live."""
        return self.protocol.silence_s

    @property
    def tokens_per_s(self) -> float:
        """Return the run's present speed."""
        return self.view.tokens_per_s(self.now_s, self.silence_s)

    @property
    def goodput(self) -> float | None:
        """Return the goodput since this process began to listen, None before there is any: of steps that merges follow.

        A watcher that looks for some seconds at a run that has stood still for an hour knows by the event log that nothing
        comes of its steps.
        """
        if (present_s := self.view.present_s) <= 0:
            return None
        training = {name for name, one in self.view.learners.items() if self.hearing.state(one) == "training"}
        still_before_s = making_of(self.view, self.protocol, training).still_s - (self.now_s - self.began_s)
        within_s = late_after_s(self.view, self.protocol) - max(0.0, still_before_s)
        return self.view.merging_s(max(0.0, within_s)) / present_s

    @property
    def left_s(self) -> float | None:
        """Return the seconds until the target at the present speed, None if unknown.

        Only merged tokens count, and learners say what they train: of the speed, the share counts that has counted until now.
        """
        counted, trained = self.view.run_tokens, self.view.trained_tokens
        speed = self.tokens_per_s * (min(1.0, counted / trained) if counted and trained else 1.0)
        return max(0, self.target - counted) / speed if self.target and speed > 0 else None

    @property
    def hearing(self) -> Hearing:
        """Return what judges who is heard."""
        return Hearing(self.protocol, self.now_s, None, self.began_s, over=0 < self.target <= self.view.run_tokens)

    def hosts(self) -> list[HostView]:
        """Return the synchronizer processes that are heard, by the shards that they have owned."""
        return sorted(filter(self.hearing.hears_host, self.view.hosts.values()), key=name_of)


class RunConsole(Protocol):
    """The output of `up`."""

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Show that `what` is going on while the block runs."""

    def say(self, line: str) -> None:
        """Say something once."""

    def show(self, picture: ConsolePicture) -> None:
        """Show the run as it is."""

    def rest(self) -> None:
        """End the picture, if there is one; it may begin again."""


class PlainConsole:
    """Lines for logs and pipes."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._shown_s: float | None = None

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Say when `what` begins and how long it took."""
        began_s = self._clock.monotonic()
        self.say(f"{what} …")
        yield
        self.say(f"{what}: done in {self._clock.monotonic() - began_s:.1f} s")

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, picture: ConsolePicture) -> None:
        """Print a status line, not more often than every ten seconds."""
        now_s = self._clock.monotonic()
        if self._shown_s is None or now_s - self._shown_s >= STATUS_EVERY_S:
            self._shown_s = now_s
            self.say(status_line(picture))

    def rest(self) -> None:
        """Nothing to end."""


class TerminalConsole:
    """A picture that is redrawn in place."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Show a spinner with the time that has gone by."""
        self.rest()
        began_s = self._clock.monotonic()
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        with bar:
            bar.add_task(what, total=None)
            yield
        self.say(f"{what}: {self._clock.monotonic() - began_s:.1f} s")

    def say(self, line: str) -> None:
        """Print a line above the picture."""
        self._console.print(line, markup=False, highlight=False)

    def show(self, picture: ConsolePicture) -> None:
        """Redraw the picture."""
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        self._live.update(draw(picture, self._console.width))

    def rest(self) -> None:
        """Leave the picture as it is and let the cursor go on below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class LastingConsole(Console):
    """A console whose reader may go (`| tee log` and Ctrl-C): who looks at a run does not decide how it ends."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on."""
        self.quiet = True
        silence_stdout()
        log.warning("console.gone", why="nobody reads standard output any more; the run goes on")


def make_face(clock: Clock) -> RunConsole:
    """Return the console that fits standard output."""
    console = LastingConsole()
    return TerminalConsole(console, clock) if console.is_terminal else PlainConsole(console, clock)


def draw_once(picture: ConsolePicture) -> None:
    """Print the picture of a watcher to standard output; nothing is left out for a file or a pipe."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(draw(picture, console.width))


def draw(picture: ConsolePicture, width: int) -> RenderableType:
    """Return the whole picture for so many columns of text."""
    view = picture.view
    shown = sorted(view.fragments.items())[:FRAGMENTS_SHOWN]
    cells = [Text(f"p{p:<3} v{f.version:<5} {f.contributors}/{f.live}  grace {f.grace_s:4.1f} s") for p, f in shown]
    rest = len(view.fragments) - len(shown)
    if rest > 0:
        cells.append(Text(f"and {counted(rest, 'more fragment')}"))
    table = process_table(picture, wide=width >= WIDE)
    return Group(table, Columns(cells, padding=(0, 3)), Text(status_line(picture), style="bold"))


def process_table(picture: ConsolePicture, *, wide: bool) -> Table:
    """Return a row per learner and one per synchronizer process, the wire's bytes last: both ways per second, and in all."""
    headings = [heading for heading in _HEADINGS if wide or heading not in _ONLY_WIDE]
    table = Table(box=None, header_style="dim", pad_edge=False, collapse_padding=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("process", "state") else "right", no_wrap=True)
    for row in (*_learner_rows(picture), *_host_rows(picture)):
        table.add_row(*(row.get(heading, Text("-")) for heading in headings))
    return table


def _learner_rows(picture: ConsolePicture) -> Iterator[dict[str, Text]]:
    hearing = picture.hearing
    for name, learner in sorted(picture.view.learners.items()):
        life = learner.latest
        state = hearing.state(learner)
        style = {"training": "green", "silent": "red", "draining": "yellow"}.get(state, "")
        row = {"process": Text(name), "state": Text(state, style=style)}
        if life is not None:
            moved = total(other.meter.moved for other in learner.lives.values())
            meter = None if state in ("left", "silent") else life.meter
            row |= {"life": Text(str(life.incarnation)), **_traffic_cells(meter, moved)}
        if life is not None and (beat := life.beat) is not None:
            row |= {
                "step": Text(str(beat.step)),
                "loss": Text("-" if beat.loss is None else f"{beat.loss:.3f}"),
                "tokens/s": Text(f"{beat.tokens_per_s:,.0f}"),
                "lag": Text(str(beat.lag_versions)),
                "overhead": Text(f"{100 * beat.overhead:.1f}%"),
            }
        yield row


def _host_rows(picture: ConsolePicture) -> Iterator[dict[str, Text]]:
    for host in picture.hosts():
        state = Text("serving" if host.serving else "waiting")
        yield {"process": Text(name_of(host)), "state": state, **_traffic_cells(host.meter, host.meter.moved)}


def _traffic_cells(meter: TrafficMeter | None, moved: LinkTraffic) -> dict[str, Text]:
    cells = {"up": as_size(moved.wire_up), "down": as_size(moved.wire_down)}
    if meter is not None:
        cells |= zip(("up/s", "down/s"), (as_size(round(pace)) for pace in meter.pace()), strict=True)
    return {heading: Text(cell) for heading, cell in cells.items()}


def status_line(picture: ConsolePicture) -> str:
    """Return the run in one line."""
    view = picture.view
    target = f" of {picture.target:,}" if picture.target else ""
    # A watcher has listened for a few heartbeats: what it counts says nothing of the run's beginning.
    age_s, now = (picture.now_s - picture.began_s, "") if picture.run_s is None else (picture.run_s, " now")
    goodput = "" if picture.goodput is None else f" · goodput{now} {100 * picture.goodput:.0f}%"
    quality = f" · {view.validations[-1].fields.bits_per_byte:.3f} bits/byte" if view.validations else ""
    clock = "virtual " if picture.virtual else ""
    left = "" if picture.left_s is None else f" · {clock}{as_duration(picture.left_s)} to go"
    hearing = picture.hearing
    states = [hearing.state(learner) for learner in view.learners.values()]
    training, silent = states.count("training"), states.count("silent")
    unheard = f" · {silent} not heard" if silent else ""
    quorum = picture.protocol.quorum
    waits = picture.run_s is None and picture.goodput is None
    start = " · no step yet: learners load, and compile their program where it is not cached" if waits else ""
    few = f" · below the quorum of {quorum}: no round is merged" if 0 < training < quorum else ""
    ledger = byte_ledger(view, picture.protocol.fragments)
    moved, less = ledger.sum("learner"), ledger.times_less("learner")
    traffic = f"{as_size(moved.wire_up)} up {as_size(moved.wire_down)} down"
    if less is not None:
        traffic += f", {less:,.3g} times less than data-parallel"
    return (
        f"{clock}{as_duration(age_s)} · {training} training{start}{unheard}{few} · "
        f"{view.run_tokens:,}{target} tokens · {picture.tokens_per_s:,.0f}/{clock}s · {view.commits} commits · {traffic}"
        f"{goodput}{quality}{left}"
    )


TEXT_BROWSERS = frozenset({"www-browser", "links", "elinks", "lynx", "w3m"})


def open_page(url: str) -> bool:
    """Open `url`, and return whether a browser was asked to; on a machine without a screen nothing happens."""
    if not has_screen():
        return False
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    # A browser in the terminal would take it away from the program that runs there.
    return getattr(browser, "name", "") not in TEXT_BROWSERS and browser.open(url)


def has_screen() -> bool:
    """Return whether this process can show a window: a session over ssh without X cannot."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
