"""A Run: what came of training a task."""

from __future__ import annotations

import json
import logging
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from manyhands import events, units
from manyhands.checkpoint.checkpoints import write_whole
from manyhands.checkpoint.paths import AnyPath, path_of
from manyhands.data.batch import merged
from manyhands.engines import capabilities_of
from manyhands.engines.cores import usable_cores
from manyhands.errors import BadInput
from manyhands.evidence.advise import Advice, Machine, RunMeasurements, advise, of_task
from manyhands.recording import event_log, summary
from manyhands.recording.history import PARTS, History
from manyhands.replica.evaluation import AveragedOutputs, evaluating
from manyhands.strategies import described

LOG = logging.getLogger("manyhands")
_ELSEWHERE = ("answer", "history", "directory")  # fields that result.json does not hold


class Answer:
    """What training found: the models are made, or filled, at their first use."""

    def __init__(self, make: Callable[[], list[nn.Module]], shapes: Sequence[tuple[int, ...]]) -> None:
        """make: one model, or all members of an ensemble. shapes: of a model's trainable parameters."""
        self._make, self.shapes = make, list(shapes)

    @classmethod
    def of(cls, models: list[nn.Module]) -> Self:
        """Of models that are there, as they are now."""
        answer = cls(lambda: models, [tuple(one.shape) for one in models[0].parameters() if one.requires_grad])
        assert answer.models
        return answer

    @cached_property
    def _made(self) -> tuple[list[nn.Module], Tensor]:
        models, self._make = self._make(), list  # what they were made of is not kept
        return models, torch.cat([p.detach().reshape(-1) for p in models[0].parameters() if p.requires_grad])

    @property
    def models(self) -> list[nn.Module]:
        return self._made[0]

    @property
    def parameters(self) -> Tensor:
        """[D] of the first model, as they were when it was made: it may be trained further."""
        return self._made[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"_made": self._made, "shapes": self.shapes, "_make": list}


