from __future__ import annotations

import torch

from manyhands.training.loop import peak_bytes


def test_the_peak_grows_with_what_is_touched_and_stays_when_it_is_freed() -> None:
    cpu = torch.device("cpu")
    before = peak_bytes(cpu)
    filled = torch.ones(before // 4 + (32 << 20))  # 4 bytes each: more than there was ever resident, and 128 MB
    held = peak_bytes(cpu)
    del filled
    assert held >= before + (100 << 20)
    assert peak_bytes(cpu) >= held
