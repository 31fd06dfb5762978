"""What callbacks remember is saved with each checkpoint: a resumed run is an uninterrupted one for them, too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import plain
from manyhands.callbacks import EarlyStopping
from manyhands.errors import BadInput
from manyhands.events import Event


class Counting(mh.Callback):
    """How many of each it saw, and the steps at which it saw them."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"step": [], "validation": [], "epoch": []}

    def on_step(self, event: Event) -> None:
        self.seen["step"].append(event.step)

    def on_validation(self, event: Event) -> None:
        self.seen["validation"].append(event.step)

    def on_epoch(self, event: Event) -> None:
        self.seen["epoch"].append(event.step)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def train(callbacks: list[mh.Callback], **options: Any) -> mh.Run:
    """Nothing ever gets better: the rate is 0."""
    given: dict[str, Any] = {
        "model": plain.mlp,
        "loss": plain.cross_entropy,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        "train_data": plain.rows(30),
        "validation_data": plain.rows(6),
        "batch_size": 6,
        "epochs": 9,
        "engine": "sim",
        "workers": 2,
    }
    return mh.train(**{**given, **options}, callbacks=callbacks)


class Crash(mh.Callback):
    def on_step(self, event: Event) -> None:
        if event.step == 13:
            raise RuntimeError("the power failed")


CUTS: dict[str, dict[str, Any]] = {  # where the first launch ends
    "after an epoch": {"epochs": 2},
    "inside an epoch": {"checkpoint_every": 4},
}


@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_patience_and_counts_of_a_resumed_run_are_those_of_an_uninterrupted_one(
    cut: dict[str, Any], strategy: str, tmp_path: Path
) -> None:
    def callbacks() -> tuple[Counting, EarlyStopping]:
        return Counting(), EarlyStopping(patience=3)

    whole, first, again = callbacks(), callbacks(), callbacks()
    run = train([*whole], strategy=strategy)
    with nullcontext() if "epochs" in cut else pytest.raises(RuntimeError, match="the power failed"):
        train([*first, *([] if "epochs" in cut else [Crash()])], strategy=strategy, run_dir=tmp_path, **cut)
    resumed = train([*again], strategy=strategy, run_dir=tmp_path, resume=True)
    assert whole[1].failures == again[1].failures == 3
    assert (
        (run.info["stopped"], run.info["ticks"]) == (resumed.info["stopped"], resumed.info["ticks"]) == ("callback", 20)
    )
    assert again[0].seen["epoch"] == whole[0].seen["epoch"] == [5, 10, 15, 20]
    assert again[0].seen["step"] == whole[0].seen["step"] == [*range(1, 21)]
    assert again[0].seen["validation"] == whole[0].seen["validation"]


def test_states_without_a_callback_are_a_warning_and_a_callback_without_a_state_begins_anew(tmp_path: Path) -> None:
    train([Counting()], epochs=1, run_dir=tmp_path)
    stopping = EarlyStopping(patience=2)
    resumed = train([stopping], run_dir=tmp_path, resume=True)
    assert resumed.info["ticks"] == 20
    assert any("the state of Counting" in message for message in resumed.info["warnings"])


def test_a_state_that_is_no_json_is_named(tmp_path: Path) -> None:
    class Odd(mh.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"tensor": torch.zeros(1)}

    with pytest.raises(BadInput, match=r"Odd\.state_dict\(\) must return only JSON"):
        train([Odd()], epochs=1, run_dir=tmp_path)


def test_two_of_a_class_get_their_own_in_order(tmp_path: Path) -> None:
    make: Callable[[], list[EarlyStopping]] = lambda: [EarlyStopping(patience=5), EarlyStopping(patience=7)]  # noqa: E731
    train([*make()], epochs=3, run_dir=tmp_path)
    again = make()
    again[1].failures = -1
    train([*again], epochs=4, run_dir=tmp_path, resume=True)
    assert [one.failures for one in again] == [3, 3]
