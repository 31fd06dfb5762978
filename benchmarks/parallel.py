"""What `mh.plan` predicts beside what comes, and what stages cost beside their computing.

    python benchmarks/parallel.py [plans|profile|skip|messages|limit ...] [--repeats 5] [--json FILE]

plans     twelve plans of a GPT of 8 blocks and of an MLP of unequal layers, in 2 and 4 workers of one thread: seconds of a step and
          bytes of the fullest process, predicted and measured by `run.plan` after 20 steps; then the planner's first choice beside the
          fastest of all that were measured
profile   seconds that measuring and planning take for a GPT of 24 equal blocks, and how much the measuring process grew, in units
skip      milliseconds that a stage spends before its own first block, behind 18 of 24, a micro-batch
messages  1 MB from stage to stage and back, beside gloo's isend and irecv: the median over alternating rounds
limit     a model whose training needs 2.2 times what a worker may have (RLIMIT_DATA): in one worker, 3 stages and 4

Let the machine be idle. Two workers need two cores; with 4 workers on 2 cores, cores are shared, as the plan says.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
from stages import MODELS, WIDTH, WORDS, Block, adamw, loss_of_batch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.comm.solo import SoloGroup
from manyhands.comm.stage_channel import Sent, StageChannel
from manyhands.engines.base import LaunchSpec
from manyhands.engines.local.engine import Local
from manyhands.errors import WorkerFailed
from manyhands.parallel.build import take_away
from manyhands.parallel.mesh import piece_bytes
from manyhands.parallel.planner.profile import profile_units
from manyhands.parallel.planner.search import Plan
from manyhands.parallel.stage_program import StageProgram
from manyhands.parallel.trace import trace
from manyhands.process_memory import forget_peak, resident
from manyhands.worker import Worker

STEPS = 24  # of a run; `run.plan` is of the first 20
PLANS = {2: (2, 4, 8), 4: (4, 8)}  # micro-batches of each number of stages, which is that of workers


def task_of(name: str) -> mh.Task:
    make, rows, _ = MODELS[name]
    batch = rows()
    count = len(batch[0])
    data = TensorDataset(*(torch.cat([column] * STEPS) for column in batch))
    return mh.Task(
        model=make, loss=loss_of_batch, optimizer=adamw, train_data=data, batch_size=count, epochs=1, name=name
    )


# -- plans --------------------------------------------------------------------------------------------------------------


def measured(task: mh.Task, found: mh.Plans, plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found.save(f"{folder}/plan.json", plan)
        run = mh.train(
            task,
            workers=found.workers,
            engine="local",
            threads_per_worker=1,
            model_parallel=f"{folder}/plan.json",
        )
    return run.plan


def wanted(found: mh.Plans) -> list[Plan]:
    """Six of a model: each number of micro-batches, recomputation once, and whole replicas."""
    specs = [(found.workers, many, "none") for many in PLANS[found.workers]]
    if found.workers == 2:
        specs.append((2, 4, "units"))
    chosen = [
        plan
        for plan in found.plans
        if plan.spec is not None
        and plan.spec.offload == "none"
        and (plan.spec.stages, plan.spec.micro_batches, plan.spec.recompute) in specs
    ]
    return chosen + [plan for plan in found.plans if plan.spec is None and found.workers == 2]


def plans(repeats: int) -> dict[str, Any]:
    rows: dict[str, dict[str, float]] = {}
    times: dict[str, dict[str, float]] = {}
    print(f"{'plan':42}{'predicted':>12}{'measured':>12}{'':>7}{'predicted':>12}{'measured':>12}")
    for name in MODELS:
        task = task_of(name)
        for workers in PLANS:
            found = mh.plan(task, workers=workers, threads_per_worker=1)
            for plan in wanted(found):
                came = [measured(task, found, plan) for _ in range(repeats)]
                step_s = statistics.median(one["step_s"] for one in came)
                nbytes = statistics.median(one["bytes"] for one in came)
                label = f"{name}, {workers} workers: {plan}"
                rows[label] = {"step": step_s / plan.step_s - 1, "memory": nbytes / plan.memory - 1}
                times.setdefault(f"{name}, {workers} workers", {})[str(plan)] = step_s
                print(
                    f"{label:42}{1e3 * plan.step_s:9.1f} ms{1e3 * step_s:9.1f} ms{rows[label]['step']:+7.0%}"
                    f"{plan.memory / 1e6:9.0f} MB{nbytes / 1e6:9.0f} MB{rows[label]['memory']:+7.0%}",
                    flush=True,
                )
            first = str(found.plans[0])
            best = times[f"{name}, {workers} workers"]
            if first in best:
                print(f"  the planner's first choice, {first}: {best[first] / min(best.values()):.2f} × the fastest")
            else:
                came = [measured(task, found, found.plans[0]) for _ in range(repeats)]
                step_s = statistics.median(one["step_s"] for one in came)
                print(f"  the planner's first choice, {first}: {step_s / min(best.values()):.2f} × the fastest")
    for what in ("step", "memory"):
        off = sorted(abs(row[what]) for row in rows.values())
        print(f"{what}: median {statistics.median(off):.0%} off, at most {off[-1]:.0%}, of {len(off)} plans")
    return rows


# -- profile ------------------------------------------------------------------------------------------------------------


def blocks(count: int) -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(count)), head)


def deep() -> mh.Task:
    return task_of("gpt").with_fields(model=partial(blocks, 24))


def grown(worker: Worker) -> list[float]:
    """Bytes by which this process grew while it profiled, and those of the largest unit's training."""
    batch = MODELS["gpt"][1]()
    profile_units(task_of("gpt"), batch, SoloGroup())  # what is loaded at first use
    before = resident()
    forget_peak()
    found = profile_units(deep(), batch, SoloGroup())
    grew = resident(name="VmHWM") - before
    rows = found.rows[-1]
    unit = [
        sum(2 * found.sizes[name][1] for name in names) + one.state + one.held.at(rows) + one.transient.at(rows)
        for one, names in zip(found.units, found.names, strict=True)
    ]
    return [float(grew), max(unit)]


