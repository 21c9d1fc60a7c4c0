"""What an intruder tries at a locked broker, as a table; and whether anything got in.

The intruder holds an identity of its own, a valid one: whoever has none does not get that far. It tries to write as another, to
have an answer written where it may not write, to hear what is not for it, and to use JetStream on the streams. An operator
watches the subject that is aimed at: what arrives there with the intruder's mark, or as an answer of the broker's, got in.

A learner may write events of its own, so it also writes there what no learner of ours does: numbers and texts without end, and
words in the name of others (`MISLEADING`). The broker stores them. Whoever reads the event log must refuse each, say whose it
was, draw the run, and do so again at every later start (`atoll.wire.events`).

The victim is on the roll, at the hub, and never connects, so honest traffic has no part in what the operator sees. An intruder
with the key of a region's broker may send over its link what learners may, and the hub takes of it what its own learners may.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from atoll.base.clock import SystemClock
from atoll.bus.interface import Bus
from atoll.bus.open import open_bus
from atoll.bus.options import BusOptions, addresses
from atoll.keys.identity import HeldIdentity
from atoll.local.console import ConsolePicture
from atoll.local.console_tables import PANELS, TopMoment, heading, numbers
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History
from atoll.run.watch import Watch
from atoll.wire.subjects import Subjects
from atoll_monitor import metrics
from atoll_monitor.dashboard import RunScene
from atoll_monitor.monitored_run import MonitoredRun
from atoll_monitor.records import samples_by_name

INTRUDER, VICTIM, SPY, PREMERGER, LEAF = "mallory", "victim", "spy", "far-premerge", "far"
VICTIMS_PLACE: Final = "hub"
SETTLE_S: Final = 0.25
STORED_S: Final = 60.0
NO_RESPONDERS: Final = "503"
_ANSWERS: Final = (b"io.nats.jetstream", b'{"stream":')


@dataclass(frozen=True, slots=True)
class DoorAttack:
    """One row: what is tried on which subject, and where its answer is sent.

    `{p}` stands for the prefix of the run's subjects, `{run}` for the run, `{me}` and `{victim}` for the two learners,
    `{inbox}` for the operator's inbox. `who` is the intruder: a learner, a reader (`spy`), or the synchronizer or the broker of
    a region.
    """

    name: str
    verb: Literal["publish", "ask", "reroute", "hear", "mislead"]
    subject: str
    body: str = "{mark}"
    reply: str = ""
    who: str = INTRUDER


def _publishes(who: str, rows: dict[str, str]) -> tuple[DoorAttack, ...]:
    return tuple(DoorAttack(name, "publish", subject, who=who) for name, subject in rows.items())


_GET_RUN: Final = '{{"multi_last":["{p}.gl.run"],"batch":1}}'
_LAST_RUN: Final = '{{"last_by_subj":"{p}.gl.run"}}'
_STREAM: Final = '{{"name":"mine","subjects":["mine.>"],"storage":"file"}}'
_PUSHED: Final = (
    '{{"stream_name":"atoll_{run}_UPM","config":{{"deliver_subject":"{p}.hb.{victim}","ack_policy":"none"}}}}'
)

FORGERIES: Final = _publishes(
    INTRUDER,
    {
        "a head": "{p}.gl.head.0",
        "the run record": "{p}.gl.run",
        "a lease": "{p}.gl.lease.0",
        "a keyframe's chunk": "{p}.gl.c.0.1.1.abcd.0",
        "a keyframe of version 0": "{p}.gl.c.0.0.abcd.0",
        "a delta's chunk": "{p}.gl.d.0.1.1.abcd.0",
        "an outer state": "{p}.st.c.0.1.1.abcd.0",
        "a ledger": "{p}.st.b.0.1.abcd.0",
        "a call": "{p}.call.0",
        "a verdict": "{p}.ctl.{victim}.verdict",
        "a command to all": "{p}.ctl.all",
        "a command to another": "{p}.ctl.{victim}",
        "another's manifest": "{p}.up.m.0.0.{victim}",
        "another's farewell": "{p}.up.m.0.bye.{victim}",
        "another's chunk": "{p}.up.c.{victim}.0.1-1.0",
        "another's heartbeat": "{p}.hb.{victim}",
        "another's member record": "{p}.mb.learner.{victim}",
        "another's event": "{p}.ev.left.{victim}",
        "an event of a shard": "{p}.ev.round.shard-0",
        "a commit, under its own name": "{p}.ev.round.{me}",
        "a closed ledger, under its own name": "{p}.ev.ledger.{me}",
        "a quarantine, under its own name": "{p}.ev.quarantined.{me}",
        "a synchronizer's presence, under its own name": "{p}.ev.hosted.{me}",
        "an evaluator's measurement": "{p}.ev.validation.evaluator",
        "a measurement, under its own name": "{p}.ev.validation.{me}",
        "an event of no kind": "{p}.ev.unheard_of.{me}",
        "another's lent state": "{p}.ps.c.{victim}.1-abcd.0",
        "a presence": "{p}.sy.host",
        "a tap": "{p}.tap.gl.head.0",
        "an answer to an operator": "{inbox}.answer",
        "a run of its own": "atoll.another.gl.run",
        "a question to a region": "{p}.pm.near",
        "a region's answer": "{p}.pm.near.abcd",
        "a region's sum": "{p}.up.c.sum.0.near.1-abcd.0",
        "a word to a region's keeper": "{p}.rg.near.kept",
    },
)
JETSTREAM: Final = (
    DoorAttack("deletes a stream", "ask", "$JS.API.STREAM.DELETE.atoll_{run}_GL", ""),
    DoorAttack("purges a stream", "ask", "$JS.API.STREAM.PURGE.atoll_{run}_UPC", ""),
    DoorAttack(
        "changes a stream", "ask", "$JS.API.STREAM.UPDATE.atoll_{run}_GL", '{{"name":"atoll_{run}_GL","max_msgs":1}}'
    ),
    DoorAttack("creates a stream without a bound", "ask", "$JS.API.STREAM.CREATE.mine", _STREAM),
    DoorAttack("deletes a message", "ask", "$JS.API.STREAM.MSG.DELETE.atoll_{run}_GL", '{{"seq":1}}'),
    DoorAttack("lists the streams", "ask", "$JS.API.STREAM.LIST", ""),
    DoorAttack("copies a stream", "ask", "$JS.API.STREAM.SNAPSHOT.atoll_{run}_GL", '{{"deliver_subject":"x"}}'),
    DoorAttack("reads others' contributions", "ask", "$JS.API.STREAM.MSG.GET.atoll_{run}_UPC", '{{"seq":1}}'),
    DoorAttack("creates a consumer", "ask", "$JS.API.CONSUMER.CREATE.atoll_{run}_UPM", _PUSHED),
    DoorAttack("deletes the shard's consumer", "ask", "$JS.API.CONSUMER.DELETE.atoll_{run}_UPM.shard-0", ""),
    DoorAttack("takes from the shard's queue", "ask", "$JS.API.CONSUMER.MSG.NEXT.atoll_{run}_UPM.shard-0", ""),
    DoorAttack("settles the shard's queue", "ask", "$JS.ACK.atoll_{run}_UPM.shard-0.1.1.1.1.1", "+ACK"),
    DoorAttack("purges the account", "ask", "$JS.API.ACCOUNT.PURGE.core", ""),
    DoorAttack("asks the system account", "ask", "$SYS.REQ.SERVER.PING", ""),
)
REROUTED: Final = (
    DoorAttack("a page as a head", "reroute", "$JS.API.DIRECT.GET.atoll_{run}_GL", _GET_RUN, "{p}.gl.head.0"),
    DoorAttack(
        "a page as another's manifest",
        "reroute",
        "$JS.API.DIRECT.GET.atoll_{run}_GL",
        _GET_RUN,
        "{p}.up.m.0.0.{victim}",
    ),
    DoorAttack(
        "a record as another's member record",
        "reroute",
        "$JS.API.STREAM.MSG.GET.atoll_{run}_GL",
        _LAST_RUN,
        "{p}.mb.learner.{victim}",
    ),
    DoorAttack("an acknowledgement as a lease", "reroute", "{p}.up.m.0.0.{me}", "{mark}", "{p}.gl.lease.0"),
    DoorAttack(
        "an acknowledgement as another's chunk",
        "reroute",
        "{p}.up.c.{me}.0.1-1.0",
        "{mark}",
        "{p}.up.c.{victim}.0.1-1.0",
    ),
    DoorAttack("account facts as a command to all", "reroute", "$JS.API.INFO", "", "{p}.ctl.all"),
    DoorAttack(
        "a page into an operator's inbox", "reroute", "$JS.API.DIRECT.GET.atoll_{run}_GL", _GET_RUN, "{inbox}.answer"
    ),
    DoorAttack(
        "a reader's page as a head", "reroute", "$JS.API.DIRECT.GET.atoll_{run}_GL", _GET_RUN, "{p}.gl.head.0", SPY
    ),
)
EAVESDROPPING: Final = (
    DoorAttack("everything", "hear", ">", reply="{p}.up.m.0.0.{victim}"),
    DoorAttack("all contributions", "hear", "{p}.up.>", reply="{p}.up.m.0.0.{victim}"),
    DoorAttack("others' heartbeats", "hear", "{p}.hb.*", reply="{p}.hb.{victim}"),
    DoorAttack("others' verdicts", "hear", "{p}.ctl.{victim}.>", reply="{p}.ctl.{victim}.verdict"),
    DoorAttack("an operator's inbox", "hear", "{inbox}.>", reply="{inbox}.answer"),
    DoorAttack("all inboxes", "hear", "_INBOX.>", reply="{inbox}.answer"),
    DoorAttack("JetStream's own subjects", "hear", "$JS.>", reply="$JS.API.STREAM.LIST"),
    DoorAttack("contributions, as a reader", "hear", "{p}.up.>", reply="{p}.up.m.0.0.{victim}", who=SPY),
    DoorAttack("what shards ask a region", "hear", "{p}.pm.>", reply="{p}.pm.near"),
    DoorAttack("what shards ask another region", "hear", "{p}.pm.near", reply="{p}.pm.near", who=PREMERGER),
    DoorAttack("heartbeats, as a region", "hear", "{p}.hb.*", reply="{p}.hb.{victim}", who=PREMERGER),
)
WRITING_READER: Final = _publishes(
    SPY,
    {
        "a reader's head": "{p}.gl.head.0",
        "a reader's heartbeat": "{p}.hb.{me}",
        "a reader's event": "{p}.ev.validation.{me}",
        "a reader's manifest": "{p}.up.m.0.0.{me}",
        "a reader's command": "{p}.ctl.all",
    },
)
WRITING_REGION: Final = (
    *_publishes(
        PREMERGER,
        {
            "another region's answer": "{p}.pm.near.abcd",
            "another region's sum": "{p}.up.c.sum.0.near.1-abcd.0",
            "a question to its own region": "{p}.pm.far",
            "a region's head": "{p}.gl.head.0",
            "a region's lease": "{p}.gl.lease.0",
            "a region's outer state": "{p}.st.c.0.1.1.abcd.0",
            "a region's manifest": "{p}.up.m.0.0.{me}",
            "a learner's chunk, as a region": "{p}.up.c.{victim}.0.1-1.0",
            "a region's member record": "{p}.mb.learner.{me}",
            "a region's call": "{p}.call.0",
            "a region's event": "{p}.ev.round.shard-0",
        },
    ),
    DoorAttack("purges contributions, as a region", "ask", "$JS.API.STREAM.PURGE.atoll_{run}_UPC", "", who=PREMERGER),
    DoorAttack(
        "creates a consumer, as a region", "ask", "$JS.API.CONSUMER.CREATE.atoll_{run}_UPM", _PUSHED, who=PREMERGER
    ),
    DoorAttack(
        "a region's page as a head",
        "reroute",
        "$JS.API.DIRECT.GET.atoll_{run}_GL",
        _GET_RUN,
        "{p}.gl.head.0",
        PREMERGER,
    ),
)
SWALLOWED: Final = _publishes(
    LEAF,
    {
        "the manifest of a learner elsewhere": "{p}.up.m.0.0.{victim}",
        "the farewell of a learner elsewhere": "{p}.up.m.0.bye.{victim}",
        "a chunk of a learner elsewhere": "{p}.up.c.{victim}.0.1-1.0",
        "the heartbeat of a learner elsewhere": "{p}.hb.{victim}",
        "the member record of a learner elsewhere": "{p}.mb.learner.{victim}",
        "an event of a learner elsewhere": "{p}.ev.left.{victim}",
        "the manifest of nobody": "{p}.up.m.0.0.nobody",
        "a chunk of nobody": "{p}.up.c.nobody.0.1-1.0",
        "a sum of another region, as its broker": "{p}.up.c.sum.0.near.1-abcd.0",
        "a commit, as a region's broker": "{p}.ev.round.shard-0",
        "another record beside the members'": "{p}.mb.other",
    },
)
"""What the link of a region may carry, and its account at the hub does not import: nobody is told, and nobody hears it."""
CARRYING_REGION: Final = (
    *SWALLOWED,
    *_publishes(
        LEAF,
        {
            "a head, as a region's broker": "{p}.gl.head.0",
            "the run record, as a region's broker": "{p}.gl.run",
            "a keyframe of version 0, as a region's broker": "{p}.gl.c.0.0.abcd.0",
            "a call, as a region's broker": "{p}.call.0",
            "a verdict, as a region's broker": "{p}.ctl.{victim}.verdict",
            "a command to all, as a region's broker": "{p}.ctl.all",
            "a presence, as a region's broker": "{p}.sy.host",
            "a lent state, as a region's broker": "{p}.ps.c.{victim}.1-abcd.0",
            "an answer of another region's synchronizer": "{p}.pm.near.abcd",
        },
    ),
    DoorAttack(
        "purges contributions, as a region's broker", "ask", "$JS.API.STREAM.PURGE.atoll_{run}_UPC", "", who=LEAF
    ),
    DoorAttack("deletes a stream, as a region's broker", "ask", "$JS.API.STREAM.DELETE.atoll_{run}_GL", "", who=LEAF),
    DoorAttack(
        "creates a consumer, as a region's broker", "ask", "$JS.API.CONSUMER.CREATE.atoll_{run}_UPM", _PUSHED, who=LEAF
    ),
    DoorAttack(
        "a page as a head, as a region's broker",
        "reroute",
        "$JS.API.DIRECT.GET.atoll_{run}_GL",
        _GET_RUN,
        "{p}.gl.head.0",
        LEAF,
    ),
    DoorAttack(
        "a page as a manifest from elsewhere",
        "reroute",
        "$JS.API.DIRECT.GET.atoll_{run}_GL",
        _GET_RUN,
        "{p}.up.m.0.0.{victim}",
        LEAF,
    ),
    DoorAttack("contributions, as a region's broker", "hear", "{p}.up.>", reply="{p}.up.m.0.0.{victim}", who=LEAF),
)


def _misleads(name: str, on: str, kind: str = "", who: str = "@me", at_s: float = 1.0, **fields: Any) -> DoorAttack:  # noqa: ANN401
    """Return a row: an event on the intruder's subject of kind `on`, whose body says `kind` and `who`."""
    body = json.dumps({"kind": kind or on, "who": who, "at_s": at_s, "fields": fields | {"mark": "@mark"}, "schema": 1})
    body = body.replace("{", "{{").replace("}", "}}")
    for level in ("me", "victim", "mark"):
        body = body.replace(f"@{level}", f"{{{level}}}")
    return DoorAttack(name, "mislead", f"{{p}}.ev.{on}.{{me}}", body)


