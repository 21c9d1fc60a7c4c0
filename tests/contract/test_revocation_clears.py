"""A revoked learner leaves nothing behind that takes room, and nobody else loses anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

from atoll.cli.keys import revoke
from atoll.wire.subjects import Subjects
from support.links import unique_run
from support.locked_brokers import LockedBroker


async def test_revoking_removes_what_was_stored(tmp_path: Path) -> None:
    run = unique_run()
    s = Subjects(run)
    with LockedBroker(tmp_path) as locked:
        locked.add(run, "ada", founds=True)
        locked.add(run, "mallory")
        ada, mallory = [await locked.bus(run, locked.identity(run, name)) for name in ("ada", "mallory")]
        await ada.provision(64 << 20)
        for bus, name in ((ada, "ada"), (mallory, "mallory")):
            await bus.put_blob(s.contribution_stem(name, 0, 1, 1, "0" * 16), b"x")
            await bus.publish(s.contribution(0, 0, name), b"{}", msg_id=name)
        await mallory.close()

        await asyncio.to_thread(revoke, locked.keys.path, "mallory", run, locked.url)

        operator = await locked.bus(run, locked.operator)
        left = [await operator.count_stored(f"{s.prefix}.up.{kind}.>", more_than=0) for kind in ("c", "m")]
        assert [list(one.by_subject) for one in left] == [
            [f"{s.contribution_stem('ada', 0, 1, 1, '0' * 16)}.0"],
            [s.contribution(0, 0, "ada")],
        ]
        await operator.close()
        await ada.close()
