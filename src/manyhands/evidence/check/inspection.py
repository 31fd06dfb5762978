"""What can be checked of a task without training it: its data, its model, its optimizer, its loss and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from manyhands import rng
from manyhands.data.batch import first_rows
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.copies import REBUILT, Copies, errors_located
from manyhands.evidence.check.examination import Examination
from manyhands.evidence.check.interventions import RANDOMNESS
from manyhands.evidence.check.losses import examine_loss, examine_metrics
from manyhands.evidence.check.report import Results
from manyhands.evidence.check.rows import TrainingData, evaluation_batch, read
from manyhands.evidence.check.trials import Trace, tensor_digests
from manyhands.training.plan import build_model
from manyhands.units import listed

ENOUGH_ROWS = 24  # rows of a batch to examine if there is no difference to explain


@dataclass
class Inspection:
    """Fills `results`."""

    copies: Copies
    sent: Copies  # copies with the functions that give the data, where `copies` have the data itself
    data: TrainingData
    double: bool
    say: Callable[[str], None]
    results: Results = field(default_factory=Results)

    def run(self, step: int | None, proofs: list[list[Trace]]) -> None:
        """step: the first step that differs, from 1; None: all are equal. proofs: see `Proofs.traces`."""
        solo, *ranks = proofs[0]
        self.say("who reads which rows")
        self.data.check_once([[trace.handed_out for trace in traces] for traces in proofs])
        if not self.data.results.suspects:
            self.data.check_function(self.sent)
        if not self.data.results.suspects:
            self.data.check_slices()
        self.data.check_sorted()
        self.results.extend(self.data.results)
        self.say("what model() and optimizer() build")
        self._check_model(solo, ranks)
        self._check_optimizer()
        self._check_precision()
        self._check_device()
        self._check_unused(solo)
        self.say(f"the loss on the rows of step {step or 1}")
        batch = read(self.data.task(), step or 1)[-1].batch
        self._check_loss(batch if step is not None else first_rows(batch, ENOUGH_ROWS))
        self._check_metrics()

    def _check_model(self, solo: Trace, ranks: Sequence[Trace]) -> None:
        """Whether model() builds the same model from the seed, twice here and on every worker."""
        task = self.copies.fresh()
        if isinstance(task.model, nn.Module):
            return
        built = []
        for _ in range(2):
            rng.seed_all(task.seed)
            built.append(tensor_digests(build_model(task)))
        pairs = [(built[0], built[1]), *((solo.built, rank.built) for rank in ranks)]
        changed = [name for name in built[0] if any(a.get(name) != b.get(name) for a, b in pairs)]
        if not changed:
            where = " and on every worker" if ranks else ""
            self.results.held.append(f"model() builds the same from the seed, twice here{where}")
            return
        text = (
            f"model() built another {listed(changed)} under the same seed: something in it is random and not drawn from "
            "the generators that the seed sets (torch's, numpy's, Python's own). N workers start from the first one's "
            "parameters, which are not those of one worker, and a run cannot be repeated. Draw from torch's global "
            "generator, or give the module itself."
        )
        self.results.suspect("not-rebuilt", REBUILT, text, source_locations.of_function(task.model), names=changed)

    def _check_optimizer(self) -> None:
        """Whether the optimizer holds the trainable parameters, and draws nothing."""
        task, model = self.copies.built()
        optimizer = task.optimizer(model)
        place = source_locations.of_function(task.optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if left:
            text = (
                f"{listed(left)} can be trained and the optimizer does not hold them: they never move, and their "
                "gradients are still exchanged. Give them requires_grad=False, or give them to the optimizer."
            )
            self.results.note("not-in-optimizer", text, place, names=left)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = rng.generator_states()
        optimizer.step()
        draws = rng.generator_states() != before
        if draws:
            text = (
                "The optimizer draws random numbers in its step, and each worker draws its own: replicas that got the "
                "same mean gradient move apart for good. Draw from a generator that is seeded by the step, alike on "
                "all workers."
            )
            self.results.suspect(RANDOMNESS, RANDOMNESS, text, place)
        if not (left or draws):
            self.results.held.append("the optimizer holds all trainable parameters, and no others")

    def _check_precision(self) -> None:
        precision = self.copies.fresh().precision
        if precision != "float32":
            text = (
                f"The task trains with precision={precision}; the proof computes without autocast, whose rounding would "
                "hide small differences."
            )
            self.results.note("no-autocast", text)

    def _check_device(self) -> None:
        task, model = self.copies.built()
        devices = sorted({str(p.device) for p in model.parameters()} - {"cpu"})
        if devices:
            text = (
                f"The model is on {listed(devices)}. Each worker moves it to its own device (device=), and this check "
                "used a copy on the CPU."
            )
            self.results.note("on-device", text, source_locations.of_function(task.model))

    def _check_unused(self, trace: Trace) -> None:
        """Parameters that got no gradient in any step."""
        names = [name for i, name in enumerate(trace.names) if not trace.grad_mask >> i & 1]
        if not names or not trace.parameters:
            return
        text = (
            f"No gradient reached {listed(names)} in {len(trace.parameters)} steps: the loss does not depend on them. "
            "They are exchanged as zeros and do not move. Give them requires_grad=False, or remove them."
        )
        task, module = self.copies.fresh(), names[0].rpartition(".")[0]
        place = source_locations.of_module(build_model(task), module, task.model) if module else None
        self.results.note("unused-parameters", text, place or source_locations.of_function(task.model), names=names)

    def _check_loss(self, batch: Any) -> None:
        examination = Examination(self.copies, self.double, batch)
        try:
            examination.run()
            examine_loss(examination)
        except Exception as error:  # noqa: BLE001 - the user's code may fail outside of the training loop
            self._not_examined("The loss", error)
        self.results.extend(examination.results)

    def _check_metrics(self) -> None:
        with errors_located("reading validation data"):
            batch = evaluation_batch(self.copies.fresh(), self.data.config.batch_size)
        if batch is None:
            return
        self.say("evaluate on a batch")
        try:
            self.results.extend(examine_metrics(self.copies, self.double, batch))
        except Exception as error:  # noqa: BLE001 - as above
            if self.double:
                self.double = False
                self._check_metrics()
                return
            self._not_examined("evaluate", error)

    def _not_examined(self, what: str, error: Exception) -> None:
        text = (
            f"{what} could not be examined by itself, so causes in it may be missed: "
            f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        )
        self.results.note("not-examined", text, source_locations.of_error(error))