ENDLESS: Final = 10**400
_SAMPLE: Final[dict[str, Any]] = {"incarnation": 1, "step": 1, "tokens": 1}
_COMMIT: Final[dict[str, Any]] = {
    "fragment": 0,
    "version": 1,
    "contributors": [],
    "run_tokens": 1 << 50,
    "end": "@mark",
}
MISLEADING: Final = (
    _misleads("a count of 400 digits", "sample", **_SAMPLE | {"tokens": ENDLESS}),
    _misleads("a figure of 400 digits", "sample", **_SAMPLE | {"tokens_per_s": ENDLESS}),
    _misleads("a figure of 1e308", "sample", **_SAMPLE | {"loss": 1e308}),
    _misleads("tokens below nothing", "left", incarnation=1, tokens=-ENDLESS, steps=1),
    _misleads("a life of 400 digits", "joined", incarnation=ENDLESS),
    _misleads("bytes of 400 digits", "moved", role="learner", incarnation=1, moved={"wire_up": ENDLESS}),
    _misleads("a time that no calendar has", "sample", at_s=1e300, **_SAMPLE),
    _misleads("the farewell of another", "left", who="@victim", incarnation=1, tokens=1, steps=1),
    _misleads("a commit, as its own sample", "sample", kind="round", who="shard-0", **_COMMIT),
    _misleads("a commit, as a sample under its own name", "sample", kind="round", **_COMMIT),
    _misleads("a closed ledger, as its own farewell", "left", kind="ledger", who="shard-0", ledger={}),
    _misleads("a measurement, as its own sample", "sample", "validation", "evaluator", run_tokens=1, bits_per_byte=0.1),
    _misleads("the presence of a synchronizer", "moved", role="synchronizer", moved={}, owns=[0], shards=[0]),
    _misleads("the presence of a synchronizer, as its own bytes", "moved", kind="hosted", moved={}, owns=[0]),
    _misleads("markup for a page", "moved", role="<img src=x onerror=@mark>", moved={}),
    _misleads("an escape sequence for a terminal", "sample", **_SAMPLE | {"state": "\x1b[2J@mark"}),
    _misleads("a name with markup", "joined", who="[link=@mark]x[/link]", incarnation=1),
    _misleads("a text of 100 kB", "sample", **_SAMPLE | {"state": "@mark" * 5000}),
)
"""What a learner writes where it may write."""
NOWHERE: Final = (
    DoorAttack("a manifest for a shard that does not exist", "ask", "{p}.up.m.3000.0.{me}"),
    DoorAttack("a manifest at another shard's fragment", "ask", "{p}.up.m.1.4095.{me}"),
    DoorAttack("a farewell to a shard that does not exist", "ask", "{p}.up.m.3000.bye.{me}"),
    DoorAttack("a chunk of a fragment that does not exist", "ask", "{p}.up.c.{me}.4095.1-1.0"),
    DoorAttack("a chunk of no form", "ask", "{p}.up.c.{me}.0.1-1.0.0.0"),
    DoorAttack("a sum of a fragment that does not exist", "ask", "{p}.up.c.sum.4095.far.1-abcd.0", who=PREMERGER),
)
"""What rights allow, and a run does not have: the broker keeps nothing of it once a shard is served."""
ATTACKS: Final = (
    *NOWHERE,
    *FORGERIES,
    *JETSTREAM,
    *REROUTED,
    *EAVESDROPPING,
    *WRITING_READER,
    *WRITING_REGION,
    *CARRYING_REGION,
    *MISLEADING,
)


