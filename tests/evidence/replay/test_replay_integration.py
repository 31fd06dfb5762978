"""Asynchronous runs of real processes, computed again bit for bit."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
import plain
from manyhands.callbacks.base import Callback
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.timeline import Deadlock
from manyhands.errors import BadInput, Unsupported
from manyhands.events import Event
from slow_cases import slow_after


class WithDropout(nn.Sequential):
    """Draws random numbers in every tick: each worker's own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3))
        self.double()


def task(**fields: Any) -> mh.Task:
    return plain.task(**{"model": WithDropout, "train_data": plain.rows(150), "epochs": 2, **fields})


def train(local: Local, folder: Path, strategy: str, **options: Any) -> mh.Run:
    fields = {"workers": 3, "threads_per_worker": 1, **options}
    return mh.train(task(), engine=local, strategy=strategy, run_dir=folder, **fields)


@pytest.mark.parametrize(
    ("strategy", "servers"),
    slow_after(
        4,
        [
            ("downpour", 2),
            ("agn:window=3,bound=2", 1),
            ("dynsgd:warmup=3", 1),
            ("distance", 1),
            ("easgd:period=3,bound=2", 1),
            ("eamsgd:period=2", 2),
            ("gossip:graph=pairs", 2),
            ("gossip:graph=pairs,period=3,bound=2", 1),
            ("quorum:backups=1", 1),
            ("diloco:period=3,via=server", 1),
            ("diloco:period=2,via=server,quorum=1,grace=0,bound=2", 1),
            ("update-sharing", 1),
            ("update-sharing:density=0.02,warmup=3", 1),
            ("downpour:bound=0", 2),
            ("downpour:compress=powersgd:1", 2),
            ("agn:window=2,compress=qsgd:4", 1),
        ],
    ),
)
def test_the_same_bits_in_the_journals_order(strategy: str, servers: int, local: Local, tmp_path: Path) -> None:
    run = train(local, tmp_path / "run", strategy, servers=servers)
    progress_calls: list[tuple[int, int]] = []
    replayed = mh.replay(
        tmp_path / "run", task=task(), progress=lambda done, total: progress_calls.append((done, total))
    )
    assert replayed.identical
    assert replayed.difference == 0.0
    assert (replayed.workers, replayed.otherwise) == (3, "")
    assert progress_calls[-1] == (len(progress_calls), replayed.ticks)
    again = {name: p.detach() for name, p in run.model.named_parameters()}
    assert all(torch.equal(replayed.parameters[name], again[name]) for name in again)


@pytest.mark.slow
def test_messages_between_workers_also_where_checkpoints_and_validations_cut_the_epochs(
    local: Local, tmp_path: Path
) -> None:
    """Before a checkpoint all take what is on its way, and a validation leaves it there."""
    options = {"validate_every": 3, "checkpoint_every": 4, "validation_data": plain.rows(20, seed=3)}
    train(local, tmp_path / "run", "update-sharing", **options)
    assert mh.replay(tmp_path / "run", task=task(validation_data=options["validation_data"])).identical


@pytest.mark.slow
def test_the_best_that_was_kept_and_a_stop_half_way(local: Local, tmp_path: Path) -> None:
    options = {
        "keep": "best:validation_loss",
        "validate_every": 4,
        "validation_data": plain.rows(20, seed=3),
        "max_steps": 18,
    }
    mh.train(
        task(), engine=local, strategy="downpour", workers=3, threads_per_worker=1, run_dir=tmp_path / "run", **options
    )
    again = {name: options[name] for name in ("validation_data", "max_steps")}
    replayed = mh.replay(tmp_path / "run", task=task(**again))
    assert replayed.identical
    assert re.fullmatch(r"<Replayed \d+ steps of \d+ workers: the same bits>", repr(replayed))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["task", "strategy"])
