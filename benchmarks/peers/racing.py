"""Data-parallel training over gloo, and DiLoCo of torchft, as one of several regions; run in an environment without Atoll.

    racing.py make REQUEST     write the first values of the model that all systems train, as safetensors
    racing.py ddp REQUEST      be one worker of `DistributedDataParallel`, with gradients of 16 bits
    racing.py diloco REQUEST   be one replica of torchft's `DiLoCo` (streaming, with the delay that `delay` says)

REQUEST is a JSON object (see `benchmarks.network.race`). A worker steps no faster than once in `step_s`, from `begin_s` of the
wall clock on, for `seconds`. It writes one line of JSON for each step, and keeps the values of now and then.
With `rates` (see `benchmarks.training.first_try`) it takes one step at each of these learning rates, as fast as it can, and
keeps the last values. With `muon`, PyTorch's Muon, in float32, moves the matrices inside layers, and AdamW all else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

Request = dict[str, Any]


def model_of(request: Request) -> LlamaForCausalLM:
    """Return the model; its values are random, or those of the file `first`."""
    torch.manual_seed(request["seed"])
    model = LlamaForCausalLM(LlamaConfig(**request["model"], attn_implementation="eager"))
    first = Path(request["first"])
    if first.exists():
        model.load_state_dict(load_file(first), strict=False)
        model.tie_weights()
    return model


def values_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.named_parameters()}


def make(request: Request) -> None:
    save_file(values_of(model_of(request)), request["first"])


class Pace:
    """Batches, the clock and the log of one worker."""

    def __init__(self, request: Request, log: TextIO) -> None:
        self._request = request
        self._log = log
        self._text = np.memmap(request["text"], dtype=np.uint8, mode="r")
        self._dice = np.random.default_rng([request["seed"], request["rank"]])
        self._kept_s = self._next_s = 0.0
        self.steps = 0
        time.sleep(max(0.0, request["begin_s"] - time.time()))

    @property
    def over(self) -> bool:
        """Return whether the time is up, or all steps are taken."""
        if "rates" in self._request:
            return bool(self.steps == len(self._request["rates"]))
        return bool(time.time() - self._request["begin_s"] > self._request["seconds"])

    def batch(self) -> torch.Tensor:
        rows, length = self._request["batch"], self._request["sequence"] + 1
        starts = self._dice.integers(0, len(self._text) - length, rows)
        return torch.from_numpy(np.stack([self._text[start : start + length] for start in starts]).astype(np.int64))

    def rest(self) -> None:
        now_s = time.time()
        self._next_s = max(self._next_s + self._request["step_s"], now_s)
        time.sleep(self._next_s - now_s)

    def stepped(self, loss: float, values: Callable[[], dict[str, torch.Tensor]]) -> None:
        self.steps += 1
        now_s = time.time() - self._request["begin_s"]
        self._log.write(json.dumps({"at_s": now_s, "steps": self.steps, "loss": loss}) + "\n")
        self._log.flush()
        due = self.over if "rates" in self._request else now_s - self._kept_s >= self._request["keep_every_s"]
        if self._request["rank"] == 0 and due:
            self._kept_s = now_s
            save_file(values(), Path(self._request["out"]) / f"{now_s:09.2f}.safetensors")


def train(
    request: Request, log: TextIO, model: LlamaForCausalLM, forward: torch.nn.Module, optimizers: list[Optimizer]
) -> None:
    pace = Pace(request, log)
    vocab = request["model"]["vocab_size"]
    while not pace.over:
        for group in [each for one in optimizers for each in one.param_groups] if "rates" in request else ():
            group["lr"] = request["rates"][pace.steps]
        batch = pace.batch()
        logits = forward(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, vocab), batch[:, 1:].reshape(-1))
        model.zero_grad()
        pace.rest()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), request["clip"])
        for optimizer in optimizers:
            optimizer.step()
        pace.stepped(float(loss), lambda: values_of(model))


def inner_optimizers(request: Request, model: LlamaForCausalLM) -> list[Optimizer]:
    """Return what moves the values in each step, the one that ends it last; matrices decay, gains do not."""
    decay, betas = request["weight_decay"], tuple(request["betas"])
    matrices = [each for each in model.parameters() if each.ndim > 1]
    gains = [each for each in model.parameters() if each.ndim <= 1]
    if "muon" not in request:
        groups = [{"params": matrices, "weight_decay": decay}, {"params": gains, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=request["rate"], betas=betas)]
    embeddings = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    tables = [each for each in matrices if id(each) in embeddings]
    inside = [each for each in matrices if id(each) not in embeddings]
    groups = [{"params": tables, "weight_decay": decay}, {"params": gains, "weight_decay": 0.0}]
    told = {"lr": request["rate"], "momentum": request["muon"]["momentum"], "weight_decay": decay}
    # Muon's iterations have 16 bits, for which many a processor has no units: they take 20 times as long there as with 32.
    torch.Tensor.bfloat16 = lambda values: values.float().clone()
    return [
        torch.optim.AdamW(groups, lr=request["rate"], betas=betas),
        torch.optim.Muon(inside, adjust_lr_fn="match_rms_adamw", **told),
    ]


def ddp(request: Request, log: TextIO) -> None:
    place = f"tcp://{request['addresses'][0]}:{request['port']}"
    dist.init_process_group(
        "gloo", init_method=place, rank=request["rank"], world_size=request["world"], timeout=timedelta(hours=1)
    )
    model = model_of(request)
    forward = DistributedDataParallel(model, init_sync=False)
    forward.register_comm_hook(None, fp16_compress_hook)
    train(request, log, model, forward, inner_optimizers(request, model))
    os._exit(0)  # the others may be in the middle of a step that we do not take


def fragments_of(model: LlamaForCausalLM) -> list[torch.nn.Module]:
    """Return the layers, the first with the embedding, the last with the norm behind it."""
    inside = model.model
    modules = [[layer] for layer in inside.layers]
    modules[0].insert(0, inside.embed_tokens)
    modules[-1].append(inside.norm)
    return [torch.nn.ModuleList(each) for each in modules]


def diloco(request: Request, log: TextIO) -> None:
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415
    from torchft.local_sgd import DiLoCo  # noqa: PLC0415

    here = request["addresses"][request["rank"]]
    store = dist.TCPStore(here, request["port"], is_master=True, wait_for_workers=False)
    model = model_of(request)
    inner = inner_optimizers(request, model)
    fragments = fragments_of(model)
    outer = [
        torch.optim.SGD(each.parameters(), lr=request["outer_rate"], momentum=request["outer_momentum"], nesterov=True)
        for each in fragments
    ]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(hours=1)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=request["world"],
        use_async_quorum=False,
        timeout=timedelta(hours=1),
        quorum_timeout=timedelta(hours=1),
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=request["lighthouse"],
        replica_id=f"region-{request['rank']}",
        hostname=here,
        init_sync=False,
    )
    with DiLoCo(
        manager,
        fragments,
        inner[-1],  # a step is over, and a sync may be due, when this one has stepped
        outer,
        sync_every=request["interval_steps"],
        pin_memory=False,
        use_bucketization=True,
        fragment_sync_delay=request["delay"],
    ):
        train(request, log, model, model, inner)
    os._exit(0)


def main() -> None:
    role, request = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(request.get("threads", 1))
    if role == "make":
        make(request)
        return
    with (Path(request["out"]) / f"{request['rank']}.jsonl").open("w") as log:
        {"ddp": ddp, "diloco": diloco}[role](request, log)


if __name__ == "__main__":
    main()