@dataclass(frozen=True, slots=True)
class Breach:
    """What one attack achieved: what got in (empty for nothing), and what the broker told the intruder."""

    got_in: str
    told: str


@dataclass
class DoorWitness:
    """The intruders and the operator of one locked run, connected."""

    run: str
    operator: Client
    operator_inbox: str
    intruders: dict[str, Client]
    reader: Bus
    errors: list[str] = field(default_factory=list)

    async def play(self, attack: DoorAttack) -> Breach:
        """Try one attack and return what came of it."""
        names = {"p": Subjects(self.run).prefix, "run": self.run, "me": attack.who, "victim": VICTIM}
        names |= {"inbox": self.operator_inbox, "mark": f"mark-{secrets.token_hex(6)}"}
        subject, reply = attack.subject.format(**names), attack.reply.format(**names)
        body, mark = attack.body.format(**names).encode(), names["mark"].encode()
        intruder = self.intruders[attack.who]
        self.errors.clear()
        if attack.verb == "hear":
            got_in = await self._heard(intruder, subject, reply, mark)
        elif attack.verb == "mislead":
            got_in = await self._believed(intruder, subject, body, mark, attack.who)
        elif attack.verb == "ask":
            got_in = await self._answered(intruder, subject, body)
        else:
            got_in = await self._arrived(intruder, subject, body, reply, mark)
        return Breach(got_in, "; ".join(self.errors))

    async def _arrived(self, intruder: Client, subject: str, body: bytes, reply: str, mark: bytes) -> str:
        """Publish, and return what the operator saw on the subject that was aimed at."""
        target = reply or subject
        async with _listening(self.operator, target) as seen:
            await intruder.publish(subject, body, reply=reply)
            await self._settle(intruder)
        wrong = [one for one in seen if _is_foreign(one, mark)]
        return f"{len(wrong)} messages on {target}" if wrong else ""

    async def _answered(self, intruder: Client, subject: str, body: bytes) -> str:
        inbox = intruder.new_inbox()
        async with _listening(intruder, inbox) as answers:
            await intruder.publish(subject, body, reply=inbox)
            await self._settle(intruder)
        told = [one for one in answers if (one.headers or {}).get("Status") != NO_RESPONDERS]
        return f"an answer on {subject}: {told[0].data[:120]!r}" if told else ""

    async def _heard(self, intruder: Client, subject: str, canary: str, mark: bytes) -> str:
        """Subscribe, have the operator publish on a subject below, and return what was heard."""
        async with _listening(intruder, subject) as heard:
            await self.operator.publish(canary, mark)
            await self._settle(intruder)
        return f"{len(heard)} messages on {subject}" if heard else ""

    async def _believed(self, intruder: Client, subject: str, body: bytes, mark: bytes, who: str) -> str:
        """Have an event stored, and return what those who read the whole event log from its beginning make of it."""
        refused = (await read_all(self.reader, self.run)).refused.get(who, 0)
        async with asyncio.timeout(STORED_S):
            inbox = intruder.new_inbox()
            async with _listening(intruder, inbox) as answers:
                await intruder.publish(subject, body, reply=inbox)
                while not answers and not self.errors:
                    await intruder.flush()
        if self.errors:
            return ""
        try:
            read = await read_all(self.reader, self.run)
        except Exception as error:  # noqa: BLE001  (whatever ends a reader)
            return f"it ends who reads the event log: {error!r}"[:200]
        if mark in read.drawn:
            return f"what stands on {subject} is drawn"
        return "" if read.refused.get(who, 0) == refused + 1 else f"what stands on {subject} is believed"

    async def _settle(self, intruder: Client) -> None:
        """Return once the broker has done all it will do; what it refuses it has refused when the intruder's echo is back."""
        for client in (intruder, self.operator, intruder):
            await client.flush()
        if not self.errors:
            await asyncio.sleep(SETTLE_S)
            await self.operator.flush()
            await intruder.flush()


