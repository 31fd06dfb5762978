"""A Run: how it reads, its files, its predictions."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from manyhands.events import Event
from manyhands.evidence.advise import Advice
from manyhands.recording import summary
from manyhands.recording.event_log import EventLog
from manyhands.recording.run import Answer, Run, environment

ADVICE = Advice(kind="fine", text="fine: go on.", numbers={})


def facts(**changes: Any) -> dict[str, Any]:
    info = {"task": "digits", "strategy": "allreduce", "engine": "local", "workers": 2, "threads": 1, "device": "cpu"}
    info |= {"batch_size": 64, "batch_size_per_worker": 32.0, "rate": 0.003, "effective_rate": 0.003}
    info |= {"total_steps": 1234, "parameters": 38282}
    values = {
        "metrics": {"test_loss": 0.0521, "test_accuracy": 0.98667},
        "rows": {"total": 12970, "workers": [6485, 6485], "unused": 0},
        "timing": {"input": 0.1, "compute": 6.0, "exchange": 1.0, "wait": 0.9},
        "ledger": {"mean_": {"bytes": 61_200_000, "messages": 410}, "barrier": {"bytes": 0, "messages": 3}},
        "directory": Path("runs/digits-1"),
        "info": info | changes.pop("info", {}),
    }
    values |= {"staleness": {}, "staleness_of_workers": [], "seconds": 12.34, "steps": 205, "rounds": 205}
    return values | {"generations": 1} | changes


def test_the_whole_block() -> None:
    lines = summary.text(facts(), ADVICE).splitlines()
    for line, words in zip(
        lines,
        (
            r"digits: allreduce on 2 workers \(engine local, cpu, 1 thread each\)",
            "result +test_loss 0.0521   test_accuracy 0.9867",
            "12.3 s in all   1,621 rows/s in the loop   205 steps   205 rounds   12,970 rows",
            "64 rows, 32 a worker   rate 0.003   effective rate 0.003",
            "total steps 1,234   parameters 38,282",
            "time       input         0.10 s   1.2 %  ▎$",
            "             compute       6.00 s  75.0 %  █{18}$",
            "             exchange      1.00 s  12.5 %  ███$",
            "             wait          0.90 s  11.2 %  ██▊$",
            "61.2 MB by all workers in 413 messages: mean 61.2 MB",
            "directory  runs/digits-1",
            "^Advice: fine: go on.$",
        ),
        strict=True,
    ):
        assert re.search(words, line), (words, line)
    for share, drawn in ((0.0, ""), (1 / 192, "▏"), (0.5, "█" * 12), (1.0, "█" * 24)):
        assert summary.bar(share) == drawn


def test_what_is_unusual_is_said() -> None:
    info = {"stopped": "max_seconds", "warnings": ["checkpoint 3 is damaged"], "total_steps": None}
    text = summary.text(facts(info=info, rows={"total": 9, "workers": [9], "unused": 1}, generations=2), ADVICE)
    for words in ("unused     1 row ", "stopped .*: max_seconds", "checkpoint 3 is damaged", "changed 1 time\n"):
        assert re.search(words, text), words
    assert "total steps not known (a stream)" in text
    info = {"engine": "sim", "simulated": {"network": "latency=1ms", "seed": "0"}, "computed_s": 4.5}
    lines = summary.text(facts(info=info), ADVICE).splitlines()
    assert lines[0] == "digits: allreduce on 2 simulated workers (engine sim, cpu, 1 thread each)"
    assert any(re.match("  simulated  .*virtual.* 4.5 s$", line) for line in lines)
    assert "             network latency=1ms   seed 0" in lines
    for workers, whose in ((4, " of worker 0"), (1, "")):
        text = summary.text(facts(info={"own_pace": True, "workers": workers}, steps=65), ADVICE)
        assert f" 65 steps{whose} 205 rounds{whose} 12,970 rows " in " ".join(text.split())
    crowded = {"host": "alpha, beta", "workers": 2, "threads": 8, "cores": 4}
    text = summary.text(facts(info={"machines": [crowded]}), ADVICE)
    assert "2 workers with 8 threads on 4 cores of alpha, beta" in text
    for fine in ({"machines": [crowded | {"threads": 4}]}, {"machines": [crowded], "device": "cuda:0"}, {}):
        assert "wait for each other" not in summary.text(facts(info=fine), ADVICE)


def test_staleness_is_a_histogram_and_workers_are_named_where_they_differ() -> None:
    alike = facts(staleness={0: 4, 1: 92, 3: 4}, staleness_of_workers=[{0: 2, 1: 46, 3: 2}] * 2)
    lines = [line for line in summary.text(alike, ADVICE).splitlines() if "staleness" in line or "worker:" in line]
    assert lines == ["  staleness  0 ▁█·▁ 3   median 1   largest 3   of 100 pushes"]
    measured = summary.text(facts(staleness={0: 10, 3: 90}, staleness_of_workers=[], info={"gain": 0.25}), ADVICE)
    assert "\n             rate x curvature of a push 0.25; 3 versions late bears up to 0.445\n" in measured
    uneven = facts(staleness={0: 1, 5: 1}, staleness_of_workers=[{0: 1}, {}, {5: 1}])
    assert "\n             medians by worker: 0: 0   2: 5\n" in summary.text(uneven, ADVICE)
    many = facts(staleness={0: 10, 7: 1}, staleness_of_workers=[{0: 1}] * 9 + [{7: 1}])
    assert "medians of the workers from 0 (worker 0) to 7 (worker 9)" in summary.text(many, ADVICE)
    assert summary.blocks({0: 4, 1: 2, 2: 1}) == "█▄▂"
    wide = summary.blocks({0: 1, 1: 1, 999: 8})
    assert len(wide) == summary.BAR
    assert (wide[0], wide[1], wide[-1]) == ("▂", "·", "█")


def test_lines_keep_to_100_columns_and_html_escapes_what_it_shows() -> None:
    path = Path("/".join(["folder"] * 30))
    metrics = {f"validation_metric_{i}": 0.123456 for i in range(10)}
    text = summary.text(facts(directory=path, metrics=metrics, info={"warnings": ["word " * 60]}), ADVICE)
    assert str(path) in text
    assert all(len(line) <= summary.WIDTH for line in text.splitlines() if str(path) not in line)
    none = {"ledger": {}, "metrics": {}, "directory": None, "timing": dict.fromkeys(facts()["timing"], 0.0)}
    text = summary.text(facts(**none, info={"workers": 1}), ADVICE)
    assert "%" not in text
    assert "1 worker (engine local, cpu, 1 thread)" in text
    page = summary.html(facts(info={"task": "<b>mine</b>", "warnings": ["a < b"]}), ADVICE)
    assert "&lt;b&gt;mine" in page
    assert "a &lt; b" in page
    assert page.count("<tr>") == page.count("</tr>") == 11


def run_of(**changes: Any) -> Run:
    """Whose model doubles; in training mode it drops some."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout())
    nn.init.constant_(model[0].weight, 2.0)
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


