"""One, two, three and four causes at once: all are named, and the shares of those that could be judged add up to the whole."""

from __future__ import annotations

from collections.abc import Callable

import planted
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.evidence.check.check import check
from manyhands.evidence.check.report import Checked

BATCH_NORM, DROPOUT, COUPLED, SUMMED, WEIGHTED = "batch-norm", "dropout", "coupled-rows", "summed-loss", "wrong-weight"
TOGETHER = (BATCH_NORM, DROPOUT, COUPLED, SUMMED)
SETS = [*((one,) for one in TOGETHER), (BATCH_NORM, COUPLED), (DROPOUT, SUMMED), (BATCH_NORM, DROPOUT, SUMMED)]
SETS += [TOGETHER, (WEIGHTED,), (BATCH_NORM, DROPOUT, WEIGHTED)]


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


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def found(causes: tuple[str, ...], lines: list[str]) -> Checked:
    task = planted.task(model=model_with(causes), loss=loss_with(causes), optimizer=sgd)
    return check(task, engine="sim", steps=1, say=lines.append)


@pytest.mark.parametrize("causes", SETS, ids=" and ".join)
def test_all_causes_are_named_and_shares_add_up(causes: tuple[str, ...]) -> None:
    lines: list[str] = []
    checked = found(causes, lines)
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
    task = planted.task(model=model_with(causes), loss=loss_with(causes), optimizer=sgd, batch_size=14)
    checked = check(task, engine="sim", steps=2, workers=3, micro_batch_size=3)
    assert sorted(one.kind for one in checked.findings if one.breaks) == sorted(causes)
    assert sum(one.share or 0.0 for one in checked.findings) == pytest.approx(1)


def contrast_by_the_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    z = model(batch[0])
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none").sum() / len(z)


def test_what_does_not_vanish_with_contrast() -> None:
    """Nor is a sum that is divided by its rows anything but a mean."""
    for kinds, fields in (
        ([COUPLED], {"loss": contrast_by_the_mean}),
        ([COUPLED, "randomness"], {"model": planted.Noisy, "loss": planted.contrast}),
        (["buffers", COUPLED], {"model": planted.Centered, "loss": planted.contrast}),
    ):
        checked = check(planted.task(**fields), engine="sim", steps=3)
        assert sorted(one.kind for one in checked.findings) == kinds
        assert sum(one.share or 0.0 for one in checked.findings) == pytest.approx(1), kinds


def test_irremovable_causes_are_listed_with_the_others() -> None:
    """A hidden state stays in every trial: it has what is left, and another's share is what goes beyond it."""
    checked = check(planted.task(model=planted.Counting, loss=planted.summed), engine="sim", steps=3)
    findings = {one.kind: one for one in checked.findings}
    assert {"hidden-state", "summed-loss"} <= set(findings)
    assert all(one.share is not None or one.unjudged for one in findings.values())
    assert sum(one.share or 0.0 for one in findings.values()) == pytest.approx(1)
