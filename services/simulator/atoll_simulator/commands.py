"""What the simulator adds to the command line: two verbs and the group `atoll sim`. It loads nothing before a verb runs."""

from __future__ import annotations

import typer

from atoll_simulator import plan_command, train_command
from atoll_simulator.fleet import command as fleet_command
from atoll_simulator.what_if import command as what_if_command


def register(app: typer.Typer) -> None:
    """Add the verbs, and the group with every simulation."""
    plan_command.register(app)
    what_if_command.register(app)
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    for register_verbs in (fleet_command.register, train_command.register):
        register_verbs(group)
    app.add_typer(group, name="sim", help="Simulate runs in virtual time, from one seed.")
