"""What comes of a run of stages: a file that its workers wrote together, and a model that is read when it is asked for."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from driver_script import wait_until
from stage_models import masked
from stage_runs import train
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import BadInput, ManyhandsError, Preempted
from refusals import refused

slow = pytest.mark.slow


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


def count_calls(module: nn.Module, given: Any) -> None:
    if module.training:
        module.calls += 1


def shifted() -> nn.Module:
    model = Shifted()
    model.second.register_forward_pre_hook(count_calls)
    return model.double()


def run(folder: Path | None, model: Any = shifted, steps: int = 4, **options: Any) -> mh.Run:
    given = {"max_steps": steps, "schedule": None, "run_dir": folder, **options}
    return train("mlp", 2, "stages=2", engine="local", **({"model": model} if model else {}), **given)


@slow
def test_workers_write_the_model_and_nobody_has_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#149640: a model is saved and loaded without a worker that must hold all of it. No byte of it travels."""
    Shifted.made = 0
    found = run(tmp_path)
    assert found.summary()
    assert found.advice().text
    assert Shifted.made == 0  # it is built when it is asked for
    with monkeypatch.context() as patched:
        patched.setattr("manyhands.training.run_directory._models_for", lambda *_: torch.empty(1 << 60))
        refused("has not the memory for the model, .*/model.safetensors", lambda: found.model, kind=ManyhandsError)
    assert found.model is found.model
    assert Shifted.made == 1
    expected = run(None)  # without a run directory the first worker collects the model
    assert expected.ledger["send"]["bytes"] > 1000
    assert found.ledger["send"]["bytes"] == 8  # a buffer that no file holds
    file = (tmp_path / "model.safetensors").read_bytes()
    saved = safetensors.torch.load(file)
    assert file == safetensors.torch.save(saved)
    assert saved.keys() == expected.model.state_dict().keys()
    states = [one.state_dict() | dict(one.named_buffers()) for one in (found.model, expected.model)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name
    assert torch.equal(found.parameters, expected.parameters)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("checkpoints", "config.json", "events.jsonl", "launch.json", "model.safetensors", "result.json")
    }
    again = run(tmp_path, resume=True)  # the finished run
    made = Shifted.made
    for name, value in found.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    assert Shifted.made == made + 1
    with pytest.raises(BadInput, match="the finished run's parameters are not this model's"):
        run(tmp_path, model=None, resume=True)


@slow
def test_a_file_that_a_later_run_wrote_is_no_models(tmp_path: Path) -> None:
    first = run(tmp_path, model=None)
    second = run(tmp_path, model=None, steps=5, resume=True)
    refused("written anew", lambda: first.model, kind=ManyhandsError)
    assert second.model is not None


@slow
def test_a_module_of_the_users_holds_the_result(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    before = model[0].weight.detach().clone()
    found = run(tmp_path, model=model, steps=2)
    assert found.model is model
    assert not torch.equal(model[0].weight, before)


class PreemptedAt:
    """A loss at whose n-th call on the last stage SIGTERM comes to the driver, and waits until that has said so."""

    def __init__(self, call: int) -> None:
        self.driver, self.call, self.calls = os.getpid(), call, 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        value = masked(model, batch)  # on other stages it ends here
        if self.calls == self.call:
            os.kill(self.driver, signal.SIGTERM)
            wait_until(lambda: mh.worker().driver.should_stop() == "preempted", 30)
        return value


@slow
def test_a_run_that_is_preempted_writes_no_model(tmp_path: Path) -> None:
    with pytest.raises(Preempted, match="resume it with resume=True"):
        train("gpt", 2, "stages=2", engine="local", run_dir=tmp_path, loss=PreemptedAt(6))
    assert not (tmp_path / "model.safetensors").exists()
    assert any((tmp_path / "checkpoints").iterdir())
