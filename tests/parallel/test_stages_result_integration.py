"""What comes of a run of stages: a file that its workers wrote together, and a model that is read when it is asked for."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from stage_models import TASKS, classified, masked
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import BadInput, ManyhandsError, Preempted


class Shifted(nn.Module):
    """With a buffer that no state_dict holds, a frozen parameter, and one that nothing uses."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.first, self.second, self.third = nn.Linear(12, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)
        self.first.bias.requires_grad_(False)
        self.idle = nn.Parameter(torch.randn(3))
        self.second.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(self.first(x))))


def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return classified(model, batch)


def count_calls(module: nn.Module, given: Any) -> None:
    if module.training:
        module.calls += 1


def shifted() -> nn.Module:
    model = Shifted()
    model.second.register_forward_pre_hook(count_calls)
    return model


TASKS = TASKS | {"shifted": TASKS["mlp"].with_fields(model=lambda: shifted().double(), loss=counted)}


def run(name: str, folder: Path | None, workers: int = 2, steps: int = 4, **options: Any) -> mh.Run:
    return mh.train(
        TASKS[name].with_fields(max_steps=steps, schedule=None),
        workers=workers,
        engine="local",
        model_parallel=f"stages={workers}",
        threads_per_worker=1,
        run_dir=folder,
        **options,
    )


@functools.cache
def gathered(name: str) -> mh.Run:
    """Without a run directory the first worker collects the model."""
    return run(name, None)


def expect_same(model: nn.Module, expected: nn.Module) -> None:
    own = model.state_dict() | dict(model.named_buffers())
    theirs = expected.state_dict() | dict(expected.named_buffers())
    assert own.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(own[name], value), name


@pytest.mark.parametrize("name", ["gpt", pytest.param("shifted", marks=pytest.mark.slow)])
def test_workers_write_the_model_and_nobody_has_all_of_it(name: str, tmp_path: Path) -> None:
    """pytorch#149640: a model is saved and loaded without a worker that must hold all of it. No byte of it travels."""
    found, expected = run(name, tmp_path / "run"), gathered(name)
    assert expected.ledger["send"]["bytes"] > 1000
    sent = found.ledger.get("send", {"bytes": 0})["bytes"]
    assert sent == (8 if name == "shifted" else 0)  # a buffer that no file holds
    file = (tmp_path / "run" / "model.safetensors").read_bytes()
    saved = safetensors.torch.load(file)
    assert file == safetensors.torch.save(saved)
    assert saved.keys() == expected.model.state_dict().keys()
    expect_same(found.model, expected.model)
    assert torch.equal(found.parameters, expected.parameters)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("checkpoints", "config.json", "events.jsonl", "launch.json", "model.safetensors", "result.json")
    }


def test_events_name_replica_and_stage(tmp_path: Path) -> None:
    mh.train(
        TASKS["gpt"].with_fields(max_steps=2),
        workers=4,
        engine="local",
        model_parallel="stages=2",
        threads_per_worker=1,
        run_dir=tmp_path,
    )
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    of_workers = [one for one in events if one["rank"] is not None]
    assert {one["type"] for one in of_workers} >= {"start", "step", "checkpoint", "epoch"}
    assert {one["rank"] for one in of_workers} == {0, 1, 2, 3}
    for one in of_workers:
        assert divmod(one["rank"], 2) == (one["values"]["replica"], one["values"]["stage"])


@pytest.mark.slow
def test_a_model_is_built_when_it_is_asked_for(tmp_path: Path) -> None:
    Shifted.made = 0
    found = run("shifted", tmp_path)
    assert Shifted.made == 0
    assert found.summary()
    assert found.advice().text
    assert Shifted.made == 0
    assert found.model is found.model
    assert Shifted.made == 1
    again = run("shifted", tmp_path, resume=True)  # the finished run
    before = Shifted.made
    for name, value in found.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    assert Shifted.made == before + 1
    with pytest.raises(BadInput, match="the finished run's parameters are not this model's"):
        run("mlp", tmp_path, resume=True)


@pytest.mark.slow
def test_a_file_that_a_later_run_wrote_is_no_models(tmp_path: Path) -> None:
    first = run("mlp", tmp_path)
    second = run("mlp", tmp_path, steps=6, resume=True)
    with pytest.raises(ManyhandsError, match="written anew"):
        first.model  # noqa: B018
    assert second.model is not None