def profile(repeats: int) -> dict[str, Any]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        mh.plan(deep(), workers=4)
        seconds.append(time.perf_counter() - began)
    with Local() as engine:
        ((grew, unit),) = engine.launch(grown, LaunchSpec(workers=1, threads_per_worker=1))
    print(f"profile and plan, 24 blocks: {statistics.median(seconds):.1f} s (goal ≤ 20 s)")
    print(f"the measuring process grew by {grew / 1e6:.0f} MB, {grew / unit:.1f} units (goal ≤ 2)")
    return {"seconds": seconds, "grew": grew, "unit": unit}


# -- skip ---------------------------------------------------------------------------------------------------------------


def skip(repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    batch = MODELS["gpt"][1]()
    micro = tuple(column[:4] for column in batch)
    model = blocks(24)
    found = trace(model, loss_of_batch, micro)
    cuts = found.chosen(["19"])  # behind the embedding and 18 blocks
    held = {name for name, stages in found.stages_of(cuts).items() if 1 in stages}
    program = StageProgram(take_away(model, held), cuts, 1)
    values = [Sent(torch.randn(shape, dtype=dtype), True) for shape, dtype in cuts[0].values]
    took = []
    for _ in range(20 * repeats):
        program.run(loss_of_batch, micro, values)
        took.append(1e3 * program.skipped_s)
    median = statistics.median(took)
    print(f"skipping 18 of 24 blocks: {median:.2f} ms a micro-batch (goal ≤ 1.5)")
    return {"ms": median}


# -- messages -----------------------------------------------------------------------------------------------------------


def ours_and_gloo(worker: Worker, store: str, repeats: int) -> dict[str, float]:
    size, rounds = 1 << 18, 20
    channel = StageChannel(worker.make_group([0, 1]), piece_bytes(4 * size))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker.rank, world_size=2)
    payload, other, device = torch.ones(size), 1 - worker.rank, torch.device("cpu")

    def by_channel(sends: bool) -> None:
        channel.send("x", [Sent(payload)]) if sends else channel.receive(device)

    def by_gloo(sends: bool) -> None:
        work = dist.isend(payload, other) if sends else dist.irecv(torch.empty(size), other)
        assert work is not None
        work.wait()

    took: dict[str, list[float]] = {"manyhands": [], "gloo": []}
    for _ in range(repeats):
        for name, one in (("manyhands", by_channel), ("gloo", by_gloo)):
            worker.group.barrier()
            began = time.perf_counter()
            for _ in range(rounds):
                one(worker.rank == 0)
                one(worker.rank == 1)
            took[name].append((time.perf_counter() - began) / (2 * rounds))
    dist.destroy_process_group()
    channel.close()
    ratio = statistics.median(a / b for a, b in zip(took["manyhands"], took["gloo"], strict=True))
    return {name: 1e3 * statistics.median(values) for name, values in took.items()} | {"ratio": ratio}


