"""What is alike and what is not, without a run; runs that differ are in test_fingerprint_integration.py."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import plain
from manyhands.data.open_source import open_source
from manyhands.errors import BadInput, ManyhandsError
from manyhands.events import Event
from manyhands.replica import fingerprint
from manyhands.replica.fingerprint import Facts
from manyhands.replica.flat_vector import FlatVector
from manyhands.testing.threads import together
from manyhands.worker import Worker


def code(text: str) -> str:
    return fingerprint.digest_of_code("my", text.encode())


TASK = """
RATE = {rate}
DATA = "{path}"
def optimizer(model):
    return SGD(model.parameters(), lr=RATE)
"""


def test_code_is_what_it_computes_not_how_it_is_written() -> None:
    one = code(TASK.format(rate=0.1, path="/alpha/rows.pt"))
    assert one == code("# another header\n\n" + TASK.format(rate="0.10", path="/beta/rows.pt"))
    assert one == code(TASK.format(rate=0.1, path="/alpha/rows.pt").replace("\n", "\r\n"))
    assert one != code(TASK.format(rate=0.2, path="/alpha/rows.pt"))
    assert one != code(TASK.format(rate=0.1, path="rows.pt"))
    assert one != code(TASK.format(rate=0.1, path="/alpha/rows.pt").replace("lr=RATE", "lr=RATE, momentum=.9"))
    sets = [f"x = 1 in {{{', '.join(map(repr, order))}}}" for order in (["a", "b", "c"], ["c", "b", "a"])]
    assert code(sets[0]) == code(sets[1])  # whose order changes from process to process


def test_modules_of_the_user_and_the_libraries_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper_of_a_test.py").write_text("import torch\nimport pyarrow\nrate = 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import helper_of_a_test  # type: ignore[import-not-found]

    facts = fingerprint.of_code(plain.cross_entropy, plain.mlp())
    assert {"code of helper_of_a_test", "version of torch", "version of pyarrow", "version of python"} <= set(facts)
    assert not any(name.startswith(("code of torch", "code of manyhands", "code of json")) for name in facts)
    before = facts["code of helper_of_a_test"]
    (tmp_path / "helper_of_a_test.py").write_text("import torch\nimport pyarrow\nrate = 0.2\n")
    assert fingerprint.of_code()["code of helper_of_a_test"] != before
    (tmp_path / "helper_of_a_test.py").unlink()
    assert "code of helper_of_a_test" not in fingerprint.of_code()
    del helper_of_a_test


def test_optimizers_and_schedules_say_their_hyperparameters() -> None:
    model, schedules = plain.mlp(), torch.optim.lr_scheduler
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.99))
    parts = [schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)), schedules.StepLR(optimizer, 3, gamma=0.25)]
    facts = fingerprint.of_optimizer(optimizer, schedules.SequentialLR(optimizer, parts, milestones=[5]))
    assert len(facts["the optimizer's lr"]) == 2
    for name, value in {
        "the optimizer": "AdamW",
        "the optimizer's weight_decay": 0.01,
        "the optimizer's betas": [0.9, 0.99],
        "the schedule": "SequentialLR",
        "the schedule's part 1": "StepLR",
        "the schedule's part 1's gamma": 0.25,
    }.items():
        assert facts[name] == value
    assert "the schedule's part 0's lr_lambdas" not in facts  # functions have addresses


@dataclass(frozen=True)
class Options:
    """A strategy of a user's own: its repr has an address, and a set's order, which changes from process to process."""

    period: int
    words: set[str] = field(default_factory=set)
    made: object = field(default_factory=object)


def test_objects_are_their_plain_fields() -> None:
    for settings, facts in (
        ({"strategy": Options(3, {"a", "b"})}, {"strategy": "Options(period=3)"}),
        ({"strategy": object()}, {"strategy": "object"}),
        ({"batch_size": 3}, {"batch size": 3}),
    ):
        assert fingerprint.of_settings(**settings) == facts


class Noisy(Dataset[Any]):
    """Rows that draw: from the process's generators, or from one of its own that no seed reaches."""

    def __init__(self, own: bool) -> None:
        self.own = np.random.default_rng() if own else None

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        extra = self.own.random() if self.own is not None else random.random() + np.random.random()
        return {
            "x": torch.rand(3) + i,
            "y": float(extra),
            "path": f"/data/{random.random()}/{i}.png",
            "name": f"row {i}",
        }


def rows(data: Any, **options: Any) -> Facts:
    return fingerprint.of_rows(open_source(data, **options), "train_data", seed=3)


