"""`atoll keys`: who may enter a locked broker, and as what.

One folder holds the roll, the authority and the broker's certificate (`atoll.keys.roll`). The broker that was started with
`--keys` on that folder follows every change at once. Each identity is one file to hand to its holder, over a channel that is
private: whoever has the file is that identity.
"""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from atoll.base.errors import AtollError, EnvironmentFault, SettingsError, on_one_line
from atoll.base.wording import DAY_S, as_time, counted
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions
from atoll.cli.options import Broker, Json
from atoll.cli.output import plain_table, print_table, say, say_json
from atoll.keys.certificates import ends_at_s, hosts_of
from atoll.keys.identity import read_identity
from atoll.keys.rights import Kind
from atoll.keys.roll import OPERATOR, KeyFolder, RollEntry, ensure, hand_out
from atoll.wire.subjects import Subjects

LET_GO_S = 1.0
"""Within this a broker that follows the folder has let go of who is revoked."""
CLEAR_LOOKS = 5

Folder = Annotated[Path, typer.Argument(help="The folder of keys.")]
Name = Annotated[str, typer.Argument(help="Name of the identity; for a learner its id.")]
OfRun = Annotated[str, typer.Option("--run", help="Run that the identity is of.")]
Names = Annotated[list[str], typer.Option(help="Name of an identity of this kind; repeatable.")]
Place = Annotated[
    str, typer.Option("--region", help="Region that a learner is in, or hub for who connects to the hub itself.")
]
Days = Annotated[float, typer.Option(help="Days until the key ends; 0 for no end.", min=0.0, max=36500.0)]
Hosts = Annotated[
    list[str], typer.Option("--host", help="Name or address by which clients reach the broker; repeatable.")
]


verbs = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@verbs.command(name="new")
def new(folder: Folder, hosts: Hosts = ["127.0.0.1", "localhost"]) -> None:  # noqa: B006  (typer copies it)
    """Make a folder of keys: an authority, a broker's certificate, an operator."""
    path = KeyFolder(folder).create(hosts, time.time())
    say(f"keys in {folder}; the broker is reached as {', '.join(hosts)}")
    say(f"your own identity, an operator of every run: {path}")
    say(f"next: atoll keys add {folder} NAME --run RUN, then atoll broker --keys {folder}")


@verbs.command(name="add")
def add(  # noqa: PLR0913  (one option each)
    folder: Folder,
    name: Name,
    *,
    run: OfRun = "",
    kind: Annotated[
        Literal["learner", "synchronizer", "reader", "evaluator", "region", "premerger", "operator"],
        typer.Option(help="What it may do; a premerger is the synchronizer of a region, and called REGION-premerge."),
    ] = "learner",
    founds: Annotated[
        bool, typer.Option("--founds", help="A learner, or a region of one, that may also begin the run.")
    ] = False,
    region: Place = "",
    days: Days = 0.0,
) -> None:
    """Let an identity in, and write the file to hand to its holder."""
    if founds and kind not in ("learner", "region"):
        raise SettingsError(
            "only a learner founds a run, or does it through its region",
            got=f"--founds with --kind {kind}",
            todo="leave --founds away",
        )
    if run and kind == "operator":
        raise SettingsError(
            "an operator is of every run", got=f"--run {run}", todo="leave --run away, or choose another kind"
        )
    if not run and kind != "operator":
        raise SettingsError("an identity is of one run", got=f"--kind {kind} without --run", todo="give --run")
    now_s = time.time()
    until_s = now_s + days * DAY_S if days else 0.0
    keys = KeyFolder(folder)
    path = keys.add(name, kind, run, now_s, founds=founds, until_s=until_s, region=region)
    say(f"{kind} {name}: {path}")
    _mind_region(keys, run, region)
    say(
        f"hand this file to its holder over a private channel, then delete it here; use: ATOLL_BROKER__IDENTITY={path.name}"
    )


