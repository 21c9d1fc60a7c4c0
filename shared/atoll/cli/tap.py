"""`atoll tap`: the messages that a run stores, as they happen, without their payloads.

The broker republishes every manifest, head and event of a run, headers only, on `tap.>`. Reading them costs the run nothing
and cannot change it. A terminal shows a line for people, a pipe gets one JSON object per line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.options import Assignments, Broker, Config, Run
from atoll.cli.reading import Out, opened, settings_of

if TYPE_CHECKING:
    from atoll.bus.interface import CoreMessage, Subscription
    from atoll.settings import Settings

POLL_S = 0.5
FEED_LEN_MAX = 65536


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="tap", help="Print what a run stores, as it happens: contributions, heads, events.")(tap)


def tap(  # noqa: PLR0913  (one option each)
    tail: Annotated[str, typer.Argument(help="Which taps: 'ev.>', 'gl.head.*', 'ev.round.shard-0', …")] = ">",
    *,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    count: Annotated[int | None, typer.Option(min=1, help="Leave after this many lines.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Leave after this many seconds.")] = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Print taps until told to stop, one line each."""
    from atoll.base.logs import configure  # noqa: PLC0415  (a verb loads what it needs when it runs)

    with settings_of(out, run, broker, config, assignments) as settings:
        configure(settings.log.format, "error", role="tap", run=settings.run)
        asyncio.run(_follow(settings, tail, count, seconds))


async def _follow(settings: Settings, tail: str, count: int | None, seconds: float | None) -> None:
    from atoll.run.record import read_run  # noqa: PLC0415
    from atoll.wire.subjects import Subjects, filter_below  # noqa: PLC0415

    subjects = Subjects(settings.run)
    wanted = subjects.tap(filter_below(tail, "the tap"))
    async with opened(settings, "tap") as bus:
        feed = await bus.listen(wanted, len_max=FEED_LEN_MAX)
        if await read_run(bus, subjects) is None:
            print(f"atoll: nobody has founded run {settings.run!r} here yet; waiting", file=sys.stderr)  # noqa: T201
        await print_taps(feed, subjects.tap(""), count=count, seconds=seconds)


async def print_taps(feed: Subscription, prefix: str, *, count: int | None, seconds: float | None) -> None:
    """Print what `feed` hears, with `prefix` cut from subjects, for `count` lines or `seconds` at most."""
    from atoll.base.clock import SystemClock  # noqa: PLC0415

    clock = SystemClock()
    ends_s = None if seconds is None else clock.monotonic() + seconds
    pretty = sys.stdout.isatty()
    printed = 0
    while count is None or printed < count:
        left_s = POLL_S if ends_s is None else ends_s - clock.monotonic()
        if left_s <= 0:
            return
        core_message = await feed.next(min(POLL_S, left_s))
        if core_message is not None:
            line = pretty_line if pretty else json_line
            print(line(core_message, prefix, clock.wall()), flush=True)  # noqa: T201  (this is the verb's output)
            printed += 1


def info_of(core_message: CoreMessage) -> dict[str, Any]:
    """Return the writer's `info` of the message; empty if it is missing or unreadable."""
    from atoll.wire.limits import INFO_HEADER  # noqa: PLC0415

    try:
        info = json.loads(core_message.headers.get(INFO_HEADER, "{}"))
    except ValueError:
        return {}
    return info if isinstance(info, dict) else {}


def json_line(core_message: CoreMessage, prefix: str, at_s: float) -> str:
    """Return a tap as one JSON object: `at_s` by our clock, `subject` below the tap, `info`."""
    return json.dumps(
        {"at_s": round(at_s, 3), "subject": core_message.subject.removeprefix(prefix), "info": info_of(core_message)}
    )


def pretty_line(core_message: CoreMessage, prefix: str, at_s: float) -> str:
    """Return a tap as a line for people: time of day (UTC), subject, `key=value` pairs."""
    day_s = at_s % 86400
    clock = f"{int(day_s // 3600):02}:{int(day_s // 60 % 60):02}:{day_s % 60:06.3f}"
    pairs = " ".join(f"{key}={value}" for key, value in info_of(core_message).items())
    # What peers write ends on a terminal, so nothing in it may move the cursor.
    return "".join(
        c if c.isprintable() else "?" for c in f"{clock}  {core_message.subject.removeprefix(prefix):<32} {pairs}"
    )