def test_a_sample_of_rows_is_the_same_under_one_seed_and_leaves_the_generators_alone() -> None:
    for data in (Noisy(own=False), DataLoader(Noisy(own=False), batch_size=4, shuffle=True)):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = rows(data)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert rows(data) == first
        assert len(first["a sample of train_data"]) == 4


def test_rows_that_differ_from_themselves_tell_nothing_and_streams_are_each_workers_own() -> None:
    class Own(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(5))

    class Words(torch.utils.data.Sampler[Any]):
        """Of the user's own: it names rows as it likes."""

        def __iter__(self) -> Any:
            return iter(["a", "b"])

        def __len__(self) -> int:
            return 2

    assert rows(Noisy(own=True)) == {"the number of rows of train_data": 10}
    assert rows(Own()) == rows(lambda: iter([1, 2])) == {}
    loader = DataLoader({"a": torch.ones(2), "b": torch.zeros(2)}, batch_size=2, sampler=Words())  # type: ignore[arg-type]
    assert rows(loader) == {"the number of rows of train_data": 2}


def workers(*facts: Facts) -> list[str]:
    """What `differences` says on each of so many workers, which all say the same."""
    return together(len(facts), lambda worker: fingerprint.differences(named(worker), lambda: facts[worker.rank]))


def named(worker: Worker, **fields: Any) -> Worker:
    return replace(worker, host=f"host{worker.rank}", **fields)


def test_all_workers_name_the_first_that_differs_and_what_differs() -> None:
    same = {"the optimizer's lr": 0.1, "code of my": "ab"}
    output = workers(same, same, {"the optimizer's lr": 0.2, "code of my": "ab", "version of other": "1"})
    assert output[0] == output[1] == output[2]
    assert output[0].startswith("worker 2 on host2 differs from worker 0: ")
    assert "the optimizer's lr is 0.2, and on worker 0 (host0) it is 0.1" in output[0]
    assert "code of my" not in output[0]
    assert workers(same, {**same, "version of one": "2"}, same) == ["", "", ""]


def test_decoders_of_other_machines_round_otherwise_other_rows_do_not() -> None:
    x = torch.rand(8, 3, 5)
    y = torch.arange(8)
    here, near = rows((x, y)), rows((x + 1e-5 * torch.randn(8, 3, 5), y))
    assert workers(here, near) == ["", ""]
    for other in ((x + 0.1, y), (x, y.flip(0)), (torch.rand(8, 3, 5), y), (x[:, :2], y), (x[:7], y[:7])):
        assert "train_data" in workers(here, rows(other))[1]


def drifted(shift: float, rates: Sequence[float] = (0.1, 0.1)) -> list[Any]:
    """What two workers raise, or warn of, whose parameters are so far apart."""

    def program(worker: Worker) -> Any:
        heard: list[Event] = []
        worker = named(worker)
        worker.driver.emit = heard.append  # type: ignore[method-assign]
        parameters = FlatVector([torch.linspace(1, 2, 50) * (1 + shift * worker.rank)])
        norm = lambda v: float(v.joined().norm())  # noqa: E731
        try:
            fingerprint.compare_replicas(worker, parameters, norm, {"rate": rates[worker.rank]}, 7)
        except ManyhandsError as error:
            return str(error)
        return [event.values["message"] for event in heard]

    return together(2, program)


def test_replicas_that_drift_apart_are_an_error_and_rounding_is_a_warning() -> None:
    assert drifted(0.0) == [[], []]
    first, second = drifted(1e-6)
    assert "by rounding" in first[0]
    assert second == []
    first, second = drifted(1e-2, rates=[0.1, 0.2])
    assert first == second
    assert "worker 1 on host1" in first
    assert "at step 7" in first
    assert "rate is 0.2, and on worker 0 it is 0.1" in first
    assert isinstance(drifted(1e-6, rates=[0.1, 0.2])[1], str)  # rounding does not explain another rate


def test_all_workers_raise() -> None:
    def program(worker: Worker) -> str:
        with pytest.raises(BadInput) as raised:
            fingerprint.compare(named(worker), lambda: fingerprint.of_model(nn.Linear(2, 2 + worker.rank)))
        return str(raised.value)

    first, second = together(2, program)
    fingerprint.compare(Worker(), lambda: pytest.fail("one worker looks"))
    fingerprint.compare(Worker(size=2, shares_process=True), lambda: pytest.fail("one process looks"))
    assert first == second
    assert "Linear of 9 parameters, and on worker 0 (host0) it is Linear of 6 parameters" in first
