"""Plans that are refused, and what is said of each: `python tests/parallel/refused_plans.py` writes them into
refused_plans.txt, which a test compares."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stage_models import GPT, MLP, TASKS, classified, masked
from stage_threads import in_stages
from torch import Tensor, nn

import manyhands as mh
from manyhands.comm.solo import SoloGroup
from manyhands.errors import BadInput
from manyhands.parallel.mesh import StagePlace
from manyhands.parallel.planner.search import Plan, StagePrediction
from manyhands.parallel.spec import ModelParallel
from manyhands.parallel.stage_executor import StageExecutor
from manyhands.parallel.trace import trace
from manyhands.training.plans import Plans, limits_of

FILE = Path(__file__).with_suffix(".txt")
Refused = Callable[[], Any]


def trained(plan: str, workers: int = 2, strategy: str = "allreduce", engine: str = "local", **fields: Any) -> Refused:
    """`mh.train`, which says so before anything starts."""
    given = ("survive", "run_dir", "memory_per_worker")
    options = {name: fields.pop(name) for name in given if name in fields}
    task = TASKS["gpt"].with_fields(**fields)
    return lambda: mh.train(task, workers=workers, strategy=strategy, engine=engine, model_parallel=plan, **options)


def cut(plan: str, model: Any = GPT, loss: Any = masked) -> Refused:
    """What each worker does with the plan before it builds its part."""
    batch = tuple(column[:4] for column in TASKS["gpt" if loss is masked else "mlp"].train_data.tensors)

    def refused() -> None:
        spec = ModelParallel.of(plan)
        assert spec is not None
        found = trace(lambda: model().double(), loss, batch)
        cuts = found.equal_cuts(spec.stages) if spec.cuts is None else found.chosen(spec.cuts)
        for stage in range(spec.stages):
            place = StagePlace(stage=stage, members=SoloGroup(), before=None, after=None, tied={})
            StageExecutor(TASKS["mlp"], found, cuts, place)

    return refused


class Body(nn.Module):
    """Three layers, and a forward that is given."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def of(body: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return functools.partial(Body, body)


