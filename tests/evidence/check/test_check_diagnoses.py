"""Each plant is named, with its line, and nothing else is; two at once are both named."""

from typing import Any

import planted
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.evidence.check.check import check
from manyhands.evidence.check.report import Checked

STEPS = 3


def found(**fields: Any) -> Checked:
    return check(planted.task(**fields), engine="sim", steps=STEPS)


def kinds(checked: Checked) -> list[tuple[str, bool]]:
    return [(finding.kind, finding.breaks) for finding in checked.findings]


EXPLAINED = {
    "batch-norm": ("batch-norm", {"model": planted.Normed}),
    "dropout": ("dropout", {"model": planted.Dropping}),
    "functional dropout": ("dropout", {"model": planted.DroppingByFunction}),
    "randomness": ("randomness", {"model": planted.Noisy}),
    "python randomness": ("randomness", {"loss": planted.mixed_up}),
    "random step": ("randomness", {"optimizer": planted.noisy_steps}),
    "summed": ("summed-loss", {"loss": planted.summed}),
    "summed by argument": ("summed-loss", {"loss": planted.summed_by_argument}),
    "wrong weight": ("wrong-weight", {"loss": planted.weighted}),
    "coupled loss": ("coupled-rows", {"loss": planted.contrast}),
    "coupled model": ("coupled-rows", {"model": planted.Mixing}),
    "data order": ("data-order", {"train_data": planted.Leaking()}),
    "previous row": ("data-order", {"train_data": planted.Previous()}),
    "unseeded rows": ("data-order", {"train_data": planted.Unseeded()}),
    "unseeded stream": ("data-order", {"train_data": planted.Stream()}),
    "random rows": ("random-rows", {"train_data": planted.Augmented()}),
    "unseeded sampler": ("rows-not-once", {"train_data": planted.loader_with_own_order(), "batch_size": None}),
    "unseeded order": ("rows-not-once", {"order": planted.own_order}),
    "collate": ("collate", {"model": planted.OverWords, "train_data": planted.Words(), "collate": planted.padded}),
    "in-place": ("in-place-change", {"model": planted.Clipped}),
    "buffers": ("buffers", {"model": planted.Centered}),
    "not rebuilt": ("not-rebuilt", {"model": planted.unseeded}),
    "attribute not rebuilt": ("not-rebuilt", {"model": planted.projected}),
    "rate by workers": ("depends-on-workers", {"optimizer": planted.by_workers}),
    "schedule": ("depends-on-workers", {"schedule": planted.schedule_by_workers}),
    "loss by rank": ("depends-on-workers", {"loss": planted.by_rank}),
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
    assert kinds(checked) == [(kind, True)]
    assert checked.findings[0].places[0].line == planted.line_of(plant)
    assert not checked.passed


def test_irremovable_randomness_may_hide_other_causes() -> None:
    checked = found(loss=planted.shaken)
    assert kinds(checked) == [("randomness", True)]
    assert "may hide other causes" in checked.findings[0].text
    assert checked.findings[0].share == 1
    assert any("draws from numpy" in one for one in checked.unjudged)


PAIRS = {
    "batch-norm": {"model": planted.Normed, "loss": planted.recomputed},
    "dropout": {"model": planted.Dropping, "loss": planted.recomputed},
    "batch-norm, summed-loss": {"model": planted.Normed, "loss": planted.summed},
    "batch-norm, data-order": {"model": planted.Normed, "train_data": planted.Leaking()},
    "in-place-change, random-rows": {"model": planted.Clipped, "train_data": planted.Augmented()},
    "depends-on-workers, rows-not-once": {"optimizer": planted.by_workers, "order": planted.own_order},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_at_once_are_both_named_and_one_that_is_computed_again_on_the_way_back(pair: str) -> None:
    checked = found(**PAIRS[pair])
    assert sorted(finding.kind for finding in checked.findings) == pair.split(", ")
    assert all(finding.breaks and finding.places for finding in checked.findings)
    if pair == "batch-norm, summed-loss":  # what explains more comes first
        alone = [finding.alone or 0.0 for finding in checked.findings]
        assert alone == sorted(alone, reverse=True)
        assert all(0 < (finding.share or 0.0) <= 1 for finding in checked.findings)


NOTED = {
    "not in optimizer": ("not-in-optimizer", {"optimizer": planted.of_one}),
    "loss on the first": ("depends-on-workers", {"loss": planted.told_by_the_first}),
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
    assert kinds(checked) == [(kind, False)]
    assert checked.passed


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
    "a DataLoader": {"train_data": DataLoader(planted.Pairs(), 12, shuffle=True, drop_last=True), "batch_size": None},
    "a function that gives a stream": {"train_data": planted.seeded_stream},
    "a function that gives rows": {"train_data": planted.rows, "batch_size": None, "batch_size_per_worker": 5},
    "rows few": {"train_data": planted.rows(3)},
}


@pytest.mark.parametrize("task", CLEAN)
def test_clean_tasks_pass_without_a_word(task: str) -> None:
    checked = found(**CLEAN[task])
    assert checked.findings == ()
    assert checked.passed
    assert checked.largest < 1e-12
    assert len(checked.proofs) == 2


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
