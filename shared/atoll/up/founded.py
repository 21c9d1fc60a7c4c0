"""The run record from outside: what a supervisor may read of it, and the one thing it may change.

A run's agreement is written once by its founder. Only its token target may be changed later, and only while none of its
processes runs: they read the record when they start.
"""

from __future__ import annotations

import msgspec

from atoll.bus.interface import Bus, Record
from atoll.bus.subjects import Subjects
from atoll.errors import ProtocolMisuse
from atoll.wire.messages import RunRecord, decode, encode


async def raise_target(bus: Bus, run: str, target: int) -> bool:
    """Write `target` (tokens, 0 for none) into the record of `run` by compare-and-set; return whether it changed.

    Raises:
        RecordConflict: somebody else wrote the record at this moment.
    """
    record = await _read(bus, run)
    if record is None:
        return False
    founded = decode(RunRecord, record.data)
    if founded.protocol.tokens_target == target:
        return False
    protocol = msgspec.structs.replace(founded.protocol, tokens_target=target)
    changed = msgspec.structs.replace(founded, protocol=protocol)
    await bus.put_record(record.subject, encode(changed), expected=record.revision, info={"run": run})
    return True


async def data_hash(bus: Bus, run: str) -> str:
    """Return the fingerprint of the run's data, empty when the run is not founded or does not say."""
    record = await _read(bus, run)
    return "" if record is None else decode(RunRecord, record.data).data


async def _read(bus: Bus, run: str) -> Record | None:
    try:
        return await bus.get_record(Subjects(run).run_record)
    except ProtocolMisuse:
        # JetStream has no such stream: the run was stopped before anybody founded it.
        return None
