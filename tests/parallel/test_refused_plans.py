"""Plans that are refused before anything starts, or before a worker builds its part, and the words that matter of what is
said."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_models import GPT, MLP, TASKS, classified, masked
from stage_threads import in_stages
from torch import Tensor, nn

import manyhands as mh
from manyhands.comm.solo import SoloGroup
from manyhands.errors import BadInput, Unsupported
from manyhands.parallel.mesh import StagePlace
from manyhands.parallel.planner.search import Plan, StagePrediction
from manyhands.parallel.spec import ModelParallel
from manyhands.parallel.stage_executor import StageExecutor
from manyhands.parallel.trace import trace
from manyhands.training.plans import Plans, limits_of

Refused = Callable[[], Any]


def trained(plan: str, workers: int = 2, strategy: str = "allreduce", engine: str = "local", **given: Any) -> Refused:
    """`mh.train`, which says so before anything starts."""
    task = TASKS["gpt"] if "executor" not in given else TASKS["gpt"].with_fields(executor=given.pop("executor"))
    return lambda: mh.train(task, workers=workers, strategy=strategy, engine=engine, model_parallel=plan, **given)


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


def between_marks(model: Any, x: Tensor) -> Tensor:
    return model.third(model.second(mh.cut(mh.cut(model.first(x)).relu())))


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


CASES: list[tuple[Refused, str, type[Exception]]] = [
    (trained("stages=3", 4), "a replica takes 3 workers, .*give 3 or 6 workers", BadInput),
    (trained("stages=4"), "takes 4 workers, and 2 workers are no .*: give 4 workers", BadInput),
    (trained("stages=0"), "stages must be a whole number of at least 1; got 0", BadInput),
    (trained("stages=two"), "stages must be a whole number, not 'two'", BadInput),
    (trained("stags=2"), "no option 'stags' .*did you mean 'stages'", BadInput),
    (trained("stages=2,schedule=zigzag"), "schedule must be one of 1f1b, gpipe", BadInput),
    (trained("stages=2,recompute=all"), "recompute must be one of none, units", BadInput),
    (trained("stages=2,offload=tape"), "offload must be", BadInput),
    (trained("stages=2,micro_batches=0"), "micro_batches must be a whole number of at least 1", BadInput),
    (trained("stages=2,micro_batches=21", 4), "micro_batches=21 is more than the 20 rows .*give at most 20", BadInput),
    (trained("stages=2,cut=[blocks.1,blocks.2]"), "stages=2 begin at 1 cuts, and cut names 2", BadInput),
    (trained("fsdp=2"), "fsdp comes in part 2", Unsupported),
    (trained("tensor=2"), "tensor comes in part 2", Unsupported),
    (trained("stages=2", strategy="hogwild"), "hogwild .*one copy of the parameters", Unsupported),
    (trained("stages=2", strategy="quorum"), "quorum .*counts pushes of whole models: use .*downpour", Unsupported),
    (trained("stages=2", strategy="diloco:via=server"), "diloco .*give bound=0, .*or via=group", Unsupported),
    (trained("stages=2", strategy="allreduce:overlap=true"), "overlap needs the whole gradient", Unsupported),
    (trained("stages=2", strategy="allreduce:sharded=true"), "sharded needs the whole gradient", Unsupported),
    (trained("stages=2", strategy="allreduce:combine=adasum"), "combine=adasum needs the whole", Unsupported),
    (trained("stages=2", strategy="diloco:streaming=2"), "streaming cuts the whole model", Unsupported),
    (trained("stages=2", strategy="update-sharing"), "one threshold", Unsupported),
    (trained("stages=2,offload=host"), "offload=host .*use offload=disk", Unsupported),
    (trained("auto", engine="sim"), "engine sim: make a plan with `manyhands plan`", Unsupported),
    (nothing_fits, "memory_per_worker=2.0 GB; the smallest is stages=2,micro_batches=8,.* 3.0 GB a worker", BadInput),
    (lambda: limits_of("2", 2), "a size with its unit, .*got '2'", BadInput),
    (lambda: limits_of("1GB,2GB", 3), "one for each of the 3 workers; got 2", BadInput),
    (trained("stages=2", memory_per_worker="2GB"), 'give model_parallel="auto"', BadInput),
    (trained("auto", 1), "for 2 workers or more", BadInput),
    (
        lambda: mh.prepare(MLP(), None, model_parallel="stages=2"),
        "Declare a task, and train it with mh.train",
        Unsupported,
    ),
    (trained("no_plan.json"), "plan no_plan.json cannot be read .*: write it again with `manyhands plan", BadInput),
    (trained("stages=2", 4, "diloco", survive="max_losses=1"), "diloco does not, or compresses", Unsupported),
    (trained("stages=2", 4, "allreduce:compress=topk:0.1", survive="max_losses=1"), "compresses", Unsupported),
    (trained("stages=2", 4, "downpour", survive="max_losses=1"), "max_restarts", Unsupported),
    (trained("stages=2", 4, survive="max_losses=1,max_workers=5"), "give a multiple of 2", BadInput),
    (trained("stages=2", strategy="downpour", engine="sim"), "sim does not hold a center for each stage", Unsupported),
    (trained("stages=2", 4, survive="max_losses=1", engine="sim"), "sim does not play lost replicas", Unsupported),
    (trained("stages=2", executor=lambda task, worker: None), "executor .*leave model_parallel out", Unsupported),
    (cut("stages=6", MLP, classified), "stages=6 needs 5 places to cut the model, and it has 4: 1, 2, 3, 4", BadInput),
    (cut("stages=2,cut=[blocks.9]"), r"cut=blocks\.9: the model has no such module; did you mean blocks\.3", BadInput),
    (cut("stages=2,cut=[blocks]"), "cut=blocks: it holds modules and is not called itself", BadInput),
    (cut("stages=2,cut=[tokens]"), "cut=tokens: nothing is computed before it", BadInput),
    (cut("stages=2,cut=[drop]"), "cut=drop: it has no parameters", BadInput),
    (cut("stages=3,cut=[blocks.2,blocks.1]"), r"not in the order of the calls: blocks\.1, blocks\.2", BadInput),
    (
        cut("stages=3,cut=[cut1,cut2]", functools.partial(Body, between_marks), classified),
        "stage 1 would have none of the model's 6 parameters",
        BadInput,
    ),
    (compressed, r"tokens\.weight is tied, and several stages hold it", Unsupported),
    (threads, r"2 trainable parameters not of the model \(the first of shape \[3, 3\]\)", BadInput),
]


@pytest.mark.usefixtures("nothing_starts")
def test_a_refused_plan_says_what_is_known() -> None:
    for number, (refused, said, error) in enumerate(CASES):
        try:
            with pytest.raises(error, match=f"(?s){said}"):
                refused()
        except BaseException as failed:
            failed.add_note(f"case {number}: {said}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: torch.compile(MLP(), backend="eager"), "the model is compiled as a whole"),
        (compiled_in_place, "the module 1 is compiled in place"),
    ],
)
def test_a_compiled_model_is_refused(model: Any, said: str) -> None:
    with pytest.raises(Unsupported, match=f"{said}.*= torch.compile"):
        cut("stages=2", model, classified)()


def test_a_plan_that_is_taken_is_no_refused_one() -> None:
    cut("stages=2")()
