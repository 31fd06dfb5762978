"""Trainings with a parameter server on engine `local`, and what their events say was trained."""

from pathlib import Path
from typing import Any

import torch

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.events import Event
from manyhands.recording import event_log


def learnable(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, _ = plain.rows(n)
    return x, x[:, :3].argmax(1)


def task(**fields: Any) -> mh.Task:
    return plain.task(**{"train_data": learnable(130), "optimizer": plain.OPTIMIZERS["sgd"], "epochs": 3, **fields})


def train(given: mh.Task, engine: Local | str, strategy: str, workers: int = 3, **options: Any) -> mh.Run:
    return mh.train(given, engine=engine, strategy=strategy, workers=workers, threads_per_worker=1, **options)


def steps(folder: Path) -> list[Event]:
    return [event for event in event_log.read(folder / event_log.FILE) if event.type == "step"]


def leases(folder: Path) -> list[tuple[int, int, int]]:
    """(epoch, batch, part) of every slice that was trained, in all launches."""
    return [(step.values["epoch"], *step.values["lease"][:2]) for step in steps(folder)]