def reads(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    return model.third(model.second(x) if x.max() > 0 else x)


def selects(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    return model.third(model.second(x[x > 0].reshape(-1, 1).expand(-1, 12)))


def writes(model: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 12, dtype=x.dtype)
    out[:] = model.first(x)
    return model.third(model.second(out))


def between_marks(model: Any, x: Tensor) -> Tensor:
    return model.third(model.second(mh.cut(mh.cut(model.first(x)).relu())))


def twice(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return classified(model, batch) + model(batch[0]).square().mean()


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return classified(model, batch) + 1e-4 * sum(p.square().sum() for p in model.parameters())


def compiled_in_place() -> nn.Module:
    model = MLP()
    model[1].compile(backend="eager")
    return model


def of_two_models(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), *nn.Linear(3, 3).parameters()], lr=0.1)


def threads() -> None:
    in_stages(TASKS["mlp"].with_fields(optimizer=of_two_models), MLP().double(), "stages=2", lambda loop: None)


def nothing_fits() -> Plan:
    stages = (StagePrediction(begins="", memory=3e9, forward=1.0, backward=2.0),)
    spec = ModelParallel(stages=2, micro_batches=8, recompute="units")
    only = Plan(spec=spec, workers=2, rows=32, stages=stages, step_s=1.0, over=1e9)
    about = {"task": "mine", "strategy": "allreduce", "workers": 2, "cores": 2, "rows": 32, "parameters": 1}
    found = Plans(
        **about, optimizer="AdamW", limits=(2 * 10**9,) * 2, plans=(only,), alone=only, identity={}, seconds=1.0
    )
    return found.chosen


def compressed() -> None:
    in_stages(TASKS["gpt"], GPT().double(), "stages=2", lambda loop: None, strategy="allreduce:compress=topk:0.1")


CASES: dict[str, Refused] = {
    "stages=3 with 4 workers": trained("stages=3", 4),
    "stages=4 with 2 workers": trained("stages=4"),
    "stages=0": trained("stages=0"),
    "stages=two": trained("stages=two"),
    "stags=2": trained("stags=2"),
    "stages=2,schedule=zigzag": trained("stages=2,schedule=zigzag"),
    "stages=2,recompute=all": trained("stages=2,recompute=all"),
    "stages=2,micro_batches=0": trained("stages=2,micro_batches=0"),
    "stages=2,micro_batches=21 with 4 workers, of 39 rows": trained("stages=2,micro_batches=21", 4),
    "stages=2,cut=[blocks.1,blocks.2]": trained("stages=2,cut=[blocks.1,blocks.2]"),
    "fsdp=2": trained("fsdp=2"),
    "tensor=2": trained("tensor=2"),
    "stages=2 with hogwild": trained("stages=2", strategy="hogwild"),
    "stages=2 with quorum": trained("stages=2", strategy="quorum"),
    "stages=2 with diloco:via=server": trained("stages=2", strategy="diloco:via=server"),
    "stages=2 with allreduce:overlap=true": trained("stages=2", strategy="allreduce:overlap=true"),
    "stages=2 with allreduce:sharded=true": trained("stages=2", strategy="allreduce:sharded=true"),
    "stages=2 with allreduce:combine=adasum": trained("stages=2", strategy="allreduce:combine=adasum"),
    "stages=2 with diloco:streaming=2": trained("stages=2", strategy="diloco:streaming=2"),
    "stages=2 with update-sharing": trained("stages=2", strategy="update-sharing"),
    "stages=2,offload=host": trained("stages=2,offload=host"),
    "auto on engine sim": trained("auto", engine="sim"),
    "auto where nothing fits": nothing_fits,
    "memory_per_worker=2": lambda: limits_of("2", 2),
    "memory_per_worker=1GB,2GB with 3 workers": lambda: limits_of("1GB,2GB", 3),
    "memory_per_worker without auto": trained("stages=2", memory_per_worker="2GB"),
    "auto with one worker": trained("auto", 1),
    "stages=2 in prepare": lambda: mh.prepare(MLP(), None, model_parallel="stages=2"),
    "a plan's file that is none": trained("refused_plans.json"),
    "stages=2 with survive and diloco": trained("stages=2", 4, strategy="diloco", survive="max_losses=1"),
    "stages=2 with downpour on engine sim": trained("stages=2", strategy="downpour", engine="sim"),
    "stages=2 with survive on engine sim": trained("stages=2", 4, survive="max_losses=1", engine="sim"),
    "stages=2, a task's own executor, as of Keras": trained("stages=2", executor=lambda task, worker: None),
    "stages=6 of a model with 4 places": cut("stages=6", MLP, classified),
    "stages=2,cut=[blocks.9]": cut("stages=2,cut=[blocks.9]"),
    "stages=2,cut=[blocks]": cut("stages=2,cut=[blocks]"),
    "stages=2,cut=[tokens]": cut("stages=2,cut=[tokens]"),
    "stages=2,cut=[drop]": cut("stages=2,cut=[drop]"),
    "stages=3,cut=[blocks.2,blocks.1]": cut("stages=3,cut=[blocks.2,blocks.1]"),
    "a stage without parameters": cut("stages=3,cut=[cut1,cut2]", of(between_marks), classified),
    "a loss that calls the model twice": cut("stages=2", MLP, twice),
    "a loss that penalises weights": cut("stages=2", MLP, penalised),
    "a forward that reads a value": cut("stages=2", of(reads), classified),
    "a forward whose shapes depend on values": cut("stages=2", of(selects), classified),
    "a forward that writes into a tensor of every stage": cut("stages=2", of(writes), classified),
    "a model compiled as a whole": cut("stages=2", lambda: torch.compile(MLP(), backend="eager"), classified),
    "a block compiled in place": cut("stages=2", compiled_in_place, classified),
    "compress where stages share a parameter": compressed,
    "an optimizer over parameters of two models": threads,
}


def said(refused: Refused) -> str:
    """The kind of error and its message; lines of this file have no number."""
    try:
        refused()
    except BadInput as error:
        return re.sub(r"(refused_plans\.py):\d+", r"\1:…", f"{type(error).__name__}: {error}")
    raise AssertionError("it was not refused")


def as_text() -> str:
    return "\n".join(f"{title}\n    {said(refused)}\n" for title, refused in CASES.items())


if __name__ == "__main__":
    FILE.write_text(as_text())
