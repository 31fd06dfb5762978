"""`check`: prove on a task of the user's own that N workers of allreduce equal one, or name what keeps them apart.

The proof runs the code that trains: the loop, the replica, the strategy and the exchange are those of every run, first with
one worker, then with N, and after each step the loss, the mean gradient and the parameters are compared. Workers are
processes, which is what is trained with later: each has a copy of the task that was sent to it, generators and modules of
its own, and the exchange goes through the memory that they share. Simulated workers (engine `sim`) take turns in this
process, and are quicker to set up; causes are tried there. Where a task cannot be sent to processes they prove it, and the
report says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from manyhands import engines, rng
from manyhands.engines.base import Engine
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.errors import BadInput, Unsupported, is_whole
from manyhands.evidence.check.copies import copies_of, with_data
from manyhands.evidence.check.diagnosis import PROVEN_ELSEWHERE, Ablation, Judgement
from manyhands.evidence.check.examining import Suspect
from manyhands.evidence.check.findings import NOTE, Checked, Finding
from manyhands.evidence.check.function_mode import eager
from manyhands.evidence.check.inspection import Inspection
from manyhands.evidence.check.interventions import words
from manyhands.evidence.check.proofs import Proving
from manyhands.evidence.check.rows import Data
from manyhands.evidence.check.trial_config import SUMMED
from manyhands.evidence.check.trials import Bench
from manyhands.strategies.allreduce import AllReduce
from manyhands.task import Task
from manyhands.training.config import TrainConfig, task_from
from manyhands.training.plan import build_model

__all__ = ["Checked", "check"]

STEPS = 8
_HARMLESS = words("data-order random-rows hidden-state nondeterministic-operator depends-on-workers")
"""What is worth a note where N workers equal one; other suspects are dropped then."""


def check(
    task: Task | str | None = None,
    *,
    workers: int = 2,
    steps: int = STEPS,
    engine: Engine | str = "local",
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda line: None,
    **task_fields: Any,
) -> Checked:
    """Prove that N workers of allreduce equal one on this task, step by step, or find out what keeps them apart.

    Two proofs, in float64: with the task's own batch size (less where rows are few), and with batches that do not divide and
    a last one of a single row, where the data allows it. Where they fail, whatever may be the cause is taken away, all of
    it and then all but one, and what remains is what that one makes. Further: whether rows are handed out once, slices
    are cut from what one worker reads, everything can be sent to processes, model() builds the same from the seed, loss
    and metrics are means, the optimizer holds the model's parameters.

    The caller's task, model and random state stay as they are: all works on copies. Runs on the CPU.

    task, task_fields: as `train` takes them. workers: at least 2. steps: of each proof. engine: local (processes), or sim
    (turns in this process). timeout_s: a worker process without progress for so long fails. say: called with a line
    about what is done now.

    Raises BadInput for what cannot be, and whatever one worker alone raises, as `train` does.
    """
    started = time.monotonic()
    own, place = task_from(task, task_fields), _engine_of(engine)
    for name, value, least in (("workers", workers, 2), ("steps", steps, 1)):
        if not is_whole(value, least):
            raise BadInput(f"check: {name} must be a whole number of at least {least}, not {value!r}")
    with ExitStack() as stack:
        stack.enter_context(rng.kept())
        stack.enter_context(eager())
        if isinstance(engine, str) and isinstance(place, Local):
            stack.enter_context(place)  # its processes begin to load while this one looks at the task
        say("copying the task, as it is sent to workers")
        sent, unsendable = stack.enter_context(copies_of(own))
        copies = stack.enter_context(with_data(sent)) if sent.usable else sent
        processes = sent.sendable and sys.platform == "linux"
        bench = Bench(
            copies=copies, sent=sent, workers=workers, engine=place if processes else Sim(), timeout_s=timeout_s
        )
        proving, findings = Proving(bench, say), list(unsendable)
        held, unjudged = list[str](), list[str]()
        if sent.usable:  # else which part can be neither sent nor copied is all that can be said
            _refuse(bench)
            proving.run(steps)
            found, held, unjudged = _explained(proving)
            findings += [*proving.findings, *found]
    return Checked(
        task=own.name,
        workers=workers,
        findings=tuple(sorted(findings, key=lambda finding: not finding.breaks)),
        proofs=tuple(proving.proofs),
        held=tuple(held if unsendable else [*held, "everything can be sent to other processes"]),
        unjudged=tuple(unjudged),
        dtype=proving.dtype,
        limit=proving.limit,
        seconds=time.monotonic() - started,
    )


def _engine_of(engine: Engine | str) -> Local | Sim:
    found = engines.engine_of(engine)
    if not isinstance(found, Local | Sim):
        raise Unsupported(
            f"check runs its workers on this machine, which engine {found.name} does not do: take engine local or sim, "
            "outside of manyhands run and torchrun"
        )
    return found


def _refuse(bench: Bench) -> None:
    """Raise BadInput for what `train` refuses."""
    task = bench.copies.fresh()
    asked = TrainConfig(task=task, strategy=AllReduce(), engine=bench.engine, workers=bench.workers, directory=None)
    asked.check(servers=1, nonfinite="raise", max_seconds=None, timeout_s=bench.timeout_s, resume=False)


def _explained(proving: Proving) -> tuple[list[Finding], list[str], list[str]]:
    """(findings beyond the proofs' own, what else held, what could not be judged)"""
    bench, failed = proving.bench, proving.failed
    setting, proof = failed or (proving.settings[0], proving.proofs[0])
    first = proof.first_beyond(proving.limit)
    step = 1 if first is None else first.step  # workers that failed did so somewhere
    data = Data(bench.copies, setting, bench.workers)
    looking = Inspection(bench.copies, bench.sent, data, proving.double, proving.say)
    looking.run(None if failed is None else step, proving.traces)
    suspects = _merged([*proving.suspects, *looking.suspects])
    if failed is None:
        return [*looking.findings, *_without_difference(suspects)], looking.held, looking.unjudged
    proving.say(f"what makes the difference: {', '.join(one.kind for one in suspects) or 'nothing suspected yet'}")
    adds = any(one.remedy == SUMMED for one in suspects)
    tried = replace(setting, steps=step, count=False, adds=adds)
    ablation = Ablation(bench, tried, data, _model(bench), proving.limit)
    judged = Judgement(ablation, suspects, proof.largest_up_to(step), proving.failure).run()
    return [*judged, *looking.findings], looking.held, looking.unjudged


def _merged(suspects: list[Suspect]) -> list[Suspect]:
    """One of each kind, the first; with the lines of a later one before its own."""
    merged: dict[str, Suspect] = {}
    for one in suspects:
        first = merged.get(one.kind, one)
        places = first.finding.places if first is one else (*one.finding.places, *first.finding.places)
        merged[one.kind] = replace(first, finding=replace(first.finding, places=places))
    return list(merged.values())


def _without_difference(suspects: list[Suspect]) -> list[Finding]:
    """What was suspected, where these steps are equal all the same."""
    broken = [one.finding for one in suspects if one.kind in PROVEN_ELSEWHERE]
    return broken + [replace(one.finding, severity=NOTE) for one in suspects if one.kind in _HARMLESS]


def _model(bench: Bench) -> nn.Module:
    task = bench.copies.fresh()
    rng.seed_all(task.seed)
    return build_model(task)