@verbs.command(name="provide")
def provide(  # noqa: PLR0913  (one option each)
    folder: Folder,
    *,
    into: Annotated[
        Path,
        typer.Option(help="Below it, NAME/identity.toml for each, a region's door with it, and broker/ with the door."),
    ],
    run: Annotated[str, typer.Option(help="Run that the identities are of.")],
    hosts: Hosts = ["127.0.0.1", "localhost"],  # noqa: B006  (typer copies it)
    region: Annotated[
        list[str], typer.Option(help="NAME or NAME=HOST,HOST of a region, and where its broker is reached; repeatable.")
    ] = [],  # noqa: B006
    learner: Annotated[
        list[str],
        typer.Option(help="Name of a learner, or NAME=REGION, or NAME=hub, which says where it is; repeatable."),
    ] = [],  # noqa: B006
    synchronizer: Names = [],  # noqa: B006
    evaluator: Names = [],  # noqa: B006
    reader: Names = [],  # noqa: B006
    premerger: Names = [],  # noqa: B006
) -> None:
    """Make what is missing, and copy each identity into a folder of its own."""
    named = (each.partition("=") for each in region)
    regions = {name: reached.split(",") if reached else [name] for name, _, reached in named}
    at = {name: place for name, said, place in (each.partition("=") for each in learner) if said}
    kinds: dict[str, Kind] = {
        **dict.fromkeys(regions, "region"),
        **dict.fromkeys((each.partition("=")[0] for each in learner), "learner"),
        **dict.fromkeys(synchronizer, "synchronizer"),
        **dict.fromkeys(evaluator, "evaluator"),
        **dict.fromkeys(reader, "reader"),
        **dict.fromkeys(premerger, "premerger"),
    }
    keys = KeyFolder(folder)
    try:
        ensure(keys, run, kinds, hosts, regions=at)
        changed = hand_out(keys, run, kinds, into, regions)
    except OSError as error:
        raise EnvironmentFault(
            "the keys cannot be handed out", got=f"{error.filename}: {error.strerror}", todo="see who owns that folder"
        ) from error
    for path in changed:
        say(f"wrote {path}")
    identities = counted(len(kinds), "identity", "identities")
    say(f"{identities} of run {run} in {into}; {counted(len(changed), 'file')} changed")


@verbs.command(name="list")
def list_keys(folder: Folder, *, json: Json = False) -> None:
    """List who may enter: kind, run, state, when their keys end."""
    now_s, keys = time.time(), KeyFolder(folder)
    entries = keys.read().entries
    if json:
        rows = [
            {"name": one.name, "kind": one.kind, "run": one.run, "founds": one.founds, "state": one.state(now_s)}
            | {"region": one.region or None}
            | {"keys": [{"public": key.public, "until_s": key.until_s or None} for key in one.keys]}
            for one in entries
        ]
        say_json(rows)
        return
    _show(entries, now_s)
    try:
        certificate = keys.shown(now_s).certificate
    except AtollError as error:
        say(on_one_line(str(error)))
        return
    hosts, left = ", ".join(hosts_of(certificate)), as_time(ends_at_s(certificate) - now_s)
    say(f"these may enter; the broker's certificate is for {hosts} and holds for {left}")


@verbs.command(name="move")
def move(
    folder: Folder,
    name: Name,
    *,
    run: OfRun = "",
    region: Annotated[str, typer.Option(help="Region that it is in, hub for none, or empty where nobody knows.")],
) -> None:
    """Say where a learner is: only its region's broker may then write for it."""
    keys = KeyFolder(folder)
    keys.move(name, run, region, time.time())
    if region:
        what = "from no region's broker" if region == "hub" else f"from the broker of {region}, of no other region"
        say(f"{name} is in {region}: the hub takes what it writes from itself, and {what}")
    else:
        say(f"nobody knows where {name} is: the hub takes what it writes from the broker of any region of its run")
    say("the brokers of regions let it in or out when they have the new roll.json")
    _mind_region(keys, run, region)


@verbs.command(name="revoke")
def revoke(folder: Folder, name: Name, run: OfRun = "", broker: Broker = None) -> None:
    """Let an identity in no more; if it is connected, it is cut off."""
    if broker is not None and not run:
        raise SettingsError(
            "what an identity has stored is of one run", got="--broker without --run", todo="give --run"
        )
    KeyFolder(folder).revoke(name, run, time.time())
    if broker is not None:
        removed, goes_on = asyncio.run(_clear(KeyFolder(folder), name, run, broker))
        say(f"removed {counted(removed, 'message')} that {name} had queued or stored")
        if goes_on:
            say(f"{name} stores more: its broker has not let go of it; once it has, give this command again")
    elif run:
        say(
            f"what {name} has queued or stored stays at the broker until it is merged or two hours old; "
            "--broker URL removes it, now or later"
        )
    say(f"revoked {name}; a broker that follows {folder} has let go of it within a second")
    say("a broker on another machine lets it in until it has the new roll.json, and so does each node of a cluster")