@dataclass(frozen=True, slots=True)
class LogRead:
    """What readers of an event log drew of it, and how many events they refused, by writer."""

    drawn: bytes
    refused: dict[str, int]


async def read_all(bus: Bus, run: str) -> LogRead:
    """Read the event log of a run as `atoll top`, the monitor, its page and `atoll why` do, and draw all of it."""
    clock = SystemClock()
    watched = MonitoredRun(run, clock)
    scene = RunScene(watched, run, (run,))
    await Watch(bus, run, watched.view, clock).catch_up()
    history = History()
    await history.read(bus, Subjects(run))
    moment = TopMoment(ConsolePicture(watched.view, run, ProtocolSettings(), 0.0, 1.0), clock.wall())
    panels = [dataclasses.asdict(panel(moment)) for panel in PANELS.values()]
    scene.tick()
    told = [
        panels,
        numbers(moment),
        heading(moment),
        scene.state(),
        scene.curves(),
        samples_by_name(metrics.families(watched)),
    ]
    return LogRead(msgspec.json.encode(told), {name: one.count for name, one in watched.view.strange.items()})


@contextlib.asynccontextmanager
async def _listening(client: Client, subject: str) -> AsyncIterator[list[Msg]]:
    """Yield what a client hears on a subject, which the broker knows of when the block begins."""
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    listening = await client.subscribe(subject, cb=hear)
    await client.flush()
    yield heard
    with contextlib.suppress(nats.errors.Error):
        await listening.unsubscribe()