def messages(repeats: int) -> dict[str, Any]:
    with Local() as engine, tempfile.TemporaryDirectory() as folder:
        work = partial(ours_and_gloo, store=f"{folder}/store", repeats=4 * repeats)
        found = engine.launch(work, LaunchSpec(workers=2, threads_per_worker=1))[0]
    print(
        f"1 MB from stage to stage: {found['manyhands']:.3f} ms, gloo's isend and irecv {found['gloo']:.3f} ms; "
        f"{found['ratio']:.2f} × (goal ≤ 0.5)"
    )
    return dict(found)


# -- limit --------------------------------------------------------------------------------------------------------------


class Limited(nn.Sequential):
    """12 layers of 16.8 MB, made where the process may have so many bytes of data."""

    def __init__(self, limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        super().__init__(*(nn.Sequential(nn.Linear(2048, 2048), nn.Tanh()) for _ in range(12)), nn.Linear(2048, 8))


def loss_of_numbers(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def data_bytes(worker: Worker) -> int:
    """Of a worker's process before it trains."""
    return resident(name="VmData")


def limit(repeats: int) -> dict[str, Any]:
    own = 12 * 2048 * 2048 * 4 * 4  # parameters, gradients, and AdamW's two vectors
    with Local() as engine:
        base = max(engine.launch(data_bytes, LaunchSpec(workers=2, threads_per_worker=1)))
    most = base + int(own / 2.2)
    data = TensorDataset(torch.randn(64, 2048), torch.randint(8, (64,)))
    task = mh.Task(
        model=partial(Limited, most), loss=loss_of_numbers, optimizer=adamw, train_data=data, batch_size=32, epochs=4
    )
    found = {}
    for stages in (1, 3, 4):
        spec = None if stages == 1 else f"stages={stages}"
        try:
            with tempfile.TemporaryDirectory() as folder:
                run = mh.train(
                    task,
                    workers=max(2, stages),
                    engine="local",
                    threads_per_worker=1,
                    model_parallel=spec,
                    run_dir=f"{folder}/run",
                )
            found[stages] = f"trains, {run.steps} steps"
        except WorkerFailed as error:
            lines = [line for line in str(error).splitlines() if "Error" in line or "manyhands plan" in line]
            found[stages] = f"fails: {' … '.join(line[:120] for line in [lines[0], lines[-1]])}"
        print(f"{stages} stage{'s' if stages > 1 else ''}, training needs 2.2 × the limit: {found[stages]}", flush=True)
    return {str(stages): text for stages, text in found.items()}


PARTS = {"plans": plans, "profile": profile, "skip": skip, "messages": messages, "limit": limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=" ".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine.facts()
    found = {name: PARTS[name](options.repeats) for name in options.parts or PARTS}
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, **found}, indent=1))


if __name__ == "__main__":
    main()
