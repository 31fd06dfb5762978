"""The contract of engines, by one of ten lines: workers are threads of this process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from by_hand import Point
from torch import Tensor, nn

import manyhands as mh
from manyhands.engines import capabilities_of
from manyhands.engines.base import Capabilities, Engine, LaunchSpec, check_counts
from manyhands.errors import Unsupported
from manyhands.server.base import ServerSpec
from manyhands.testing.threads import together
from manyhands.worker import Worker
from refusals import all_refused


@dataclass(frozen=True, kw_only=True)
class Threads(Engine):
    name: ClassVar[str] = "threads"

    def launch(self, program: Callable[[Worker], Any], spec: LaunchSpec) -> list[Any]:
        return together(spec.workers, lambda worker: program(replace(worker, shares_process=True)))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model.w - batch).square().sum(1).mean()


TASK = mh.Task(
    model=lambda: Point([0.0, 1.0]),
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    train_data=torch.randn(50, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    batch_size=8,
    epochs=2,
)


@pytest.mark.parametrize("strategy", ["allreduce", "diloco:period=3", "gossip"])
def test_it_trains_what_the_simulated_one_does(strategy: str) -> None:
    ours, theirs = (mh.train(TASK, strategy=strategy, engine=e, workers=3) for e in (Threads(), "sim"))
    assert (ours.parameters - theirs.parameters).abs().max() < 1e-12
    assert ours.rows["total"] == 100


def test_what_it_cannot_is_refused_by_its_capabilities() -> None:
    all_refused(
        lambda strategy: mh.train(TASK, strategy=strategy, engine=Threads(), workers=2),
        [(strategy, "engine threads does not support that") for strategy in ("downpour", "hogwild")],
        Unsupported,
    )


def test_capabilities_of_records() -> None:
    """What a finished run says of its engine is its name alone."""
    assert capabilities_of("local") == Capabilities(one_host=True, serves=True, survives=True, copies=True)
    assert capabilities_of("sim").simulated
    assert capabilities_of("threads") == Capabilities() == Threads().capabilities
    assert (Threads().default_workers(), Threads().own_rank()) == (max(1, torch.cuda.device_count()), 0)


def test_a_count_is_a_whole_number_of_at_least_one_and_shards_are_counted_only_where_there_is_a_server() -> None:
    served = ServerSpec(rule="add")
    words = "must be a whole number of at least 1, not"
    counts: tuple[Any, ...] = (0, -3, 1.5, True, None)
    all_refused(lambda n: check_counts(LaunchSpec(workers=n)), [(n, f"workers {words} {n}") for n in counts])
    all_refused(
        lambda n: check_counts(LaunchSpec(workers=1, servers=n, server=served)),
        [(n, f"servers {words} {n}") for n in counts],
    )
    check_counts(LaunchSpec(workers=1, servers=0))
    check_counts(LaunchSpec(workers=1, servers=1, server=served))
