"""Plans of real models, measured by workers: their units, their files, and runs that they choose."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import GPT, TASKS, classified, masked, numbers, task, tokens
from torch import nn

import manyhands as mh
from manyhands.comm.solo import SoloGroup
from manyhands.errors import BadInput
from manyhands.parallel.build import is_absent
from manyhands.parallel.planner.profile import ModelProfile, profile_units
from manyhands.parallel.planner.search import Plan
from manyhands.training.plan_check import compared
from manyhands.training.plans import Plans

pytestmark = pytest.mark.xdist_group("plans")  # which share one plan


@pytest.fixture(scope="module")
def mlp() -> Plans:
    return mh.plan(TASKS["mlp"], workers=2)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.parallel.planner.profile._LEAST_S", 0.0)


def profile_of(name: str, rows: int = 16) -> ModelProfile:
    data = TASKS[name].train_data
    batch = tuple(torch.stack(column) for column in zip(*(data[i] for i in range(rows)), strict=True))
    return profile_units(TASKS[name], batch, SoloGroup())


@pytest.mark.usefixtures("quick")
def test_units_of_a_model() -> None:
    """All parameters are some unit's, and each unit was run; equal ones are measured once."""
    for name in ("gpt", "tied", "marked", "cnn"):
        found, whole = profile_of(name), TASKS[name].model()
        sizes = {key: p.nbytes for key, p in whole.named_parameters()}
        assert {key: own for key, (own, _) in found.sizes.items()} == sizes, name
        assert {key for names in found.names for key in names} == set(sizes), name
        assert all(one.forward.at(4) > 0 and one.backward.at(4) > 0 for one in found.units), name
        assert (found.units[0].begins, found.rows) == ("", (1, 4)), name
        if name == "gpt":
            assert (len(found.units), found.distinct) == (8, 5)  # two embeddings, four blocks, a norm, a head
            assert len({one.forward for one in found.units[2:6]}) == 1


@pytest.mark.usefixtures("quick")
def test_what_crosses_and_what_the_optimizer_keeps() -> None:
    found = profile_of("mlp", rows=32)
    assert [one.crossing.at(5) for one in found.units] == [0.0, *(5 * 8 * width for width in (40, 8, 64, 16))]
    trained = [sum(found.sizes[name][1] for name in names) for names in found.names]
    assert [one.state for one in found.units] == [2 * own + 2 * 4 for own in trained]  # and each parameter's steps


@pytest.mark.usefixtures("quick")
def test_the_model_is_never_there_as_a_whole_and_is_as_before() -> None:
    torch.manual_seed(0)
    model = GPT().double()
    before = torch.get_rng_state()
    forwards = {name: module.forward for name, module in model.named_modules()}
    batch = tokens(16).tensors
    profile_units(task(GPT, masked, tokens(16), tokens(4)).with_fields(model=model), batch, SoloGroup())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(is_absent(p) for p in model.parameters())
    assert {name: module.forward for name, module in model.named_modules()} == forwards
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def changed(plan: Any, **fields: Any) -> Any:
    return type(plan)(**{**vars(plan), **fields})


@pytest.mark.slow
def test_a_plan_says_what_it_would_take(mlp: Plans) -> None:
    best, text = mlp.chosen, mlp.text()
    for word in (str(best), "2 workers", "one process"):
        assert word in text
    assert best.step_s > 0
    assert all(one.memory > 50e6 for one in best.stages)  # Python and torch alone take more
    again = json.loads(mlp.to_json())
    assert [one["plan"] for one in again["plans"]] == [str(one) for one in mlp.plans]
    slow, quick = (changed(mlp, alone=changed(mlp.alone, step_s=seconds)) for seconds in (1e3, 1e-9))
    assert quick.text().startswith("One process is faster")
    assert not slow.text().startswith("One process")
    too_large: tuple[Plan, ...] = tuple(changed(one, over=1.0) for one in mlp.plans)
    none = changed(mlp, plans=too_large, limits=(1000, 1000))
    assert none.best is None
    least = min(too_large, key=lambda one: one.memory)
    with pytest.raises(BadInput, match=str(least).replace(",", ".")):
        none.chosen  # noqa: B018


def run_by(plan: Any, **given: Any) -> mh.Run:
    return mh.train(TASKS["mlp"], workers=2, engine="local", model_parallel=plan, threads_per_worker=1, **given)


@pytest.mark.slow
def test_a_run_by_a_plan_is_compared_with_it(mlp: Plans, tmp_path: Path) -> None:
    mlp.save(tmp_path / "plan.json")
    run = run_by(str(tmp_path / "plan.json"), epochs=8)
    same = run_by(None if mlp.chosen.spec is None else str(mlp.chosen.spec), epochs=8)
    assert torch.equal(run.parameters, same.parameters)
    assert same.plan == {}
    assert run.plan["predicted_s"] == mlp.chosen.step_s
    assert run.plan["bytes"] == pytest.approx(max(run.memory_of_workers), rel=0.05)
    assert run.plan["message"].removeprefix("plan: ").split(" ")[0] in run.summary()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_starts")
def test_files_of_another_task_or_none_at_all(mlp: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    mlp.save(file)
    plan = json.loads(file.read_text())
    changes: list[tuple[dict[str, Any], str]] = [
        ({"workers": 3}, "3 workers"),
        ({"kind": "another"}, "no plan|not a plan"),
        ({"for": {"model": "0", "torch": torch.__version__}}, "another model"),
        ({"for": None}, "damaged"),
        ({"model_parallel": "stages=x"}, "damaged"),
    ]
    for text, says in [*((json.dumps(plan | change), says) for change, says in changes), ("{", "plan.json")]:
        file.write_text(text)
        with pytest.raises(BadInput, match=says):
            run_by(str(file))
    mlp.save(file)
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(BadInput, match="another torch"):
        run_by(str(file))


@pytest.mark.slow
@pytest.mark.nightly
def test_auto_takes_the_plan_that_fits() -> None:
    """Stages are what fits into less than a whole model takes."""
    wide = task(Wide, classified, numbers(16, (64,)), numbers(8, (64,)), batch_size=8)
    found = mh.plan(wide, workers=2)
    whole = next(one for one in found.plans if one.spec is None)
    least = min(one.memory for one in found.plans)
    limit = f"{(whole.memory + least) / 2e6:.0f}MB"
    run = mh.train(wide, workers=2, engine="local", model_parallel="auto", memory_per_worker=limit)
    assert len(run.info["stages"]) == 2
    assert run.plan["bytes"] < (whole.memory + least) / 2


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 1400), nn.Linear(1400, 1400), nn.Linear(1400, 1400), nn.Linear(1400, 5))


def test_what_is_off_is_named() -> None:
    predicted = {
        "step_s": 1.0,
        "memory": [1e8, 2e8],
        "terms": {"compute": 0.7, "update": 0.1, "wait": 0.2, "exchange": 0.0},
    }
    one = {"compute": 0.8, "wait": 0.2, "exchange": 0.0, "input": 0.0, "step_s": 1.0, "memory": 1e8}
    good = compared(predicted, [one, one | {"memory": 2.1e8, "step_s": 1.1, "wait": 0.3}])
    assert "+10%" in good["message"]
    assert "+5%" in good["message"]
    assert "off" not in good["message"]
    late = compared(predicted, [one | {"exchange": 0.6, "step_s": 1.6}, one])
    assert "exchange" in late["message"]