def test_code_that_the_directory_names_is_not_imported(local: Local, tmp_path: Path, what: str) -> None:
    """Wherever the file lies, in the directory too: who replays somebody else's run names what is to be imported."""
    folder = tmp_path / "run"
    own = folder / "own.py"
    code = """
import pathlib
pathlib.Path(__file__).with_name("imported").touch()
from manyhands.strategies.downpour import Downpour as Mine
from evidence.replay.test_replay_integration import task as declared
def task(): return declared()
"""
    train(local, folder, "downpour")
    own.write_text(code)
    settings = json.loads((folder / "config.json").read_text())
    names = {"task": f"{own}:task", "strategy": f"{own}:Mine"}
    (folder / "config.json").write_text(json.dumps(settings | {what: names[what]}))
    result = json.loads((folder / "result.json").read_text())  # who puts code there can write this, too
    result["sha256"]["config.json"] = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    (folder / "result.json").write_text(json.dumps(result))
    given = {"task": task()} if what == "strategy" else {}
    with pytest.raises(BadInput, match=rf"names {what} .*own\.py:.* --{what} "):
        mh.replay(folder, **given)
    assert not (folder / "imported").exists()
    assert mh.replay(folder, **{**given, what: names[what]}).identical
    assert (folder / "imported").exists()


class StopAt(Callback):
    def on_step(self, event: Event) -> str | None:
        return "stop" if event.tick >= 5 else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("dynsgd:window=4", {"checkpoint_every": 6, "max_steps": 18}),
        ("agn", {"validate_every": 9, "validation_data": plain.rows(20, seed=3), "max_steps": 18}),
        ("dynsgd:window=4", {"callbacks": [StopAt()], "train_data": plain.rows(9000)}),
    ],
)
def test_windows_that_close_after_the_last_tick(
    strategy: str, options: dict[str, Any], local: Local, tmp_path: Path
) -> None:
    """Their pushes are no tick's: an event of their own says them. The command's options are applied again to a given task."""
    given = {name: options.pop(name) for name in ("validation_data", "train_data") if name in options}
    run = mh.train(
        task(**given),
        engine=local,
        strategy=strategy,
        workers=3,
        threads_per_worker=1,
        run_dir=tmp_path / "run",
        **options,
    )
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    if not run.info["stopped"]:  # then slices are no multiple of the window
        assert any(event["type"] == "closing" for event in events)
    assert sum(run.staleness.values()) == sum(
        len(event["values"].get("pushes", ())) for event in events if event["type"] in ("step", "closing")
    )
    assert mh.replay(tmp_path / "run", task=task(**given)).identical


@pytest.mark.slow
def test_a_journal_that_does_not_fit_is_an_error(local: Local, tmp_path: Path) -> None:
    """Another order than the recorded one cannot be followed, other data end elsewhere, and changed events are no journal."""
    train(local, tmp_path / "run", "downpour")
    assert not mh.replay(tmp_path / "run", task=task(train_data=plain.rows(150, seed=9))).identical
    events = tmp_path / "run" / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    pushes = [line["values"] for line in lines if line["type"] == "step" and "pushes" in line["values"]]
    pushes[5]["pushes"] = [[10_000]]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(BadInput, match=r"changed after it was written: events.jsonl"):
        mh.replay(tmp_path / "run", task=task())
    result = tmp_path / "run" / "result.json"
    saved = json.loads(result.read_text())
    saved["sha256"]["events.jsonl"] = hashlib.sha256(events.read_bytes()).hexdigest()  # of all of it
    result.write_text(json.dumps(saved))
    with pytest.raises(Deadlock, match="does not repeat the recorded run"):
        mh.replay(tmp_path / "run", task=task())


@pytest.mark.slow
def test_refused_by_name(local: Local, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no finished run"):
        mh.replay(tmp_path / "nothing")
    train(local, tmp_path / "sync", "allreduce")
    with pytest.raises(Unsupported, match="allreduce is synchronous: train again with the same seed"):
        mh.replay(tmp_path / "sync", task=task())
    train(local, tmp_path / "wild", "hogwild")
    with pytest.raises(Unsupported, match="hogwild has no order"):
        mh.replay(tmp_path / "wild", task=task())
    train(local, tmp_path / "run", "downpour")
    with pytest.raises(BadInput, match=r"was given its task as an object.*mh\.replay"):
        mh.replay(tmp_path / "run")
