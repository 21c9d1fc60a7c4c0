"""`atoll broker`: a broker for islands, with the limits that Atoll needs, until Ctrl-C.

It is nats-server itself, from the wheel or the machine. A server that dies is started again; one whose disk was full, as soon
as there is room. With `--keys` it is behind a locked door: TLS, and only who is on the roll of that folder (`atoll keys`), each
with the rights of its kind. For a cluster or accounts of another kind, add nats-server's own configuration (`--include`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from atoll.cli.look import say

PORT = 4222


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(name="broker", help="Run a broker for islands, with its data in a folder, until Ctrl-C.")(broker)


def broker(
    store: Annotated[Path, typer.Option(help="Folder of its data; what is there goes on.")] = Path("atoll-broker"),
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port.", min=1, max=65535)] = PORT,
    sync: Annotated[
        Literal["always", "os"],
        typer.Option(help="When data must be on the disk: before each answer, or when the system likes."),
    ] = "always",
    include: Annotated[
        Path | None, typer.Option(help="A file of nats-server's configuration to add: TLS, accounts, a cluster.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Folder of keys (`atoll keys new`): let in only who is on its roll.")
    ] = None,
) -> None:
    """Run nats-server until SIGINT or SIGTERM."""
    from atoll.base.errors import SettingsError  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.base.logs import configure  # noqa: PLC0415
    from atoll.bus.server import EmbeddedBroker  # noqa: PLC0415
    from atoll.keys.locked import LockedDoor  # noqa: PLC0415
    from atoll.keys.roll import KeyFolder  # noqa: PLC0415
    from atoll.local.brokers import keep  # noqa: PLC0415

    configure(role="broker")
    if include is not None and not include.is_file():
        raise SettingsError("there is no such file", got=include, todo="correct --include")
    if include is not None and keys is not None:
        raise SettingsError(
            "two answers to who may enter",
            got="--include beside --keys",
            allowed="one of them",
            todo="leave --include away; --keys brings TLS and accounts",
        )
    door = None if keys is None else LockedDoor(KeyFolder(keys), store)
    added = include if door is None else door.config
    served = EmbeddedBroker(
        store,
        port,
        sync_always=sync == "always",
        host=host,
        include=None if added is None else added.absolute(),
    )
    durable = {
        "always": "an answer means that the disk has it",
        "os": "a power cut may lose the last seconds; a killed process loses nothing",
    }

    def ready(url: str) -> None:
        say(f"broker at {url}, listening on {host}:{port}")
        say(f"data in {store.absolute()}; sync {sync}: {durable[sync]}; log in {served.log_path}")
        if door is not None:
            say(f"locked: TLS, and {door.entrants} identities of {keys} may enter (`atoll keys list {keys}`)")
        elif include is None:
            say("no accounts and no TLS: whoever reaches this port can read and write every run (see --keys)")
        say("Ctrl-C ends it; the data stays")

    keep(served, ready, (lambda: False) if door is None else door.has_changed)
