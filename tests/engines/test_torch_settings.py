"""Workers compute with the caller's settings of torch, and with their own again afterwards."""

import pytest
import torch

from manyhands.engines.local.engine import Local
from manyhands.engines.torch_settings import TorchSettings
from manyhands.own_loop.launch import launch

OTHERS = {
    "dtype": torch.float64,
    "device": "meta",
    "deterministic": (True, True),
    "matmul_precision": "high",
    "anomaly": (True, False),
    "cudnn": (True, True, False),
}


def test_all_of_them_are_taken_and_given_back() -> None:
    before, others = TorchSettings.here(), TorchSettings(**OTHERS)
    for name, value in OTHERS.items():
        assert getattr(before, name) != value, name
    with others.taken():
        assert TorchSettings.here() == others
    assert TorchSettings.here() == before


@pytest.mark.parametrize("workers", [1, 2])
def test_launched_workers_have_the_callers(local: Local, workers: int) -> None:
    with TorchSettings(**{**OTHERS, "device": "cpu"}).taken():
        here = TorchSettings.here()
        assert launch(TorchSettings.here, workers=workers, engine=local) == [here] * workers
