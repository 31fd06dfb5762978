"""Each plant is named, with its line, and nothing else is; up to four at once are all named, and the shares of those that could be judged add up."""

from collections.abc import Callable
from typing import Any

import planted
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.evidence.check.check import check
from manyhands.evidence.check.report import Checked

STEPS = 3


def found(**fields: Any) -> Checked:
    return check(planted.task(**fields), engine="sim", steps=STEPS)


def kinds(checked: Checked) -> list[tuple[str, bool]]:
    return [(finding.kind, finding.breaks) for finding in checked.findings]


EXPLAINED = {
    "functional dropout": ("dropout", {"model": planted.DroppingByFunction}),
    "randomness": ("randomness", {"model": planted.Noisy}),
    "python randomness": ("randomness", {"loss": planted.mixed_up}),
    "random step": ("randomness", {"optimizer": planted.noisy_steps}),
    "summed": ("summed-loss", {"loss": planted.summed}),
    "summed by argument": ("summed-loss", {"loss": planted.summed_by_argument}),
    "wrong weight": ("wrong-weight", {"loss": planted.weighted}),
    "coupled loss": ("coupled-rows", {"loss": planted.contrast}),
    "data order": ("data-order", {"train_data": planted.Leaking()}),
    "unseeded stream": ("data-order", {"train_data": planted.Stream()}),
    "random rows": ("random-rows", {"train_data": planted.Augmented()}),
    "unseeded sampler": ("rows-not-once", {"train_data": planted.loader_with_own_order(), "batch_size": None}),
    "collate": ("collate", {"model": planted.OverWords, "train_data": planted.Words(), "collate": planted.padded}),
    "in-place": ("in-place-change", {"model": planted.Clipped}),
    "buffers": ("buffers", {"model": planted.Centered}),
    "not rebuilt": ("not-rebuilt", {"model": planted.unseeded}),
    "attribute not rebuilt": ("not-rebuilt", {"model": planted.projected}),
    "schedule": ("depends-on-workers", {"schedule": planted.schedule_by_workers}),
}


@pytest.mark.parametrize("plant", EXPLAINED)
def test_a_plant_is_named_with_its_line_and_explains_all(plant: str) -> None:
    kind, fields = EXPLAINED[plant]
    checked = found(**fields)
    assert kinds(checked) == [(kind, True)]
    (finding,) = checked.findings
    assert finding.places[0].file == planted.__file__
    assert planted.line_of(plant) in [place.line for place in finding.places]
    assert finding.alone > 1e-5
    assert "may hide other causes" not in finding.text
    assert not checked.passed


SEEN = {
    "hidden state": ("hidden-state", {"model": planted.Counting}),
    "nondeterministic": ("nondeterministic-operator", {"model": planted.Timed}),
    "not finite": ("not-finite", {"loss": planted.infinite}),
    "metric": ("metric-not-mean", {"evaluate": planted.count_right, "validation_data": planted.rows()}),
    "metric in place": ("in-place-change", {"evaluate": planted.training_evaluate, "test_data": planted.rows()}),
    "spectral": ("buffers", {"model": planted.spectral}),
}


@pytest.mark.parametrize("plant", SEEN)
def test_what_no_trial_takes_away_is_named_too(plant: str) -> None:
    """With spectral norm a worker without rows does not write the buffers: the third step has a single row."""
    kind, fields = SEEN[plant]
    checked = check(planted.task(**fields), engine="sim", steps=4 if plant == "spectral" else STEPS)
    assert (kinds(checked), checked.passed) == ([(kind, True)], False)
    assert checked.findings[0].places[0].line == planted.line_of(plant)


def test_irremovable_randomness_may_hide_other_causes() -> None:
    checked = found(loss=planted.shaken)
    assert kinds(checked) == [("randomness", True)]
    assert "may hide other causes" in checked.findings[0].text
    assert checked.findings[0].share == 1
    assert any("draws from numpy" in one for one in checked.unjudged)


