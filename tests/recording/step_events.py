"""Events of steps, as workers report them."""

from typing import Any

from manyhands.events import Event

STEP: dict[str, Any] = {"epoch": 0, "loss": 1.0, "weight": 4.0, "rows": 4, "unused": 0, "rate": 0.1, "bytes": 8}
STEP |= {"round": True, "input_s": 0.1, "compute_s": 0.2, "exchange_s": 0.3, "wait_s": 0.4}


def step(rank: int, tick: int = 0, time_s: float = 0.0, **values: Any) -> Event:
    return Event(type="step", rank=rank, tick=tick, step=tick + 1, time_s=time_s, values=STEP | values)
