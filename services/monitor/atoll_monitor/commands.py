"""`atoll monitor` and `atoll dashboard`: watch runs and serve what is seen over HTTP, until told to stop.

`monitor` is a service beside a run: metrics, and the page. `dashboard` is for a person: one run or several, live or long over,
by their folders, and the address on the terminal.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.options import Assignments, Broker, Config, Out, Run, with_flags

if TYPE_CHECKING:
    from atoll.run.folder import SavedRun
    from atoll_monitor.process import BrokerRun

Host = Annotated[str | None, typer.Option(help="Address to serve at.  [default: 127.0.0.1]")]


def register(app: typer.Typer) -> None:
    """Add this service's verbs to the command line."""
    app.command(
        name="monitor",
        help="Watch a run: metrics for Prometheus, and a page; it can only read.",
        rich_help_panel="watch",
    )(monitor)
    app.command(
        name="dashboard",
        help="Show runs in the browser: live, or as they ended; several are compared.",
        rich_help_panel="watch",
    )(dashboard)


def monitor(  # noqa: PLR0913  (one option each)
    *,
    run: Run = None,
    broker: Broker = None,
    out: Out = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help="Port to serve at; 0 for a free one.  [default: 9464]")] = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Watch a run until this process is told to leave (SIGTERM, Ctrl-C). A run that is not there yet is awaited."""
    from atoll.cli.reading import WATCHERS, check_kind, settings_of  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll_monitor.process import watch_run  # noqa: PLC0415

    flags = with_flags(assignments, monitor__host=host, monitor__port=port)
    with settings_of(out, run, broker, config, flags) as settings:
        check_kind(settings, WATCHERS, "the monitor reads what no learner may")
        watch_run(settings)


def dashboard(  # noqa: PLR0913  (one option each)
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs of `atoll up`, or of simulated ones.")
    ] = None,
    *,
    run: Run = None,
    broker: Broker = None,
    host: Host = None,
    port: Annotated[
        int | None, typer.Option(help="Port to serve at; 0 for a free one.  [default: 9464, or a free one]")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page where there is a screen.")
    ] = True,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Serve the page of one run or of several until Ctrl-C.

    The broker of a folder is started while nobody else runs it; a saved run needs none.
    """
    from atoll.base.extras import require  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.cli.reading import WATCHERS, check_kind, settings_of  # noqa: PLC0415
    from atoll.local.console import open_page  # noqa: PLC0415
    from atoll.run.folder import saved_run  # noqa: PLC0415
    from atoll.settings import load  # noqa: PLC0415

    require("starlette", "monitor", "`atoll dashboard`")
    from atoll_monitor.process import BrokerRun, reached_by, show_runs  # noqa: PLC0415

    flags = with_flags(assignments, monitor__host=host, monitor__port=port)
    with ExitStack() as brokers:
        shown: dict[str, BrokerRun | SavedRun] = {}
        places: list[Path | None] = [*folders] if folders else [None]
        for folder in places:
            saved = None if folder is None or run is not None or broker is not None else saved_run(folder)
            if saved is not None:
                shown[_free_name(saved.run, folder, shown)] = saved
                continue
            settings = brokers.enter_context(settings_of(folder, run, broker, config, flags))
            check_kind(settings, WATCHERS, "the dashboard reads what no learner may")
            shown[_free_name(settings.run, folder, shown)] = BrokerRun(settings, reached_by(settings, folder))

        def open_at(url: str) -> None:
            typer.echo(f"{', '.join(shown)}: {url}\nCtrl-C ends this page; the run does not notice.")
            if browser:
                open_page(url)

        show_runs(shown, load(config, flags).settings, open_at, partial(typer.echo, err=True), any_port=port is None)


def _free_name(run: str, folder: Path | None, taken: Collection[str]) -> str:
    """Return the name under which a run is shown: two folders may hold one run, and simulated ones are all called `sim`."""
    return run if run not in taken else f"{run} ({folder})"
