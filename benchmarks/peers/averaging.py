"""Two peers of hivemind that average float32 values again and again; run in an environment without Atoll.

    averaging.py REQUEST

REQUEST is a JSON object (see `benchmarks.network.bench_peers`). The first peer writes its addresses to the file `meeting`; the
others wait for it. A peer prints one line of JSON for each averaging until it is ended: when it was over and how long it took,
matchmaking included. Nobody trains: between two averagings a peer pauses.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager

MATCHMAKING_S = 0.5
"""For how long a peer looks for others at least; hivemind's own five seconds are for peers that are not in step."""
TIMEOUT_S = 60.0


def main(request: dict[str, Any]) -> None:
    meeting = Path(request["meeting"])
    if request["rank"] == 0:
        dht = DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        found = [str(address) for address in dht.get_visible_maddrs()]
        meeting.with_suffix(".part").write_text(json.dumps(found))
        meeting.with_suffix(".part").rename(meeting)
    else:
        while not meeting.exists():
            time.sleep(0.05)
        known = json.loads(meeting.read_text())
        dht = DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=known)
    averager = DecentralizedAverager(
        [torch.randn(request["elements"])],
        dht,
        prefix="race",
        target_group_size=request["world"],
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=MATCHMAKING_S / 2,
        start=True,
    )
    number = 0
    while True:
        time.sleep(request["pause_s"])
        began_s = time.time()
        if averager.step(timeout=TIMEOUT_S) is None:
            raise RuntimeError("an averaging failed")
        at_s = time.time()
        number += 1
        print(json.dumps({"sync": number, "at_s": at_s, "took_s": at_s - began_s}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
