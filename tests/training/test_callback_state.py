"""What callbacks remember is saved with each checkpoint: a resumed run is an uninterrupted one for them, too."""

from collections.abc import Callable
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
    """The steps at which it heard of each."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"step": [], "validation": [], "epoch": []}

    def hear(self, event: Event) -> None:
        self.seen[event.type].append(event.step)

    on_step = on_validation = on_epoch = hear

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def train(callbacks: list[mh.Callback], **options: Any) -> mh.Run:
    """Nothing ever gets better: the rate is 0."""
    data = {"train_data": plain.rows(30), "validation_data": plain.rows(6), "batch_size": 6}
    given = plain.task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0), **data)
    return mh.train(given, **{"epochs": 9, "engine": "sim", "workers": 2, **options}, callbacks=callbacks)


class Crash(mh.Callback):
    def on_step(self, event: Event) -> None:
        if event.step == 13:
            raise RuntimeError("the power failed")


@pytest.mark.parametrize(("cut", "strategy"), [("epoch", "allreduce"), ("step", "downpour")])
def test_patience_and_counts_of_a_resumed_run_are_those_of_an_uninterrupted_one(
    cut: str, strategy: str, tmp_path: Path
) -> None:
    """The first launch ends after an epoch, or with an error inside of one."""

    def callbacks() -> tuple[Counting, EarlyStopping]:
        return Counting(), EarlyStopping(patience=3)

    whole, first, again = callbacks(), callbacks(), callbacks()
    run = train([*whole], strategy=strategy)
    if cut == "epoch":
        train([*first], strategy=strategy, run_dir=tmp_path, epochs=2)
    else:
        with pytest.raises(RuntimeError, match="the power failed"):
            train([*first, Crash()], strategy=strategy, run_dir=tmp_path, checkpoint_every=4)
    resumed = train([*again], strategy=strategy, run_dir=tmp_path, resume=True)
    assert whole[1].failures == again[1].failures == 3
    assert [(r.info["stopped"], r.info["ticks"]) for r in (run, resumed)] == [("callback", 20)] * 2
    assert again[0].seen["epoch"] == whole[0].seen["epoch"] == [5, 10, 15, 20]
    assert again[0].seen["step"] == whole[0].seen["step"] == [*range(1, 21)]
    assert again[0].seen["validation"] == whole[0].seen["validation"]


def test_a_state_that_is_no_json_is_named(tmp_path: Path) -> None:
    class Odd(mh.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"tensor": torch.zeros(1)}

    with pytest.raises(BadInput, match=r"Odd\.state_dict\(\) must return only JSON"):
        train([Odd()], epochs=1, run_dir=tmp_path)


def test_two_of_a_class_get_their_own_in_order_and_others_none(tmp_path: Path) -> None:
    """States without a callback are a warning; a callback without a state begins anew."""
    make: Callable[[], list[EarlyStopping]] = lambda: [EarlyStopping(patience=5), EarlyStopping(patience=7)]  # noqa: E731
    train([Counting(), *make()], epochs=3, run_dir=tmp_path)
    again = make()
    again[1].failures = -1
    resumed = train([*again], epochs=4, run_dir=tmp_path, resume=True)
    assert [one.failures for one in again] == [3, 3]
    assert any("the state of Counting" in message for message in resumed.info["warnings"])