def _is_foreign(message: Msg, mark: bytes) -> bool:
    """Return whether a message carries the intruder's mark or is an answer of the broker's."""
    answers = any(sign in message.data for sign in _ANSWERS) or "Nats-Stream" in (message.headers or {})
    return mark in message.data or answers


@contextlib.asynccontextmanager
async def witness(
    url: str, run: str, operator: HeldIdentity, intruders: dict[str, HeldIdentity]
) -> AsyncIterator[DoorWitness]:
    """Yield the operator and the intruders of a run, connected to the broker at `url`, of a cluster to its first node.

    At one node nothing that the intruder sends is ahead of the operator's ears.
    """
    reader = await open_bus(url, run, name="witness", options=BusOptions(credentials=operator.credentials()))
    made = DoorWitness(run, Client(), operator.credentials().inbox, {}, reader)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(reader.close)
        made.operator = await stack.enter_async_context(connected(url, operator, []))
        for name, identity in intruders.items():
            made.intruders[name] = await stack.enter_async_context(connected(url, identity, made.errors))
        yield made


@contextlib.asynccontextmanager
async def connected(url: str, identity: HeldIdentity, errors: list[str]) -> AsyncIterator[Client]:
    """Yield a connection with an identity's key and without our bus; the broker's errors come into `errors`."""
    mine = identity.credentials()

    async def note(error: Exception) -> None:
        errors.append(str(error))

    client = await nats.connect(
        addresses(url)[0],
        nkeys_seed_str=mine.seed,
        inbox_prefix=mine.inbox,
        tls=mine.tls(),
        error_cb=note,
        allow_reconnect=False,
    )
    try:
        yield client
    finally:
        await client.close()
