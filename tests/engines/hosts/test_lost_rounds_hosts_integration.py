"""Workers of several "hosts" of one machine are lost between rounds: what follows is what follows in the simulator."""

from __future__ import annotations

import pytest
import torch
from test_lost_hosts_integration import EPOCHS, train

import manyhands as mh
import plain

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("credentials", "nothing_is_left")]


@pytest.mark.parametrize("fault", ["kill=1@step:7", "kill=0@step:4"])
@pytest.mark.parametrize(
    "strategy",
    [
        "diloco:period=4,streaming=2,overlap=0",
        "diloco:period=3,compress=topk:1",
        "local-sgd:period=3,warmup=6",
        "allreduce:compress=topk:1",
    ],
)
def test_a_worker_of_another_host_is_lost_between_rounds(strategy: str, fault: str) -> None:
    survive = "max_losses=1,replace=false,silence_s=5"
    run = train([1, 1, 1], fault, strategy=strategy, survive=survive)
    assert run.info["faults"] == {fault: 1}
    of = plain.task(epochs=EPOCHS, validation_data=plain.rows(12))
    engine = f"sim:compute=step=100ms,faults='{fault},notice=10ms'"
    simulated = mh.train(of, engine=engine, workers=3, strategy=strategy, survive=survive)
    assert torch.allclose(run.parameters, simulated.parameters, rtol=0, atol=1e-9)
    assert [row["rows"] for row in run.history] == [12, 12, 12, 3] * EPOCHS
