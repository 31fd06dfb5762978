"""Asynchronous runs, most of simulated workers, computed again bit for bit; what the events say of their order."""

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
from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.timeline import Deadlock
from manyhands.errors import BadInput, Unsupported
from manyhands.events import Event
from manyhands.evidence.replay.server import ReplayJournal
from slow_cases import slow_after


def with_dropout() -> nn.Module:
    """Draws random numbers in every tick: each worker's own."""
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3)).double()


def task(**fields: Any) -> mh.Task:
    return plain.task(**{"model": with_dropout, "train_data": plain.rows(150), "epochs": 2, **fields})


SIM = "sim:compute='row=1e-3,jitter=lognormal:0.5',network=lan"  # of any order: who is first is a matter of chance


def train(engine: Local | str, folder: Path, strategy: str, given: mh.Task | None = None, **options: Any) -> mh.Run:
    fields = {"workers": 3, "threads_per_worker": 1, **options}
    return mh.train(given or task(), engine=engine, strategy=strategy, run_dir=folder, **fields)


def check_replayed(run: mh.Run, folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    replayed = mh.replay(folder, task=task(), progress=lambda done, total: calls.append((done, total)))
    assert (replayed.identical, replayed.difference) == (True, 0.0)
    assert (replayed.workers, replayed.otherwise) == (3, "")
    assert calls[-1] == (len(calls), replayed.ticks)
    again = {name: p.detach() for name, p in run.model.named_parameters()}
    assert all(torch.equal(replayed.parameters[name], again[name]) for name in again)


@pytest.mark.parametrize(
    ("strategy", "servers"),
    slow_after(
        4,
        [
            *(("agn:window=3,bound=2", 2), ("easgd:period=3,bound=2", 1), ("update-sharing", 1)),
            *(("gossip:graph=pairs,period=3,bound=2", 1), ("diloco:period=2,via=server,quorum=1,grace=0,bound=2", 1)),
            *(("dynsgd:warmup=3", 1), ("distance", 1), ("eamsgd:period=2", 2), ("gossip:graph=pairs", 2)),
            *(("quorum:backups=1", 1), ("diloco:period=3,via=server", 1), ("update-sharing:density=0.02,warmup=3", 1)),
            *(("downpour:bound=0", 2), ("downpour:compress=powersgd:1", 2), ("agn:window=2,compress=qsgd:4", 1)),
        ],
    ),
)
def test_the_same_bits_in_the_journals_order(strategy: str, servers: int, tmp_path: Path) -> None:
    check_replayed(train(SIM, tmp_path / "run", strategy, servers=servers), tmp_path / "run")


@pytest.mark.slow
def test_the_same_bits_as_real_processes(local: Local, tmp_path: Path) -> None:
    """With messages between workers: before a checkpoint all take what is on its way, and a validation leaves it there."""
    check_replayed(train(local, tmp_path / "downpour", "downpour", servers=2), tmp_path / "downpour")
    data = {"validation_data": plain.rows(20, seed=3)}
    train(local, tmp_path / "cut", "update-sharing", validate_every=3, checkpoint_every=4, **data)
    assert mh.replay(tmp_path / "cut", task=task(**data)).identical


def test_the_best_that_was_kept_and_a_stop_half_way(tmp_path: Path) -> None:
    options = {"validation_data": plain.rows(20, seed=3), "max_steps": 18}
    train(SIM, tmp_path / "run", "downpour", keep="best:validation_loss", validate_every=4, **options)
    replayed = mh.replay(tmp_path / "run", task=task(**options))
    assert replayed.identical
    assert re.fullmatch(r"<Replayed \d+ steps of \d+ workers: the same bits>", repr(replayed))


def test_code_that_the_directory_names_is_not_imported(tmp_path: Path) -> None:
    """Wherever the file lies, in the directory too: who replays somebody else's run names what is to be imported."""
    folder = tmp_path / "run"
    code = """
import pathlib
pathlib.Path(__file__).with_name("imported").touch()
from manyhands.strategies.downpour import Downpour as Mine
import plain
from torch import nn
def model(): return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3)).double()
def task(): return plain.task(model=model, train_data=plain.rows(150), epochs=2)
"""
    train(SIM, folder, "downpour")
    settings = json.loads((folder / "config.json").read_text())
    result = json.loads((folder / "result.json").read_text())
    for what, name, given in (("task", "task", {}), ("strategy", "Mine", {"task": task()})):
        own = folder / f"own_{what}.py"
        own.write_text(code)
        (folder / "config.json").write_text(json.dumps(settings | {what: f"{own}:{name}"}))
        # who puts code there can write this, too
        result["sha256"]["config.json"] = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
        (folder / "result.json").write_text(json.dumps(result))
        with pytest.raises(BadInput, match=rf"names {what} .*own_{what}\.py:.* --{what} "):
            mh.replay(folder, **given)
        assert not (folder / "imported").exists()
        assert mh.replay(folder, **{**given, what: f"{own}:{name}"}).identical
        (folder / "imported").unlink()


class StopAt(Callback):
    def on_step(self, event: Event) -> str | None:
        return "stop" if event.tick >= 5 else None


@pytest.mark.parametrize(
    ("given", "options"),
    [({}, {"checkpoint_every": 6, "max_steps": 18}), ({"train_data": plain.rows(3000)}, {"callbacks": [StopAt()]})],
)
def test_windows_that_close_after_the_last_tick(given: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Their pushes are no tick's: an event of their own says them. The options are applied again to a given task."""
    run = train(SIM, tmp_path / "run", "dynsgd:window=4", task(**given), **options)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    if not run.info["stopped"]:  # then slices are no multiple of the window
        assert any(event["type"] == "closing" for event in events)
    pushing = [event for event in events if event["type"] in ("step", "closing")]
    assert sum(run.staleness.values()) == sum(len(event["values"].get("pushes", ())) for event in pushing)
    assert mh.replay(tmp_path / "run", task=task(**given)).identical


def test_a_journal_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    """Another order than the recorded one cannot be followed, other data end elsewhere, and changed events are no journal."""
    train(SIM, tmp_path / "run", "downpour")
    assert not mh.replay(tmp_path / "run", task=task(train_data=plain.rows(150, seed=9))).identical
    with pytest.raises(BadInput, match=r"was given its task as an object.*mh\.replay"):
        mh.replay(tmp_path / "run")
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


def test_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no finished run"):
        mh.replay(tmp_path / "nothing")
    for strategy, words in (("allreduce", "allreduce is synchronous: train"), ("hogwild", "hogwild has no order")):
        network = SIM.replace("lan", "'workers_per_host=all'")  # hogwild needs one host
        train(network, tmp_path / strategy, strategy)
        with pytest.raises(Unsupported, match=words):
            mh.replay(tmp_path / strategy, task=task())


def step(rank: int, **values: Any) -> Event:
    return Event(type="step", rank=rank, values={"epoch": 0, **values})


def test_leases_pulls_and_pushes_are_in_each_workers_order() -> None:
    steps = [step(0, lease=[0, 0, 0]), step(1, lease=[0, 1, 1]), step(1, lease=[1, 0, 2])]
    journal = ReplayJournal(2, [*steps, step(0, epoch=1, lease=[0, 0, 0])])
    first = Segment(epoch=0, first=0, until=2, parts=2)
    assert journal.lease(1, first) == Lease(index=0, part=1, handed=1)
    assert journal.lease(1, first) == Lease(index=1, part=0, handed=2)
    assert journal.lease(1, first) == End(reason="", left=[[2, 2], [2, 2]])
    assert journal.lease(0, first) == Lease(index=0, part=0, handed=0)
    assert journal.lease(0, first) == End(reason="", left=[[2, 2], [2, 2]])
    assert journal.lease(0, Segment(epoch=1, first=0, until=2, parts=2)) == Lease(index=0, part=0, handed=0)
    stopped = ReplayJournal(2, steps[:2], stopped="max_seconds")  # ends with its reason where nobody has more
    segment = Segment(epoch=0, first=0, until=5, parts=2)
    stopped.lease(0, segment)
    assert stopped.lease(0, segment).reason == ""
    stopped.lease(1, segment)
    assert stopped.lease(1, segment).reason == "max_seconds"
    steps = [step(0, pulls=[[0, 0]], pushes=[[1, 1]]), step(1, pulls=[[0, 1]])]
    journal = ReplayJournal(2, [*steps, step(0, pulls=[[1, 1]], pushes=[None]), step(1, pushes=[[2, 2]])])
    assert list(journal.records[0].pulls) == [[0, 0], [1, 1]]
    assert list(journal.records[0].pushes) == [[1, 1], None]
    assert list(journal.records[1].pushes) == [[2, 2]]
    assert journal.pulls == {(0, 0): 2, (1, 0): 1, (1, 1): 2, (0, 1): 1}
    assert journal.ticks == 4
