"""Atoll's part of the races, each role a process of its own.

    race_roles learner REQUEST       a loop of one's own, as a person writes it, with the model and the text of the others
    race_roles keeper REQUEST        reads the merged model at the hub now and then, and writes it as safetensors
    race_roles participant REQUEST   holds values and pauses instead of training, for the race of syncs

REQUEST is the JSON object that the workers of `benchmarks.peers.racing` or `syncing` get, too. A learner steps no faster than
once in `step_s`, from `begin_s` of the wall clock on, for `seconds`, and writes a line of JSON for each step. A participant
writes one for each adoption: when it was, and for how long all calls of `island.step` since the last one kept this thread.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

import atoll
from atoll.codec import KEYFRAME
from atoll.protocol.settings import ProtocolSettings
from benchmarks.lib.compiled import compile_kernels, read_only

MOVE: Final = 1e-3
Request = dict[str, Any]


def learner(request: Request) -> None:
    import jax  # noqa: PLC0415  (the others need none)

    from atoll_learner.export import first_values  # noqa: PLC0415
    from atoll_learner.model_settings import ModelSettings  # noqa: PLC0415
    from atoll_learner.train import init_optimizer, make_step  # noqa: PLC0415
    from atoll_learner.train_settings import TrainSettings  # noqa: PLC0415

    train, model = TrainSettings(**request["train"]), ModelSettings(**request["model"])
    params: Any = jax.tree.map(jax.numpy.asarray, first_values(model, request["seed"], Path(request["first"])))
    state, step = init_optimizer(train, params), make_step(model, train)
    text = np.memmap(request["text"], dtype=np.uint8, mode="r")
    dice = np.random.default_rng([request["seed"], request["rank"]])

    def batch() -> np.ndarray:
        starts = dice.integers(0, len(text) - train.sequence - 1, train.batch)
        return np.stack([text[start : start + train.sequence + 1] for start in starts]).astype(np.int32)

    _, state, loss = step(params, state, batch(), 0.0)  # compiles
    state = init_optimizer(train, params)
    protocol = ProtocolSettings(**request["protocol"])
    name = f"region-{request['rank']}"
    with (
        atoll.join(request["broker"], run=request["run"], learner=name, params=params, protocol=protocol) as island,
        (Path(request["out"]) / f"{request['rank']}.jsonl").open("w") as log,
    ):
        params, next_s, steps = island.params, request["begin_s"], 0
        time.sleep(max(0.0, next_s - time.time()))
        while time.time() - request["begin_s"] < request["seconds"]:
            params, state, loss = step(params, state, batch(), train.rate)
            told = float(loss)
            next_s = max(next_s + request["step_s"], time.time())
            time.sleep(max(0.0, next_s - time.time()))
            params = island.step(params, tokens=train.tokens_per_step, loss=told)
            steps += 1
            log.write(json.dumps({"at_s": time.time() - request["begin_s"], "steps": steps, "loss": told}) + "\n")
            log.flush()


def keeper(request: Request) -> None:
    from safetensors.numpy import save_file  # noqa: PLC0415

    out, due_s = Path(request["out"]), request["begin_s"]
    while time.time() - request["begin_s"] < request["seconds"]:
        time.sleep(max(0.0, due_s - time.time()))
        due_s += request["keep_every_s"]
        at_s = time.time() - request["begin_s"]  # what comes while it is read belongs to later
        model = atoll.read_model(request["broker"], run=request["run"])
        save_file({name: np.asarray(value) for name, value in model.params.items()}, out / f"{at_s:09.2f}.safetensors")


def participant(request: Request) -> None:
    protocol = ProtocolSettings(**request["protocol"])
    compile_kernels({protocol.codec_up, protocol.codec_down, KEYFRAME})
    rows = request["elements"] // request["columns"]
    dice = np.random.default_rng(request["rank"])
    move = np.float32(MOVE) * dice.standard_normal((rows, request["columns"]), np.float32)
    name = f"worker-{request['rank']}"
    first = read_only(np.zeros((rows, request["columns"]), np.float32))
    with atoll.join(
        request["broker"], run=request["run"], learner=name, params={"w": first}, protocol=protocol
    ) as island:
        params, held, blocked_s, number = island.params, None, 0.0, 0
        while True:
            if params["w"] is not held:  # adopted: train a little, so that there is something to contribute
                params = {"w": read_only(params["w"] + move)}
                held = params["w"]
            time.sleep(request["step_s"])
            began_s = time.perf_counter()
            params = island.step(params, tokens=1, loss=1.0)
            blocked_s += time.perf_counter() - began_s
            if params["w"] is not held:
                number += 1
                told = {"sync": number, "at_s": time.time(), "blocked_s": blocked_s}
                sys.stdout.write(json.dumps(told) + "\n")  # at once: other threads write lines of log
                sys.stdout.flush()
                blocked_s = 0.0


if __name__ == "__main__":
    {"learner": learner, "keeper": keeper, "participant": participant}[sys.argv[1]](json.loads(sys.argv[2]))
