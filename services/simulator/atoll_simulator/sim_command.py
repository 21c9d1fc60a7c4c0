"""`atoll sim …`: questions that are answered in virtual time. Fleets of chips (`atoll_simulator.fleet.command`) are always there.

Simulations of training need learners and synchronizers, which the kernel does not know: their verbs are found by the
entry-point group `atoll.simulations`, whose functions take the group and add to it.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import typer

from atoll_simulator.fleet import command

SIMULATIONS = "atoll.simulations"


def register(app: typer.Typer) -> None:
    """Add the group with every verb that is found."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    command.register(group)
    for point in sorted(entry_points(group=SIMULATIONS), key=lambda found: found.name):
        try:
            point.load()(group)
        except (ImportError, AttributeError) as error:
            print(f"atoll: the simulations of {point.name} cannot be loaded: {error}", file=sys.stderr)  # noqa: T201  (a command line speaks)
    app.add_typer(group, name="sim", help="Simulate runs in virtual time, from one seed.")
