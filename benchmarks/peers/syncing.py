"""Two participants that synchronise float32 values again and again in PyTorch; run in an environment without Atoll.

    syncing.py gloo REQUEST       all-reduce over gloo: the floor, without any protection
    syncing.py quorum REQUEST     torchft: a quorum, an all-reduce and a commit for each step
    syncing.py diloco REQUEST     torchft's DiLoCo: an all-reduce of pseudo-gradients and an outer step
    syncing.py hivemind REQUEST   hivemind, in an environment of its own: an averaging, matchmaking included

REQUEST is a JSON object (see `benchmarks.network.bench_peers`). A worker prints a line of JSON for each sync until it is ended:
when it was over, and for how long it kept this process waiting. Nobody trains: between two syncs a worker pauses.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Request = dict[str, Any]
LONG = timedelta(minutes=10)
MATCHMAKING_S = 0.5
"""For how long a peer looks for others at least; hivemind's own five seconds are for peers that are not in step."""
AVERAGING_S = 60.0


def repeat(request: Request, sync: Callable[[], None], before: Callable[[], None] = lambda: None) -> None:
    """Sync without end, and tell of each; `before` each comes what does not count."""
    number = 0
    while True:
        before()
        time.sleep(request["pause_s"])
        began_s = time.time()
        sync()
        at_s = time.time()
        number += 1
        print(json.dumps({"sync": number, "at_s": at_s, "took_s": at_s - began_s}), flush=True)


def gloo(request: Request) -> None:
    place = f"tcp://127.0.0.1:{request['port']}"
    dist.init_process_group("gloo", init_method=place, rank=request["rank"], world_size=request["world"], timeout=LONG)
    values = torch.randn(request["elements"])

    def sync() -> None:
        dist.all_reduce(values)
        values.div_(request["world"])

    repeat(request, sync)


def manager_of(request: Request, **more: Any) -> Any:  # noqa: ANN401  (torchft has no types)
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LONG),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=request["world"],
        timeout=LONG,
        quorum_timeout=LONG,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=request["lighthouse"],
        replica_id=f"worker-{request['rank']}",
        hostname="127.0.0.1",
        init_sync=False,
        **more,
    )
    manager.its_store = store  # as long as the manager lives
    return manager


def quorum(request: Request) -> None:
    """Do what torchft does for each step of fault-tolerant data-parallel training."""
    manager = manager_of(request)
    values = torch.randn(request["elements"])

    def sync() -> None:
        manager.start_quorum()
        manager.allreduce(values).wait()
        if not manager.should_commit():
            raise RuntimeError("a step was not committed")

    repeat(request, sync)


def diloco(request: Request) -> None:
    """Step a model of one layer; every `interval_steps` steps the optimizer's step contains the sync."""
    from torchft.local_sgd import DiLoCo  # noqa: PLC0415

    manager = manager_of(request, use_async_quorum=False)
    rows = request["elements"] // request["columns"]
    layer = torch.nn.Linear(request["columns"], rows, bias=False)
    inner = torch.optim.SGD(layer.parameters(), lr=1e-3)
    outer = torch.optim.SGD(layer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    layer.weight.grad = torch.randn_like(layer.weight)
    with DiLoCo(manager, [layer], inner, outer, sync_every=request["interval_steps"], use_bucketization=True):

        def steps() -> None:
            for _ in range(request["interval_steps"] - 1):
                inner.step()

        repeat(request, inner.step, steps)


def hivemind(request: Request) -> None:
    """Average with peers that find each other; the first writes its addresses to the file `meeting`, the others wait for it."""
    from hivemind import DHT  # noqa: PLC0415
    from hivemind.averaging import DecentralizedAverager  # noqa: PLC0415

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

    def sync() -> None:
        if averager.step(timeout=AVERAGING_S) is None:
            raise RuntimeError("an averaging failed")

    repeat(request, sync)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"gloo": gloo, "quorum": quorum, "diloco": diloco, "hivemind": hivemind}[sys.argv[1]](json.loads(sys.argv[2]))
