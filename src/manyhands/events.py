"""What happened, in one schema: the lines of `events.jsonl`, what callbacks get, what workers send to the driver."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened.

    type: start | step | epoch | validation | checkpoint | warning | tensorboard | stop | end | failed
    time_s: seconds since the run began, on the driver's clock (a worker's own clock for what it sends)
    rank: the worker it happened to, or None for the driver
    values: numbers and short strings, JSON as they are; `docs/events.md` lists them by type
    """

    type: str
    time_s: float = 0.0
    generation: int = 0
    rank: int | None = None
    tick: int = 0
    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of valid JSON, also for NaN and infinities (see `to_json`)."""
        return to_json(vars(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        return cls(**from_json(line))


def to_json(value: Any) -> str:
    """Compact, valid JSON. JSON has no NaN: such numbers become the strings "NaN", "Infinity", "-Infinity", as in protobuf's JSON."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_named(value), separators=(",", ":"), allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """What `to_json` wrote, the strings that stand for NaN and infinities as floats again."""
    value = json.loads(text)
    names = ('NaN"', 'Infinity"') if isinstance(text, str) else (b'NaN"', b'Infinity"')
    return _numbers(value) if any(name in text for name in names) else value  # type: ignore[operator]


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    return [_named(item) for item in value] if isinstance(value, list | tuple) else value


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value
