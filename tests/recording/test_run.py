"""A Run: its files, its predictions, its words."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from manyhands.events import Event
from manyhands.recording.event_log import EventLog
from manyhands.recording.run import Answer, Run, environment


class Model(nn.Module):
    """Doubles; in training mode it adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return x * self.scale + (torch.randn_like(x) if self.training else 0.0)


def run_of(**changes: Any) -> Run:
    model = Model()
    values: dict[str, Any] = {
        "answer": Answer.of([model]),
        "metrics": {"test_loss": 0.25},
        "history": [],
        "rows": {"total": 8, "workers": [8], "unused": 0},
        "timing": {"input": 0.0, "compute": 1.0, "exchange": 0.0, "wait": 0.0},
        "ledger": {},
        "seconds": 2.0,
        "steps": 1,
        "rounds": 0,
        "info": {"task": "double", "strategy": "solo", "workers": 1},
    }
    return Run(**values | changes)


ROWS = torch.arange(10.0).reshape(10, 1)


def test_predictions_are_in_row_order_whatever_the_batch_size() -> None:
    run = run_of()
    run.model.train()
    for batch_size in (1, 3, 10, 256):
        assert torch.equal(run.predict(ROWS, batch_size=batch_size), 2 * ROWS)
    assert run.model.training
    assert torch.equal(run.predict((ROWS, torch.zeros(10)), batch_size=4), 2 * ROWS)  # of a pair the inputs


def test_forward_says_how_and_its_outputs_may_have_parts() -> None:
    def forward(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"a": model(batch["x"]), "b": (batch["x"][:, 0], [batch["x"] + 1])}

    found = run_of().predict({"x": ROWS}, forward, batch_size=4)
    assert torch.equal(found["a"], 2 * ROWS)
    assert torch.equal(found["b"][0], ROWS[:, 0])
    assert torch.equal(found["b"][1][0], ROWS + 1)


def test_a_shuffling_loader_is_read_in_the_order_of_its_rows() -> None:
    def collate(rows: list[Any]) -> Tensor:
        return torch.stack([row["x"] for row in rows])

    rows, chunks = [{"x": row} for row in ROWS], ROWS.split(4)
    loader = DataLoader(rows, batch_size=3, shuffle=True, drop_last=True, collate_fn=collate)  # type: ignore[arg-type]
    assert torch.equal(run_of().predict(loader), 2 * ROWS)
    assert torch.equal(run_of().predict(DataLoader(TensorDataset(ROWS, ROWS), shuffle=True)), 2 * ROWS)
    assert torch.equal(run_of().predict(DataLoader(chunks, batch_size=None, shuffle=True)), 2 * ROWS)  # type: ignore[arg-type]
    assert torch.equal(run_of().predict(rows, batch_size=4, collate=collate), 2 * ROWS)


def test_result_json_is_valid_and_makes_the_run_again(tmp_path: Path) -> None:
    stale = {"staleness": {0: 3, 12: 1}, "staleness_of_workers": [{0: 3}, {12: 1}]}
    info = {"workers": 1, "stopped": "", "task": "double"}
    run = run_of(metrics={"test_loss": math.nan}, info=info, directory=tmp_path, **stale)
    log = EventLog(tmp_path / "events.jsonl")
    seconds = {"input_s": 0.1, "compute_s": 0.2, "exchange_s": 0.3, "wait_s": 0.4}
    values = {"epoch": 0, "loss": 1.0, "weight": 8.0, "rows": 8, "unused": 0, "rate": 0.1, "bytes": 0, "round": False}
    log.write(Event(type="step", rank=0, step=1, values=values | seconds))
    log.close()
    run.save(tmp_path / "result.json")
    saved = json.loads((tmp_path / "result.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    again = Run.from_json(saved, directory=tmp_path, answer=run.answer)
    assert math.isnan(again.metrics["test_loss"])
    assert again.info == run.info
    assert (again.rows, again.timing, again.seconds, again.steps) == (run.rows, run.timing, 2.0, 1)
    assert (again.staleness, again.staleness_of_workers) == tuple(stale.values())  # by number again
    assert [row["loss"] for row in again.history] == [1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "result.json"]


def test_a_result_that_cannot_be_written_leaves_the_old_one_and_a_full_disk_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    run_of().save(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        run_of(info={"bad": object()}).save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    full = tmp_path / "full"
    full.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    (full / f"result.json.{'0' * 16}.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        run_of().save(full / "result.json")
    assert list(full.iterdir()) == []


def test_the_summary_ends_with_the_advice_and_the_notebook_shows_it() -> None:
    info = {"task": "double", "strategy": "solo", "workers": 1, "threads": 1, "cores": 2, "engine": "local"}
    run = run_of(history=[{}] * 10, info=info)
    assert (
        run.summary().splitlines()[-1].startswith("Advice: try --workers 2: a step computes 100 ms, and 1 of 2 cores")
    )
    assert run.advice().text in run._repr_html_()
    assert repr(run) == "<Run of double: 1 step, 2.0 s, test_loss=0.25>"
    found = environment()  # what it ran with
    assert (found["versions"]["torch"], found["cores"] >= 1) == (torch.__version__, True)
    assert {"host", "command"} <= run_of().info.keys()
