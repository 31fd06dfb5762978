"""The one worker loop, whatever the strategy."""

from pathlib import Path

import pytest
import torch

import manyhands as mh
import plain
from manyhands.training.loop import peak_bytes

VALIDATION = plain.rows(23, seed=2)


@pytest.mark.parametrize(
    "strategy",
    [
        *("solo", "allreduce", "local-sgd:period=3", "gossip", "diloco:period=3", "diloco:period=4,streaming=2"),
        *("diloco:period=3,via=server", "ensemble", "downpour", "downpour:bound=0", "agn"),
        *("easgd:period=3,via=group", "eamsgd", "quorum:backups=1", "update-sharing"),
    ],
)
def test_the_newest_metrics_are_those_of_what_the_run_returns(strategy: str) -> None:
    """Also where the last tick was validated, here the seventh, and closing the open round moved the answer after that."""
    for workers, validate_every, epochs, rows in [(1, 5, 1, 41), (3, 1, 1, 27), (3, 5, 1, 41)]:
        if (strategy == "solo") > (workers == 1):
            continue
        run = mh.train(
            plain.task(train_data=plain.rows(rows), validation_data=VALIDATION, batch_size=4, epochs=epochs),
            strategy=strategy,
            engine="sim",
            workers=workers,
            validate_every=validate_every,
        )
        with torch.no_grad():
            expected = float(plain.cross_entropy(run.model, VALIDATION))
        assert run.metrics["validation_loss"] == pytest.approx(expected, abs=1e-12), (workers, validate_every, epochs)


def test_the_peak_of_memory_is_the_most_that_was_ever_resident_in_bytes() -> None:
    """The kernel's own mark is of this program; the process may have been larger before it began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    mark = 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    assert 0.95 * mark <= peak_bytes(torch.device("cpu")) < 100 * mark