PAIRS = {
    "dropout": {"model": planted.dropping, "loss": planted.recomputed},
    "in-place-change, random-rows": {"model": planted.Clipped, "train_data": planted.Augmented()},
    "depends-on-workers, rows-not-once": {"optimizer": planted.by_workers, "order": planted.own_order},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_at_once_are_both_named_and_one_that_is_computed_again_on_the_way_back(pair: str) -> None:
    checked = found(**PAIRS[pair])
    assert sorted(finding.kind for finding in checked.findings) == pair.split(", ")
    assert all(finding.breaks and finding.places for finding in checked.findings)


NOTED = {
    "not in optimizer": ("not-in-optimizer", {"optimizer": planted.of_one}),
    "sorted": ("sorted-data", {"train_data": planted.sorted_rows(), "shuffle": False}),
    "magnified": ("magnified-rounding", {"model": planted.Shifting, "optimizer": planted.signs}),
    "float32 only": ("no-float64", {"model": planted.SingleOnly}),
    "unused": ("unused-parameters", {"model": planted.Unused}),
    "autocast": ("no-autocast", {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("plant", NOTED)
def test_a_note_alone_passes(plant: str) -> None:
    kind, fields = NOTED[plant]
    checked = found(**fields)
    assert (kinds(checked), checked.passed) == ([(kind, False)], True)


CLEAN = {
    "a module, a Dataset, a schedule, clipping, micro-batches": {
        "model": planted.mlp(),
        "train_data": planted.Pairs(),
        "schedule": lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
        "clip_norm": 0.1,
        "micro_batch_size": 3,
        "epochs": 2,
    },
    "a weighted mean": {"loss": planted.rightly_weighted},
    "a checkpoint": {"loss": planted.recomputed},
    "masked": {"model": planted.OverWordsMasked, "train_data": planted.Words(), "collate": planted.padded},
    "an order of one's own": {"order": planted.seeded_order},
    "a function that gives a stream": {"train_data": planted.seeded_stream},
}


@pytest.mark.parametrize("task", CLEAN)
def test_clean_tasks_pass_without_a_word(task: str) -> None:
    checked = found(**CLEAN[task])
    assert (checked.findings, checked.passed, len(checked.proofs)) == ((), True, 2)
    assert checked.largest < 1e-12


def test_modules_of_a_library_are_named_and_who_called_check_is_not() -> None:
    """No line of the user's runs in them: the one that called `check`, and a launcher, are no places of theirs."""

    class Layer(nn.TransformerEncoderLayer):
        __module__ = "torch.nn.modules.transformer"  # a library's: none of the user's lines makes its parts

    task = mh.Task.supervised(
        model=lambda: Layer(4, 2, 8, dropout=0.1, batch_first=True),
        criterion=lambda outputs, targets: (outputs.sum((1, 2)) - targets).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        train_data=(torch.randn(64, 3, 4), torch.randn(64)),
        batch_size=16,
    )
    checked = check(task, engine="sim", steps=2)
    (dropout,) = [finding for finding in checked.findings if finding.kind == "dropout"]
    assert dropout.places == ()
    assert "`dropout1` (Dropout)" in dropout.text
    assert dropout.text.startswith("In modules ")


BATCH_NORM, DROPOUT, COUPLED, SUMMED, WEIGHTED = "batch-norm", "dropout", "coupled-rows", "summed-loss", "wrong-weight"
SETS = ((COUPLED,), (BATCH_NORM, COUPLED), (BATCH_NORM, DROPOUT, COUPLED, SUMMED), (BATCH_NORM, DROPOUT, WEIGHTED))


def model_with(causes: tuple[str, ...]) -> Callable[[], nn.Module]:
    layers = {BATCH_NORM: lambda: nn.BatchNorm1d(8), DROPOUT: lambda: nn.Dropout(0.3)}
    own = [one for one in causes if one in layers]
    return lambda: nn.Sequential(nn.Linear(5, 8), *(layers[one]() for one in own), nn.Tanh(), nn.Linear(8, 3))


def loss_with(causes: tuple[str, ...]) -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    reduction = "sum" if SUMMED in causes else "mean"
    weight = planted.WEIGHTS if WEIGHTED in causes else None

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = model(batch[0])
        if COUPLED in causes:
            return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction=reduction)
        return F.cross_entropy(z, batch[1], weight=weight, reduction=reduction)

    return loss


def task_with(causes: tuple[str, ...], **fields: Any) -> mh.Task:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    return planted.task(model=model_with(causes), loss=loss_with(causes), optimizer=sgd, **fields)


@pytest.mark.parametrize("causes", SETS, ids=" and ".join)
def test_all_causes_are_named_and_shares_add_up(causes: tuple[str, ...]) -> None:
    lines: list[str] = []
    checked = check(task_with(causes), engine="sim", steps=1, say=lines.append)
    findings = {one.kind: one for one in checked.findings if one.breaks}
    assert sorted(findings) == sorted(causes)
    suspected = next(line for line in lines if line.startswith("what makes the difference: "))
    assert set(suspected.partition(": ")[2].split(", ")) == set(causes)
    assert not checked.passed
    for one in findings.values():
        assert (one.share is None) == bool(one.unjudged), one
    judged = [one.share for one in findings.values() if one.share is not None]
    assert sum(judged) == pytest.approx(1)
    assert all(share > 0 for share in judged)
    text = " ".join(checked.text().split())
    for one in findings.values():
        assert f" {one.kind} (" in text
        assert not one.unjudged or one.unjudged in text
    for hidden in {DROPOUT, COUPLED, WEIGHTED} & set(causes):
        assert findings[hidden].share  # these have trials of their own
    if causes == (COUPLED,):  # what it hides is listed
        assert any("weight" in one for one in checked.unjudged)
        assert "Could not be judged" in text


def test_three_workers_and_micro_batches_are_cut_as_the_workers_have_them() -> None:
    causes = (DROPOUT, COUPLED, SUMMED)
    checked = check(task_with(causes, batch_size=14), engine="sim", steps=2, workers=3, micro_batch_size=3)
    assert sorted(one.kind for one in checked.findings if one.breaks) == sorted(causes)
    assert sum(one.share or 0.0 for one in checked.findings) == pytest.approx(1)


def contrast_by_the_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    z = model(batch[0])
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none").sum() / len(z)


def test_what_does_not_vanish_with_contrast_and_what_stays_in_every_trial() -> None:
    """Nor is a sum that is divided by its rows anything but a mean; a hidden state has what is left."""
    for kinds, fields in (
        ([COUPLED], {"loss": contrast_by_the_mean}),
        (["buffers", COUPLED], {"model": planted.Centered, "loss": planted.contrast}),
        (["hidden-state", SUMMED], {"model": planted.Counting, "loss": planted.summed}),
    ):
        checked = check(planted.task(**fields), engine="sim", steps=3)
        assert sorted(one.kind for one in checked.findings) == kinds
        assert all(one.share is not None or one.unjudged for one in checked.findings), kinds
        assert sum(one.share or 0.0 for one in checked.findings) == pytest.approx(1), kinds
