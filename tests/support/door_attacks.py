"""What an intruder tries at a locked broker, as a table; and whether anything got in.

The intruder holds an identity of its own, a valid one: whoever has none does not get that far. It tries to write as another, to
have an answer written where it may not write, to hear what is not for it, and to use JetStream on the streams. An operator
watches the subject that is aimed at: what arrives there with the intruder's mark, or as an answer of the broker's, got in.

The victim is on the roll and never connects, so honest traffic has no part in what the operator sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final, Literal

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from atoll.keys.identity import HeldIdentity
from atoll.wire.subjects import Subjects

INTRUDER, VICTIM, SPY = "mallory", "victim", "spy"
SETTLE_S: Final = 0.25
NO_RESPONDERS: Final = "503"
_ANSWERS: Final = (b"io.nats.jetstream", b'{"stream":')


@dataclass(frozen=True, slots=True)
class DoorAttack:
    """One row: what is tried on which subject, and where its answer is sent.

    `{p}` stands for the prefix of the run's subjects, `{run}` for the run, `{me}` and `{victim}` for the two learners,
    `{inbox}` for the operator's inbox. `who` is the intruder: a learner, or a reader (`spy`).
    """

    name: str
    verb: Literal["publish", "ask", "reroute", "hear"]
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
        "another's lent state": "{p}.ps.c.{victim}.1-abcd.0",
        "a presence": "{p}.sy.host",
        "a tap": "{p}.tap.gl.head.0",
        "an answer to an operator": "{inbox}.answer",
        "a run of its own": "atoll.another.gl.run",
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
ATTACKS: Final = (*FORGERIES, *JETSTREAM, *REROUTED, *EAVESDROPPING, *WRITING_READER)


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
        """Ask, and return the answer."""
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

    async def _settle(self, intruder: Client) -> None:
        """Return once the broker has done all it will do; what it refuses it has refused when the intruder's echo is back."""
        for client in (intruder, self.operator, intruder):
            await client.flush()
        if not self.errors:
            await asyncio.sleep(SETTLE_S)
            await self.operator.flush()
            await intruder.flush()


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
    """Yield the operator and the intruders of a run, connected to the broker at `url`."""
    made = DoorWitness(run, Client(), operator.credentials().inbox, {})
    async with contextlib.AsyncExitStack() as stack:
        made.operator = await stack.enter_async_context(_connected(url, operator, []))
        for name, identity in intruders.items():
            made.intruders[name] = await stack.enter_async_context(_connected(url, identity, made.errors))
        yield made


@contextlib.asynccontextmanager
async def _connected(url: str, identity: HeldIdentity, errors: list[str]) -> AsyncIterator[Client]:
    mine = identity.credentials()

    async def note(error: Exception) -> None:
        errors.append(str(error))

    client = await nats.connect(
        url, nkeys_seed_str=mine.seed, inbox_prefix=mine.inbox, tls=mine.tls(), error_cb=note, allow_reconnect=False
    )
    try:
        yield client
    finally:
        await client.close()