async def _clear(keys: KeyFolder, name: str, run: str, broker: str) -> tuple[int, bool]:
    """Remove the chunks and the queued messages of an identity; return how many those were, and whether there come more.

    Its broker lets go of it within a second, so there is a second look, and a few more.
    """
    operator = read_identity(keys.path / "identities" / f"{OPERATOR}.toml")
    bus = await open_bus(broker, run, name="keys", options=BusOptions(credentials=operator.credentials()))
    try:
        p, removed = Subjects(run).prefix, 0
        for _ in range(CLEAR_LOOKS):
            found = await bus.purge(f"{p}.up.c.{name}.>") + await bus.purge(f"{p}.up.m.*.*.{name}")
            removed += found
            if not found:
                return removed, False
            await asyncio.sleep(LET_GO_S)
        return removed, True
    finally:
        await bus.close()


@verbs.command(name="rotate")
def rotate(
    folder: Folder,
    name: Name,
    run: OfRun = "",
    overlap_minutes: Annotated[
        float, typer.Option(help="Minutes for which the former key still holds.", min=0.0, max=525600.0)
    ] = 60.0,
    days: Days = 0.0,
    readmit: Annotated[bool, typer.Option("--readmit", help="Let in again who was revoked.")] = False,  # noqa: FBT002
) -> None:
    """Give an identity a new key; the former one holds for a while."""
    now_s, keys = time.time(), KeyFolder(folder)
    # A revoked one has no keys, and neither has one whose keys have all ended: nothing holds on.
    holding = [
        key
        for one in keys.read().entries
        if one.name == name and one.run in (run, "*")
        for key in one.keys
        if key.holds(now_s)
    ]
    path = keys.rotate(
        name,
        run,
        now_s,
        overlap_s=60.0 * overlap_minutes,
        until_s=now_s + days * DAY_S if days else 0.0,
        readmit=readmit,
    )
    say(f"new key of {name}: {path}")
    if holding and overlap_minutes:
        ends_s = max(key.until_s or math.inf for key in holding) - now_s  # it may end before the overlap does
        ends = f"the former key ends in {min(overlap_minutes, ends_s / 60.0):.3g} minutes"
        say(f"send the new file to its holder, who restarts with it before {ends}")
    elif holding:
        say("the former key has ended; send the new file to its holder, who restarts with it")
    else:
        say(f"{name} is let in again; send the new file to its holder")


@verbs.command(name="certificate")
def certificate(folder: Folder, hosts: Hosts) -> None:
    """Give the broker a new certificate, for these hosts."""
    KeyFolder(folder).certify(hosts)
    say(f"certificate for {', '.join(hosts)}; a broker that follows {folder} uses it from its next connection on")
    say("copy it to all nodes of a cluster in one go: they take no other certificate than their own")


def _mind_region(keys: KeyFolder, run: str, region: str) -> None:
    """Say so if a learner is in a region that has no broker: its name may be misspelt."""
    there = keys.read().of(run, region)
    if region not in ("", "hub") and (there is None or there.kind != "region"):
        say(
            f"the roll has no region {region} of run {run} yet: atoll keys add {keys.path} {region} --kind region --run {run}"
        )


def _show(entries: tuple[RollEntry, ...], now_s: float) -> None:
    table = plain_table(("run", "name", "kind", "region", "state", "keys end"))
    for one in entries:
        ends = [
            "never" if not key.until_s else f"in {as_time(key.until_s - now_s)}" for key in one.keys if key.holds(now_s)
        ]
        kind = f"{one.kind}, founds" if one.founds else one.kind
        table.add_row(one.run, one.name, kind, one.region or "-", one.state(now_s), ", ".join(ends) or "-")
    print_table(table)