@dataclass(kw_only=True, repr=False)
class Run:
    """The result of `train()`: a model, and what it took."""

    answer: Answer
    """Where `model`, `models` and `parameters` come from."""
    metrics: dict[str, float]
    """{"validation_loss", "test_accuracy", …}"""
    history: list[dict[str, Any]]
    """A list with a dict of numbers for each step, all workers together: `run.history[-1]["loss"]` (docs/events.md has the
    columns). pandas.DataFrame takes it as it is. Of runs of more than 32,768 steps a row is of several, as its column
    `ticks` says; events.jsonl has them all (`read_history`)."""
    rows: dict[str, Any]
    """Rows consumed: {"total", "workers": [one a worker], "unused": with a dropped or skipped gradient}. Where members
    changed also {"repeated": trained again, counted once, "partial": of lost workers, which only some of several shards
    of the server have}."""
    timing: dict[str, float]
    """Seconds of the training loop, mean over workers: {"input", "compute", "exchange", "wait"}."""
    timing_of_workers: list[dict[str, float]] = field(default_factory=list)
    """The same by rank: who computes longer than the others is slower."""
    memory_of_workers: list[int] = field(default_factory=list)
    """By rank, the most bytes that its process had resident, Python and PyTorch among them; on a GPU, the most
    allocated there. Of one worker in the caller's process, all of that process. Empty where workers share a process
    (engine sim)."""
    input: dict[str, float] = field(default_factory=dict)
    """What reading `mh.shards` cost all workers of this launch: {"bytes" read, in how many "reads", "retries" of reads that
    failed, blocks that the host's cache had ("hits") and those that it got ("misses"), "stored_bytes" of the files,
    "amplification": bytes read for each byte that one worker reads for the same rows, where rows are counted, "wait_s": seconds a worker waited,
    the mean}. Empty for other data."""
    ledger: dict[str, dict[str, int]]
    """What all workers sent: {operation: {"bytes", "messages"}}."""
    last_loss: float | None = None
    """Of the newest row of `history` that has one: the training loss, a mean over the rows of its batch."""
    staleness: dict[int, int] = field(default_factory=dict)
    """{versions: pushes}, of server strategies: how many versions others made between a worker's pull and its push."""
    staleness_of_workers: list[dict[int, int]] = field(default_factory=list)
    """The same by rank: who is later than the others is slower. Empty without a server."""
    seconds: float
    """Of the launch, from the call of `train()` to its result."""
    steps: int
    """Optimizer steps of one worker. At the workers' own pace (info["own_pace"]) those of worker 0 alone, while
    max_steps, validate_every and checkpoint_every count global batches."""
    rounds: int
    """Exchanges among replicas; at the workers' own pace those of worker 0."""
    generations: int = 1
    """Memberships the run had; 1 where no worker was lost or joined."""
    losses: list[dict[str, Any]] = field(default_factory=list)
    """Workers that were lost, and without which the run went on: {"worker_id", "host", "cause", "step", "seconds"}."""
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """Where the whole run started again: {"step": from which it went on, "cause", "seconds", "message"}."""
    goodput: dict[str, float] = field(default_factory=dict)
    """Where members changed: {"goodput": the share of the workers' time that was used, "wall_s": seconds since the first
    step, and in worker-seconds what was not: "absent_s", "paused_s" while groups were formed, "repeated_s"}."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Where a plan chose `model_parallel`: what it predicted and what came, {"predicted_s", "step_s": of a step,
    "predicted_bytes", "bytes": of the worker with the most memory, "stages": of each, "message": all in a line}."""
    directory: AnyPath | None = None
    """Of events.jsonl, checkpoints and result.json; None where nothing was written. Where run_dir was a URL, a
    RemotePath, whose text is that URL."""
    info: dict[str, Any] = field(default_factory=dict)
    """What ran: task, strategy, engine, workers, device, threads, batch_size, batch_size_per_worker, rate,
    effective_rate, total_steps, parameters, own_pace (whether workers go at their own), stopped ("" or why it ended
    early), warnings, command, host, cores, versions; with keep="best:METRIC", kept: {metric, epoch, step} of the model; with a server, gain: rate times largest curvature of a push, as
    the gradients showed it last (docs/events.md)."""

    def __post_init__(self) -> None:
        self.info = {**environment(), **self.info}

    # -- the answer --------------------------------------------------------------------------------------------------

    @property
    def models(self) -> list[nn.Module]:
        """One, or all members of an ensemble; made at the first use."""
        return self.answer.models

    @cached_property
    def model(self) -> nn.Module:
        """With the final parameters, or the best that `keep` kept; an ensemble's averages its members' outputs."""
        return self.models[0] if len(self.models) == 1 else AveragedOutputs(self.models).eval()

    @property
    def parameters(self) -> Tensor:
        """[D] the model's trainable parameters as training left them, flat and unpadded, in the model's order."""
        return self.answer.parameters

    # -- for people --------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A block of plain text, at most 100 columns but for the last line: `Advice: …`."""
        return summary.text(self._facts(), self.advice())

    def advice(self) -> Advice:
        """What the measured split of time says about the next run."""
        info, workers = self.info, self.info.get("workers", 1)
        seconds: dict[str, Any] = {f"{part}_s": self.timing.get(part, 0.0) for part in PARTS}
        return advise(
            RunMeasurements(
                workers=workers,
                steps=_ticks(self.history),
                **seconds,
                strategy=info.get("strategy", ""),
                **described(info.get("strategy", "")),
                **of_task(info),
                input=self.input,
                period=max(1.0, self.steps / self.rounds) if self.rounds else 1.0,
                server=bool(self.staleness),
                threads_per_worker=info.get("threads", 1),
                cores=workers * info["threads"] if "simulated" in info else info["cores"],
                machines=[Machine(**one) for one in info.get("machines", [])],
                device=info.get("device", "cpu"),
                simulated="simulated" in info,
                assumed="simulated" in info and "profile" not in info["simulated"],
                one_host=capabilities_of(info.get("engine", "")).one_host,
                compute_of_workers_s=[one["compute"] for one in self.timing_of_workers],
                sent_bytes=sum(row.get("bytes", 0) for row in self.history) / workers,
                parameters=info.get("parameters", 0),
                shapes=self.answer.shapes,
                rows_per_step=info.get("batch_size_per_worker", 0.0),
                epoch_steps=info.get("ticks_per_epoch"),
                unused=self.rows["unused"] / max(1, self.rows["total"]),
                rate=info.get("rate", 0.0),
                staleness=self.staleness,
                push_gain=info.get("gain"),
            )
        )

    def __repr__(self) -> str:
        numbers = [
            units.seconds(self.seconds),
            *(f"{name}={units.number(value)}" for name, value in self.metrics.items()),
        ]
        return f"<Run of {self.info.get('task', 'a task')}: {units.count(self.steps, 'step')}, {', '.join(numbers)}>"

    def _repr_html_(self) -> str:
        return summary.html(self._facts(), self.advice())

    # -- the model at work -------------------------------------------------------------------------------------------

    def predict(
        self,
        data: Any,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        *,
        batch_size: int = 256,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """The model's outputs for all rows of `data`, in row order, on the CPU: a tensor [rows, …], or a tuple, list
        or dict of such.

        data: anything that a task takes as data. A batch of it that is a pair counts as (inputs, targets), and the
        model gets the inputs; any other batch goes to the model as it is. forward: (model, batch) -> outputs does it
        otherwise. A DataLoader stands for its dataset: every row of it once, in the dataset's order, whatever its
        sampler and `drop_last` say, loaded by its own collate function and processes; one with an `__iter__` of its own
        gives what it gives, in its order. collate: [row, …] -> batch, as the task's, for rows that torch's
        default_collate cannot join; a BadInput beside a DataLoader, which has its own. In evaluation mode and without
        gradients; the model is left in the mode it was in.
        """
        from manyhands.data.feed import Feed
        from manyhands.data.open_source import open_source

        def outputs(batch: Any) -> Any:
            if forward is not None:
                return forward(self.model, batch)
            return self.model(batch[0] if isinstance(batch, list | tuple) and len(batch) == 2 else batch)

        place = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        source = open_source(in_row_order(data, batch_size), collate=collate)
        feed = Feed(source, rank=0, size=1, batch_size=batch_size, seed=0, shuffle=False, device=place)
        with evaluating(self.model), closing(feed.epoch(0)) as slices:
            found = [merged([outputs(one.batch)], lambda own: own[0].cpu()) for one in slices if one.batch is not None]
        return merged(found, torch.cat)

    # -- on disk -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """All but tensors and history (which is in events.jsonl), as in result.json; NaN as in docs/events.md."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _ELSEWHERE}
        for name in ("losses", "goodput", "plan"):
            if not values[name]:
                del values[name]
        return events.to_json(values)

    @classmethod
    def from_json(cls, saved: str | dict[str, Any], *, answer: Answer, directory: AnyPath | None = None) -> Self:
        """The Run that wrote this JSON (text, or what json.loads made of it); its history is read from the directory's
        events.jsonl.

        BadInput for JSON that is no run's; where events are damaged, info["warnings"] says so.
        """
        values = _values_of(saved)
        history, warnings = History(values["info"].get("workers", 1)), list[str]()
        if directory is not None:
            history.preload(event_log.steps_that_count(event_log.files_in(directory), warn=warnings.append))
            history.close()
            total = values["rows"].get("total")
            if history.consumed != total and not warnings:
                warnings.append(
                    f"events are missing in {directory}: they have {history.consumed:,} of {total:,} rows of data"
                )
        for message in warnings:
            LOG.warning("%s", message)
        if warnings:
            values["info"]["warnings"] = [*values["info"].get("warnings", []), *warnings]
        values["staleness"] = _by_number(values["staleness"])
        values["staleness_of_workers"] = list(map(_by_number, values.get("staleness_of_workers", [])))
        return cls(**values, answer=answer, history=history.rows, directory=directory)

    def save(self, path: str | AnyPath) -> None:
        """Write `to_json` to a file: whole, synced and renamed into place, or not at all (OSError, ManyhandsError)."""
        write_whole(path_of(path), (self.to_json() + "\n").encode())

    def _facts(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("answer", "history")} | {
            "ticks": _ticks(self.history)
        }


def _values_of(saved: str | dict[str, Any]) -> dict[str, Any]:
    """The fields of a Run but for those that are _ELSEWHERE."""
    try:
        values = events.from_json(saved if isinstance(saved, str) else json.dumps(saved))
    except (ValueError, RecursionError) as problem:
        raise BadInput(
            f"this is not the JSON of a run: {problem}. Give what Run.to_json returns, or a result.json"
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("info"), dict):
        raise BadInput(
            "this is not the JSON of a run, because info is missing. Give what Run.to_json returns, or a result.json"
        )
    values.pop("sha256", None)  # of the file, not of the run
    known = [one for one in fields(Run) if one.name not in _ELSEWHERE]
    missing = [one.name for one in known if one.default is one.default_factory is MISSING and one.name not in values]
    unknown = sorted(values.keys() - {one.name for one in known})
    if missing or unknown:
        raise BadInput(
            f"this is not the JSON of a run (missing fields: {missing}, unknown fields: {unknown[:5]}). "
            "Give what Run.to_json returns, or a result.json"
        )
    return values


def read_history(directory: str | AnyPath) -> Iterator[dict[str, Any]]:
    """A row for each tick of the run in a directory, read from its events one at a time, however many there are
    (docs/events.md).

    `Run.history` is the same, but for runs of more than 32,768 ticks, which it sums up. Ticks that not all workers made
    come last. BadInput where events are missing or damaged.
    """
    folder = path_of(directory)
    files = event_log.files_in(folder)
    if not files:
        raise BadInput(f"{folder} holds no {event_log.FILE}: give the directory of a run")
    history = History(1)
    yield from history.rows_of(event_log.steps_that_count(files))
    yield from history.close()


def _ticks(history: list[dict[str, Any]]) -> int:
    return sum(row.get("ticks", 1) for row in history)


def _by_number(histogram: dict[str, int]) -> dict[int, int]:
    """JSON has string keys only."""
    return {int(versions): pushes for versions, pushes in histogram.items()}


def environment() -> dict[str, Any]:
    """What a run says of the machine, the versions and the command it ran with."""
    from manyhands import __version__

    return {
        "host": platform.node(),
        "cores": usable_cores(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "manyhands": __version__,
            **({"numba": sys.modules["numba"].__version__} if "numba" in sys.modules else {}),  # it compiles kernels
        },
        "command": shlex.join(sys.argv),
    }


def in_row_order(data: Any, batch_size: int) -> Any:
    """A DataLoader as one without its sampler, so that each row of its dataset comes once, in the dataset's order; anything
    else as it is."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return data
    from manyhands.data.readers.loaders import is_indexed, options_of, unshared

    data = unshared(data)
    if data.batch_sampler is not None and not is_indexed(data):
        return data

    return DataLoader(
        data.dataset,
        batch_size=None if data.batch_sampler is None else batch_size,
        collate_fn=data.collate_fn,
        num_workers=data.num_workers,
        **options_of(data),
    )
