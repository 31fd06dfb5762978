"""The bits, bytes and messages of every strategy on the engines sim, local and hosts: record them before a change, compare afterwards.

    python benchmarks/bits.py --record before.json [--engines sim,local,hosts]
    python benchmarks/bits.py --compare before.json

What is recorded of a run: a digest of the parameters and the model's buffers, the metrics, the ledger to the byte, steps, rounds
and rows. On `local` and `hosts` only runs whose result does not depend on timing take part; on `sim` all do. The task has
dropout, batch norm, clipping, a schedule, and rows that no number of workers divides. `--compare` exits 1 and names what differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import manyhands as mh

LOCKSTEP = [
    "allreduce",
    "allreduce:overlap=true",
    "allreduce:compress=topk:0.3",
    "allreduce:compress=powersgd:1",
    "allreduce:compress=qsgd:4",
    "allreduce:compress=bf16",
    "local-sgd:period=3",
    "local-sgd:period=2,optimizer_state=reset,warmup=3",
    "gossip",
    "gossip:graph=ring,period=3",
    "gossip:graph=random",
    "gossip:graph=random,weights=push-sum",
    "diloco:period=3",
    "diloco:period=4,streaming=2",
    "diloco:period=3,streaming=3,overlap=2,mixing=.25",
    "diloco:period=2,compress=topk:0.3",
    "diloco:period=3,via=server,bound=0",
    "ensemble",
    "downpour:push_every=2,pull_every=3,bound=0",
    "downpour:push_every=3,pull_every=2,rule=adagrad,bound=0",
    "downpour:push_every=2,pull_every=3,bound=0,compress=onebit",
    "agn:window=3,bound=0",
    "dynsgd:bound=0",
    "distance:bound=0",
    "easgd:bound=0",
    "easgd:period=3,via=group",
    "eamsgd:period=3,via=group",
    "quorum",
    "quorum:compress=topk:0.3",
]
OWN_PACE = [
    "downpour",
    "downpour:push_every=2,pull_every=3,warmup=2",
    "downpour:rule=adam,bound=1",
    "downpour:compress=qsgd:4",
    "agn",
    "dynsgd",
    "distance",
    "easgd",
    "eamsgd:bound=2",
    "gossip:graph=pairs",
    "diloco:period=2,via=server",
    "diloco:period=3,via=server,quorum=3,bound=1",
    "quorum:backups=1",
]
ADDRESS = re.compile(r"manyhands join (\S+) --workers (\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--engines", default="sim,local,hosts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(options.compare.read_text()) if options.compare else None
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, mh.Local() as local:
        os.environ["MANYHANDS_CREDENTIALS"] = str(Path(folder) / "run.pem")
        for engine in options.engines.split(","):
            for strategy in [*LOCKSTEP, *(OWN_PACE if engine == "sim" else [])]:
                key = f"{engine} {strategy}"
                found[key] = record(local if engine == "local" else engine, strategy)
                print(
                    f"{key}: {found[key]['parameters'][:12]}",
                    "" if kept is None else _verdict(kept[key], found[key]),
                    flush=True,
                )
                if options.record:
                    options.record.write_text(json.dumps(found, indent=1))
    if kept is None:
        return 0
    wrong = [key for key, one in found.items() if _verdict(kept[key], one).startswith("DIFFERS")]
    print(f"{len(found)} runs compared, {len(wrong)} differ" + "".join(f"\n  {key}" for key in wrong))
    return 1 if wrong else 0


def _verdict(then: dict[str, Any], now: dict[str, Any]) -> str:
    differing = [name for name in now if then.get(name) != now[name]]
    if differing == ["ledger"] and (syncs := _syncs(then["ledger"], now["ledger"])):
        return f"the same, and {syncs:+d} messages of control bits"
    return (
        "the same" if not differing else "DIFFERS in " + ", ".join(f"{n}: {then.get(n)} -> {now[n]}" for n in differing)
    )


def _syncs(then: dict[str, Any], now: dict[str, Any]) -> int:
    """How many more messages of control bits there are, 8 bytes each, if nothing else differs: workers whose rounds are far
    apart send one about each second."""
    a, b = then["mean_"], now["mean_"]
    more = b["messages"] - a["messages"]
    return more if {**then, "mean_": b} == now and b["bytes"] - a["bytes"] == 8 * more else 0


def record(engine: Any, strategy: str) -> dict[str, Any]:
    """What a run of the task leaves."""
    run = train(engine, strategy)
    tensors = [run.parameters, *(b for model in run.models for b in (*model.parameters(), *model.buffers()))]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {
        "parameters": digest.hexdigest(),
        "metrics": {name: value.hex() for name, value in run.metrics.items()},
        "ledger": run.ledger,
        "steps": run.steps,
        "rounds": run.rounds,
        "rows": run.rows,
    }


def train(engine: Any, strategy: str) -> mh.Run:
    fields = {
        "model": build,
        "loss": loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        "schedule": lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total),
        "train_data": rows(103),
        "validation_data": rows(31, seed=1),
        "batch_size": 13,
        "epochs": 2,
        "clip_norm": 1.0,
        "seed": 5,
        "strategy": strategy,
        "workers": 3 if engine == "sim" else 2,
        "callbacks": [],
    }
    if engine != "hosts":
        return mh.train(engine=engine, **fields)
    return _on_hosts(fields)


def _on_hosts(fields: dict[str, Any]) -> mh.Run:
    """One worker here, one of a `manyhands join` beside it."""
    from manyhands.engines.hosts.engine import Hosts
    from manyhands.engines.hosts.join import Join, join

    engine, helpers = Hosts(local_workers=1), []

    def say(text: str) -> None:
        if found := ADDRESS.search(text):
            offer = Join(address=found[1], workers=1, wait_s=30)
            helpers.append(threading.Thread(target=join, args=(offer, lambda line: None)))
            helpers[-1].start()

    engine.announcer.say = say
    try:
        return mh.train(engine=engine, **fields)
    finally:
        for helper in helpers:
            helper.join()


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, (x[:, :3] + 0.3 * torch.randn(count, 3, generator=generator)).argmax(1)


if __name__ == "__main__":
    sys.exit(main())
