"""Keeps the stream that holds what was heard last of each process (`atoll.bus.streams.live_plan`).

It is in memory, and a single server forgets such a stream when it ends. So a shard, which reads a queue, looks for it when it
comes and after every reconnect, and makes it anew. It has as many copies as the run's records. A run founded by a release
before gets it from the first shard of this one.

The run does not need it. If the broker has no memory left for it, or a door made by a release before does not let us ask, the
log says so once, and watchers miss the last heartbeats until somebody changes that.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from atoll.base.errors import AtollError
from atoll.base.logs import get
from atoll.base.retry import Unanswered
from atoll.bus.nats.jetstream_api import NO_STREAM, STREAM_EXISTS, ApiRefusal, JetStream, told
from atoll.bus.nats.provision import stream_config
from atoll.bus.streams import live_plan
from atoll.wire.subjects import Subjects

LOOK_EVERY_S: Final = 1.0
AGAIN_S: Final = 60.0
ANSWER_S: Final = 3.0

log = get(__name__)


async def keep_live_stream(jetstream: JetStream, run: str) -> None:
    """Make the stream of `run` whenever it may be missing, for ever."""
    connection = jetstream.connection
    complained = False
    while True:
        seen, began_s = connection.reconnects, connection.loop.time()
        try:
            made = await make_live_stream(jetstream, run)
        except (ApiRefusal, Unanswered, AtollError) as reason:
            tell = log.debug if complained else log.warning
            tell("taps.no_live_stream", run=run, reason=str(reason))
            complained, again_s = True, AGAIN_S
        else:
            if made:
                log.info("taps.live_stream", run=run)
            complained, again_s = False, float("inf")
        # A connection counts its reconnects and tells nobody.
        while connection.reconnects == seen and connection.loop.time() - began_s < again_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)


async def make_live_stream(jetstream: JetStream, run: str) -> bool:
    """Create the stream if the broker does not have it, and return whether that was so; raise what JetStream says."""
    if await _config_of(jetstream, live_plan(run).name) is not None:
        return False
    records = await _config_of(jetstream, f"atoll_{run}_GL")
    plan = live_plan(run, int((records or {}).get("num_replicas") or 1))
    try:
        await jetstream.once(
            f"{jetstream.root}.STREAM.CREATE.{plan.name}",
            msgspec.json.encode(stream_config(plan, Subjects(run).prefix)),
            timeout_s=ANSWER_S,
        )
    except ApiRefusal as reason:
        if reason.err_code != STREAM_EXISTS:
            raise
        return False
    return True


async def _config_of(jetstream: JetStream, stream: str) -> dict[str, Any] | None:
    """Return the configuration of a stream, None if there is none."""
    try:
        found = await jetstream.once(f"{jetstream.root}.STREAM.INFO.{stream}", b"", timeout_s=ANSWER_S)
    except ApiRefusal as reason:
        if reason.err_code == NO_STREAM:
            return None
        raise
    return told(found, dict[str, Any], "config")
