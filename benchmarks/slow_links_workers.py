"""What the workers of slow_links.py run, all jobs one after the other in the same processes: `mh.train`, or torch's DDP on gloo.

`main` is the driver's, on the first host; the others run `manyhands join`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from manyhands.data.sharding import slice_of
from manyhands.engines.hosts.engine import Hosts
from manyhands.errors import BadInput, ManyhandsError
from manyhands.recording.history import PARTS
from manyhands.task import Task
from manyhands.tasks.chars_task import PEAK_RATE, CharsNet, chars, loss, warmup_then_cosine

DDP = "ddp"  # a job's name
TIMEOUT_S = 120.0
CLIP_NORM = 1.0
POSITIONS = 25.0  # times as large as `chars` begins with: 0.5, half of a character's embedding
TEST_ROWS = 32  # at once, of each worker


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    width: int = 256
    layers: int = 4
    batch_size: int = 16
    rate: float = PEAK_RATE
    total_steps: int = 300  # of the schedule, however many steps a job makes


@dataclass(frozen=True, kw_only=True)
class Job:
    """So many steps of one strategy."""

    name: str
    spec: str
    steps: int
    block: int = 0
    test: bool = False


def task(model: Model, **fields: Any) -> Task:
    """`chars` with a wider transformer: 3.2 M parameters at a width of 256."""
    return chars(
        model=partial(net, width=model.width, layers=model.layers),
        optimizer=partial(adamw, rate=model.rate),
        schedule=partial(planned, total_steps=model.total_steps),
        batch_size=model.batch_size,
        clip_norm=CLIP_NORM,
        validation_data=None,
        **fields,
    )


def net(width: int, layers: int) -> CharsNet:
    """The transformer of `chars`, with positions that it can tell apart from the start.

    With its own, attention takes some thousand steps to find the character before, all at once and at a step that chance
    decides, so that losses after fewer steps say who was lucky.
    """
    model = CharsNet(width=width, layers=layers)
    with torch.no_grad():
        model.positions.mul_(POSITIONS)
    return model


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """As `chars` has it."""
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


def planned(optimizer: torch.optim.Optimizer, _: int, total_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    return warmup_then_cosine(optimizer, total_steps)


# -- the driver ------------------------------------------------------------------------------------------------------


def main(asked_file: str, result_file: str) -> None:
    """Launch on all hosts what the file asks for, and write what came of it."""
    asked = json.loads(Path(asked_file).read_text())
    model, jobs = Model(**asked["model"]), [Job(**job) for job in asked["jobs"]]
    engine = Hosts(
        listen=asked["listen"], ports=asked["ports"], local_workers=1, tls=False, plain_network=True, wait_s=TIMEOUT_S
    )
    engine.announcer.say = lambda text: None  # slow_links.py joins them
    try:
        found = mh.launch(
            run, model, jobs, asked["store"], workers=asked["workers"], engine=engine, threads_per_worker=1
        )
    except ManyhandsError as error:
        sys.exit(str(error))
    Path(result_file).write_text(json.dumps(found[0]))


def run(model: Model, jobs: list[Job], store: str) -> list[dict[str, Any]]:
    """What every worker runs. By job: seconds, bytes sent by a worker and training loss of every step, and the test loss."""
    found = []
    with gloo(store):
        for job in jobs:
            mh.worker().group.barrier()
            begun = time.perf_counter()
            values = by_ddp(model, job) if job.name == DDP else by_train(model, job)
            found.append({"name": job.name, "block": job.block, **values})
            if mh.worker().rank == 0:
                print(f"  {line(job, values, time.perf_counter() - begun)}", flush=True)
    return found


def line(job: Job, values: dict[str, Any], seconds: float) -> str:
    said = values.get("refused") or f"{sum(values['seconds']) / job.steps:.3f} s a step"
    loss = f", test loss {values['test_loss']:.4f}" if "test_loss" in values else ""
    return f"block {job.block}  {job.name:<32} {job.steps:>4} steps  {seconds:6.1f} s  {said}{loss}"


# -- ours ------------------------------------------------------------------------------------------------------------


def by_train(model: Model, job: Job) -> dict[str, Any]:
    """`mh.train` on all workers; what it refuses is said. It goes on through the rows until all steps are made."""
    fields: dict[str, Any] = {} if job.test else {"test_data": None}
    try:
        run = mh.train(task(model, epochs=job.steps, max_steps=job.steps, **fields), strategy=job.spec)
    except BadInput as refusal:
        return {"refused": str(refusal)}
    if run.steps != job.steps:
        raise SystemExit(f"{job.name} made {run.steps} of {job.steps} steps")
    size = mh.worker().size
    return {
        "parameters": run.info["parameters"],
        "seconds": [sum(row[f"{part}_s"] for part in PARTS) for row in run.history],
        "compute_s": [row["compute_s"] for row in run.history],
        "bytes": [row["bytes"] / size for row in run.history],
        "losses": [row["loss"] for row in run.history],
        **({"test_loss": run.metrics["test_loss"]} if job.test else {}),
    }


# -- the peer --------------------------------------------------------------------------------------------------------


@contextmanager
def gloo(store: str) -> Iterator[None]:
    """On the card that GLOO_SOCKET_IFNAME names."""
    worker = mh.worker()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, worker.size),
        rank=worker.rank,
        world_size=worker.size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def by_ddp(model: Model, job: Job) -> dict[str, Any]:
    """The plain loop over DistributedDataParallel, on the same rows in the same order, from the same parameters."""
    worker, asked = mh.worker(), task(model)
    torch.manual_seed(asked.seed)
    plain: nn.Module = asked.model()
    optimizer = asked.optimizer(plain)
    schedule = planned(optimizer, 0, model.total_steps)
    wrapped = DistributedDataParallel(plain)
    parameters = sum(p.numel() for p in plain.parameters())
    seconds, losses = [], []
    for rows in batches(asked, model.batch_size, job.steps):
        begun = time.perf_counter()
        batch = [column[rows] for column in asked.train_data]
        optimizer.zero_grad()
        value = loss(wrapped, (batch[0], batch[1]))
        value.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        losses.append(value.item())
        seconds.append(time.perf_counter() - begun)
    sent = 2 * (worker.size - 1) / worker.size * 4 * parameters  # by gloo's ring
    return {
        "parameters": parameters,
        "seconds": mean_over_workers(seconds),
        "bytes": [sent] * job.steps,
        "losses": mean_over_workers(losses),
        **({"test_loss": test_loss(asked, plain)} if job.test else {}),
    }


def batches(asked: Task, size: int, steps: int) -> Iterator[torch.Tensor]:
    """This worker's rows of each global batch, as manyhands deals them."""
    worker, total, epoch = mh.worker(), len(asked.train_data[0]), 0
    while True:
        order = torch.from_numpy(mh.epoch_order(total, asked.seed, epoch))
        for start in range(0, total, size):
            if steps == 0:
                return
            whole = order[start : start + size]
            low, high = slice_of(len(whole), worker.rank, worker.size)
            yield whole[low:high]
            steps -= 1
        epoch += 1


def mean_over_workers(values: list[float]) -> list[float]:
    everyone = mh.worker().group.all_gather_json(values)
    return [sum(column) / len(column) for column in zip(*everyone, strict=True)]


@torch.no_grad()
def test_loss(asked: Task, model: nn.Module) -> float:
    """Over all test rows, each worker a share of them."""
    worker, rows = mh.worker(), len(asked.test_data[0])
    low, high = slice_of(rows, worker.rank, worker.size)
    total = 0.0
    for start in range(low, high, TEST_ROWS):
        before, after = (column[start : min(high, start + TEST_ROWS)] for column in asked.test_data)
        total += loss(model, (before, after)).item() * len(before)
    return float(sum(worker.group.all_gather_json(total)) / rows)
