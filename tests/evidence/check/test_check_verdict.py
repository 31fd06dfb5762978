"""What `check` says, refuses, and leaves as it was."""

import random
import re
import threading
from typing import Any

import numpy as np
import planted
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands import events
from manyhands.comm.group import MeanResult
from manyhands.engines.sim import group as sim_group
from manyhands.errors import BadInput, UnknownName, Unsupported, WorkerFailed
from manyhands.evidence.check.check import check
from manyhands.replica.replica import Replica

# -- manyhands itself ------------------------------------------------------------------------------------------------


def test_wrong_weights_and_an_exchange_that_is_off_once_are_unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sim_group, "shares_of", lambda weights, total: [1 / len(weights) for _ in weights])
        checked = check(planted.task(), engine="sim", steps=4)
    (finding,) = checked.findings
    assert (finding.kind, checked.passed) == ("unexplained", False)
    assert "manyhands itself is wrong" in finding.text
    assert finding.numbers["step"] == 4  # the epoch's last batch, of 5 rows
    assert finding.numbers["parameter"] in ("0.weight", "0.bias", "2.weight", "2.bias")
    with monkeypatch.context() as patch:
        patch.setattr(sim_group, "shares_of", lambda weights, total: [0.4 for _ in weights])
        checked = check(planted.task(model=planted.dropping), engine="sim", steps=2)
    assert sorted(finding.kind for finding in checked.findings) == ["dropout", "unexplained"]
    plain = Replica.record_mean

    def off(self: Replica, total: MeanResult) -> MeanResult:
        if self.tick == 1 and self._group.size > 1:
            self.gradients.mul_(1 + 1e-8)
        return plain(self, total)

    monkeypatch.setattr(Replica, "record_mean", off)
    checked = check(planted.task(), engine="sim", steps=4)
    assert [(finding.kind, finding.numbers["step"]) for finding in checked.findings] == [("unexplained", 2)]
    assert 1e-9 < checked.largest < 1e-6


# -- what stays as it was --------------------------------------------------------------------------------------------


def test_task_model_data_and_random_state_stay_as_they_were() -> None:
    model, data, x = planted.mlp(), planted.Leaking(), planted.rows()
    before = [p.clone() for p in model.parameters()]
    untouched = [column.clone() for column in x]
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7)
    expected = torch.rand(3), np.random.rand(3), random.random()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7)
    check(planted.task(model=model, train_data=data, loss=planted.mixed_up), engine="sim", steps=2)
    check(planted.task(model=model, train_data=x, shuffle=False), engine="sim", steps=2)
    drawn = torch.rand(3), np.random.rand(3), random.random()
    assert all(np.array_equal(a, b) for a, b in zip(drawn, expected, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(x, untouched, strict=True))
    assert data.read == 0
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert mh.worker().size == 1
    planted.CALLS.clear()
    assert check(planted.task(train_data=planted.counted_rows), engine="sim", steps=2).findings == ()
    assert len(planted.CALLS) == 2


# -- what it refuses, and what the user's code raises ----------------------------------------------------------------


def test_what_cannot_be_is_refused_and_what_one_worker_raises_is_raised() -> None:
    for options, error, message in (
        ({"workers": 1}, BadInput, "workers must be a whole number of at least 2, not 1"),
        ({"steps": 0}, BadInput, "steps must be a whole number of at least 1, not 0"),
        ({"workers": 20}, BadInput, "leaves some of the 20 workers without a row"),
        ({"order": lambda epoch: [10**6]}, BadInput, "row numbers from 0 to"),
        ({"bath_size": 3}, UnknownName, "no field 'bath_size'"),
        ({"engine": "hosts:listen=127.0.0.1"}, Unsupported, "engine hosts cannot do that"),
    ):
        with pytest.raises(error, match=message):
            check(planted.task(), **{"engine": "sim", **options})

    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("labels")

    with pytest.raises(WorkerFailed, match="KeyError: 'labels'"):
        check(planted.task(loss=broken), engine="sim")
    with pytest.raises(BadInput, match=r"failed: FileNotFoundError: .*nowhere.* \(.*planted.py:\d+\)"):
        check(planted.task(train_data=planted.from_nowhere), engine="sim")


def test_workers_that_fail_where_one_does_not_and_what_cannot_be_sent() -> None:
    checked = check(planted.task(model=planted.AtLeastEight, train_data=planted.rows(36)), engine="sim", steps=4)
    assert [(f.kind, f.breaks) for f in checked.findings] == [("fails-on-workers", True), ("uneven-not-tried", False)]
    assert checked.findings[0].places[0].line == planted.line_of("eight rows")
    assert "ValueError: 6 rows are too few" in checked.findings[0].text
    assert "fail where one worker does not" in checked.text().splitlines()[0]
    document = events.from_json(checked.to_json())
    assert (document["passed"], document["limit"], bool(document["proofs"][0]["failure"])) == (False, 1e-10, True)
    assert document["findings"][0]["kind"] == "fails-on-workers"
    assert document["findings"][0]["places"][0]["line"] == planted.line_of("eight rows")
    checked = check(planted.task(train_data=Locked()), engine="sim")
    (finding,) = checked.findings
    assert (finding.kind, finding.places[0].file) == ("not-picklable", __file__)
    assert "train_data holds lock" in finding.text
    assert (checked.proofs, checked.passed) == ((), False)
    assert checked.text().startswith("task: 2 workers of allreduce could not be tried.")
    copied = check(planted.task(train_data=LockedAndCopied()), steps=2)  # it is proved here
    assert [finding.kind for finding in copied.findings] == ["not-picklable"]
    assert [proof.engine for proof in copied.proofs] == ["sim", "sim"]
    assert (copied.largest < 1e-12, copied.passed) == (True, False)


class Locked(planted.Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class LockedAndCopied(Locked):
    def __deepcopy__(self, memo: Any) -> "LockedAndCopied":
        return self


# -- what it says ----------------------------------------------------------------------------------------------------


def test_the_text_of_a_clean_task_and_of_a_finding() -> None:
    checked = check(planted.task(), engine="sim", steps=3)
    lines = checked.text().splitlines()
    assert re.match("task: 2 workers of allreduce equal one worker, .*limit 1e-10, float64", lines[0])
    assert sum(line.split()[:1] in (["1"], ["2"], ["3"]) for line in lines) == 6
    assert any(line.endswith("(41; 23 of 41)") for line in lines)
    assert lines[-1].startswith("PASS")
    checked = check(planted.task(loss=planted.summed), engine="sim", steps=3)
    assert "1. summed-loss (all of the difference" in checked.text()
    assert f"planted.py:{planted.line_of('summed')}" in checked.text()
    assert checked.text().splitlines()[-1].startswith("FAIL: 1 finding (")
