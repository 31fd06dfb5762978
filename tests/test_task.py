"""What a task's supervised form counts, and which criteria it refuses; its fields: test_mistakes.py."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plain
from manyhands.task import SupervisedLoss, SupervisedMetrics, Task, counted
from refusals import refused

TARGETS = torch.tensor([0, 2, -100, 1, 2])
OUTPUTS = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
WEIGHTS = plain.CLASS_WEIGHTS


def supervised(criterion: Any) -> Task:
    return Task.supervised(
        model=plain.mlp, optimizer=plain.OPTIMIZERS["sgd"], train_data=plain.rows(6), criterion=criterion
    )


def test_the_weight_is_what_the_mean_divides_by() -> None:
    for criterion, targets, weight in (
        (F.cross_entropy, TARGETS, 4.0),
        (F.nll_loss, TARGETS, 4.0),
        (nn.CrossEntropyLoss(), TARGETS, 4.0),
        (nn.CrossEntropyLoss(ignore_index=2, weight=WEIGHTS), TARGETS.clamp(0), WEIGHTS[[0, 0, 1]].sum()),
        (partial(F.cross_entropy, label_smoothing=0.1), TARGETS, 4.0),
        (partial(F.cross_entropy, weight=WEIGHTS), TARGETS, WEIGHTS[[0, 2, 1, 2]].sum()),
        (F.cross_entropy, torch.zeros(4, 7, dtype=torch.int64), 28.0),
    ):
        assert counted(criterion, targets) == pytest.approx(float(weight), abs=1e-15), criterion


def test_weighted_means_of_parts_are_the_mean_of_the_whole() -> None:
    """CASE 2: a loss that leaves targets out weighs parts by what is left."""
    for criterion, targets in (
        (F.cross_entropy, TARGETS),
        (partial(F.cross_entropy, ignore_index=1), TARGETS.clamp(0)),
        (partial(F.cross_entropy, weight=WEIGHTS), TARGETS.clamp(0)),
        (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=0), TARGETS.clamp(0)),
    ):
        parts = [(OUTPUTS[:3], targets[:3]), (OUTPUTS[3:], targets[3:])]
        measures = [SupervisedLoss(criterion)(nn.Identity(), part) for part in parts]
        total = sum(weight for _, weight in measures)
        mean = sum(mean * (weight / total) for mean, weight in measures)
        assert float(mean) == pytest.approx(float(criterion(OUTPUTS, targets)), abs=1e-14), criterion


def test_other_criteria_are_means_over_rows_and_one_that_does_not_average_is_refused() -> None:
    for criterion in (F.mse_loss, nn.MSELoss(), nn.KLDivLoss(reduction="batchmean"), plain.cross_entropy):
        assert counted(criterion, TARGETS) is None, criterion
        supervised(criterion)
    assert counted(F.cross_entropy, OUTPUTS.softmax(1)) is None  # targets that are probabilities
    for sums in (nn.MSELoss(reduction="sum"), partial(F.cross_entropy, reduction="sum"), nn.L1Loss(reduction="none")):
        refused("criterion must average over the batch", supervised, sums)


def test_ignored_targets_are_left_out_of_the_accuracy() -> None:
    for criterion, ignored in ((F.cross_entropy, -100), (nn.CrossEntropyLoss(ignore_index=0), 0)):
        targets = torch.tensor([0, 1, ignored, 2])
        outputs = torch.eye(3, dtype=torch.float64)[[0, 1, 0, 1]] * 5
        metrics: dict[str, Any] = SupervisedMetrics(criterion)(nn.Identity(), (outputs, targets))
        mean, weight = metrics["accuracy"]
        kept = targets != ignored
        assert weight == int(kept.sum())
        assert float(mean) == float((outputs.argmax(1) == targets)[kept].double().mean())