@pytest.mark.slow
def test_a_module_of_the_users_holds_the_result(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    before = model[0].weight.detach().clone()
    found = mh.train(
        TASKS["mlp"].with_fields(model=model, max_steps=2, schedule=None),
        workers=2,
        engine="local",
        model_parallel="stages=2",
        run_dir=tmp_path,
    )
    assert found.model is model
    assert not torch.equal(model[0].weight, before)


SHORT_OF_MEMORY = """
    import gc, resource
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import manyhands as mh


    def wide():
        return nn.Sequential(*(nn.Linear(1600, 1600) for _ in range(8)))  # 82 MB


    if __name__ == "__main__":
        found = mh.train(
            model=wide,
            loss=lambda model, batch: model(batch[0]).square().mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            train_data=TensorDataset(torch.ones(4, 1600)),
            batch_size=4,
            max_steps=1,
            workers=2,
            engine="local",
            model_parallel="stages=2",
            run_dir="run",
            checkpoint_every=1000,
        )
        gc.collect()
        used = 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + (30 << 20), limits[1]))
        try:
            found.model
        except mh.ManyhandsError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        print(sum(p.numel() for p in found.model.parameters()))
"""


@pytest.mark.slow
def test_where_memory_is_short_an_error_names_the_file(script: Callable[..., Any]) -> None:
    """In a process whose earlier programs have left no free memory."""
    code, out, errors = script(SHORT_OF_MEMORY).end()
    assert code == 0, errors
    said, numbers = out.splitlines()
    assert "has not the memory for the model" in said
    assert "run/model.safetensors" in said
    assert int(numbers) == 8 * 1600 * 1601


class PreemptedAt:
    """A loss at whose n-th call on the last stage SIGTERM comes to the driver, and waits until that has said so."""

    def __init__(self, call: int) -> None:
        self.driver, self.call, self.calls = os.getpid(), call, 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        value = masked(model, batch)  # on other stages it ends here
        if self.calls == self.call:
            os.kill(self.driver, signal.SIGTERM)
            deadline = time.monotonic() + 30
            while mh.worker().driver.should_stop() != "preempted":
                assert time.monotonic() < deadline, "the driver told no worker to stop"
                time.sleep(0.001)
        return value


@pytest.mark.slow
def test_a_run_that_is_preempted_writes_no_model(tmp_path: Path) -> None:
    task = TASKS["gpt"].with_fields(loss=PreemptedAt(6))
    with pytest.raises(Preempted, match="resume it with resume=True"):
        mh.train(
            task,
            workers=2,
            engine="local",
            model_parallel="stages=2",
            threads_per_worker=1,
            run_dir=tmp_path,
        )
    assert not (tmp_path / "model.safetensors").exists()
    assert any((tmp_path / "checkpoints").iterdir())


SCRIPT = """
    import json, os, sys
    sys.path.insert(0, {folder!r})
    import torch
    import manyhands as mh
    from stage_models import GPT, TASKS
    torch.manual_seed(TASKS["gpt"].seed)
    model = GPT().double()
    task = TASKS["gpt"].with_fields(max_steps=4, schedule=None, model=model)
    run = mh.train(task, model_parallel="stages=2", threads_per_worker=1, run_dir={run_dir!r})
    assert run.model is model
    with open({out!r} + os.environ["RANK"], "w") as file:
        json.dump([run.parameters.tolist(), run.ledger["broadcast_"]["bytes"]], file)
"""


@pytest.mark.slow
def test_under_torchrun_every_rank_reads_the_file(tmp_path: Path) -> None:
    """The model is a module of the script's, of which each rank was a stage."""
    script = tmp_path / "script.py"
    given = {"folder": str(Path(__file__).parent), "run_dir": str(tmp_path / "run"), "out": str(tmp_path / "out")}
    script.write_text("\n".join(line[4:] for line in SCRIPT.format(**given).splitlines()))
    source = str(Path(mh.__file__).resolve().parents[1])
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])},
        check=True,
        capture_output=True,
        timeout=100,
    )
    expected = mh.train(
        TASKS["gpt"].with_fields(max_steps=4, schedule=None), workers=4, engine="local", model_parallel="stages=2"
    )
    for rank in range(4):
        parameters, broadcast = json.loads((tmp_path / f"out{rank}").read_text())
        assert parameters == pytest.approx(expected.parameters.tolist(), abs=1e-10)
        assert broadcast == expected.ledger["broadcast_"]["bytes"]  # at the start, between the replicas