def test_predictions_are_in_row_order_whatever_the_batch_size_and_the_loaders_order() -> None:
    def forward(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"a": model(batch["x"]), "b": (batch["x"][:, 0], [batch["x"] + 1])}

    run = run_of()
    run.model.train()
    for batch_size in (1, 3, 256):
        found = run.predict(ROWS, batch_size=batch_size)
        assert torch.equal(found, 2 * ROWS)
        assert not found.requires_grad
    assert run.model.training
    assert torch.equal(run.predict((ROWS, torch.zeros(10)), batch_size=4), 2 * ROWS)  # of a pair the inputs
    found = run.predict({"x": ROWS}, forward, batch_size=4)
    assert torch.equal(found["a"], 2 * ROWS)
    assert torch.equal(found["b"][0], ROWS[:, 0])
    assert torch.equal(found["b"][1][0], ROWS + 1)

    def collate(rows: list[Any]) -> Tensor:
        return torch.stack([row["x"] for row in rows])

    rows = [{"x": row} for row in ROWS]
    loader = DataLoader(rows, batch_size=3, shuffle=True, drop_last=True, collate_fn=collate)  # type: ignore[arg-type]
    assert torch.equal(run_of().predict(loader), 2 * ROWS)
    assert torch.equal(run_of().predict(DataLoader(TensorDataset(ROWS, ROWS), shuffle=True)), 2 * ROWS)
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


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    run_of().save(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        run_of(info={"bad": object()}).save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


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
