"""What happened, in one schema: the lines of `events.jsonl`, what callbacks get, what workers send to the driver."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import is_whole

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened.

    type: start | step | epoch | input | validation | part | checkpoint | plan | warning | fault | change | membership |
        tensorboard | stop | end | failed
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
        """The inverse of `to_json`. ValueError for anything else: a file or a peer may hold anything."""
        try:
            values = from_json(line)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        if not values.keys() <= _FIELDS.keys():
            raise ValueError(f"an event has no field {min(values.keys() - _FIELDS.keys()):.40}")
        _check(_FIELDS, {**_DEFAULTS, **values})
        return cls(**values)

    def check_values(self) -> None:
        """ValueError where an event lacks values of its type, or has them wrong (docs/events.md)."""
        _check(_VALUES.get(self.type, {}), self.values)


def to_json(value: Any) -> str:
    """Compact, valid JSON. NaN and infinities become "NaN", "Infinity", "-Infinity", as in protobuf's JSON."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_named(value), separators=(",", ":"), allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """What `to_json` wrote, the strings that stand for NaN and infinities as floats again."""
    value = json.loads(text)
    names = ('NaN"', 'Infinity"') if isinstance(text, str) else (b'NaN"', b'Infinity"')
    return _numbers(value) if any(name in text for name in names) else value  # type: ignore[operator]


# -- what fields and values must be --------------------------------------------------------------------------------------

_MOST = 2**63  # of any count
_MOST_RANKS = 2**20

Test = Callable[[Any], bool]


def _whole(least: int = 0, below: int = _MOST) -> Test:
    return lambda value: is_whole(value, least) and value < below


def _number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST) or isinstance(value, float)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _list(test: Test, length: int | None = None) -> Test:
    return lambda value: isinstance(value, list | tuple) and length in (None, len(value)) and all(map(test, value))


def _left(value: Any) -> bool:
    """An epoch, and by part [front, back)."""
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and _whole()(value[0])
        and _list(_list(_whole(), 2))(value[1])
    )


def _file(value: Any) -> bool:
    """Bytes, and a SHA-256."""
    if not (isinstance(value, list | tuple) and len(value) == 2):
        return False
    return _whole()(value[0]) and isinstance(value[1], str) and re.fullmatch("[0-9a-f]{64}", value[1]) is not None


_VERSIONS = _list(_whole())
_FIELDS: dict[str, Test] = {
    "type": lambda value: isinstance(value, str),
    "time_s": _finite,
    "generation": _whole(),
    "rank": _or_none(_whole(below=_MOST_RANKS)),
    "tick": _whole(),
    "step": _whole(),
    "values": lambda value: isinstance(value, dict),
}
_DEFAULTS: dict[str, Any] = {"time_s": 0.0, "generation": 0, "rank": None, "tick": 0, "step": 0, "values": {}}
_MAY_MISS: dict[str, Test] = {  # where there is nothing to say
    "launch": _whole(),
    "workers": _whole(1, _MOST_RANKS),
    "left": _left,
    "staleness": _VERSIONS,
    "gain": _number,
    "lease": _list(_whole(), 3),
    "parts": _whole(1, _MOST_RANKS),
    "pulls": _list(_VERSIONS),
    "pushes": _list(_or_none(_VERSIONS)),
    "taken": _list(_VERSIONS),
    "behind": _VERSIONS,
    "global_rows": _whole(),
    "again": lambda value: isinstance(value, bool),
    "worker_id": _or_none(_whole(below=_MOST_RANKS)),
    "host": lambda value: isinstance(value, str),
    "cause": lambda value: isinstance(value, str),
    "kind": lambda value: isinstance(value, str),
    "members": _list(_whole(below=_MOST_RANKS)),
    "settle": _whole(),
    "left_out": _number,
    "replica": _whole(below=_MOST_RANKS),
    "stage": _whole(below=_MOST_RANKS),
}
_SECONDS = dict.fromkeys(("input_s", "compute_s", "exchange_s", "wait_s"), _finite)
_STEP: dict[str, Test] = {
    "epoch": _whole(),
    "loss": _or_none(_number),
    "weight": _number,
    "rows": _whole(),
    "unused": _whole(),
    "rate": _number,
    "bytes": _whole(),
    "round": lambda value: isinstance(value, bool),
    **_SECONDS,
}
_VALUES: dict[str, dict[str, Test]] = {  # of those events that something is made of; docs/events.md has all
    "start": _MAY_MISS,
    "step": _STEP | _MAY_MISS,
    "closing": {"epoch": _whole()} | _MAY_MISS,
    "validation": {"metrics": lambda value: isinstance(value, dict) and all(map(_number, value.values()))},
    "warning": {"message": lambda value: isinstance(value, str), "kind": _MAY_MISS["kind"]},
    "plan": {
        "message": lambda value: isinstance(value, str),
        **dict.fromkeys(("predicted_s", "step_s", "predicted_bytes", "bytes"), _finite),
    },
    "fault": {"fault": lambda value: isinstance(value, str)},
    "membership": {"workers": _MAY_MISS["workers"], "repeated": _whole()},
    "partial": {"rows": _whole()},
    "input": {"epoch": _whole(), **dict.fromkeys(("bytes", "reads", "retries", "hits", "misses"), _whole())},
    "change": {
        "kind": _MAY_MISS["kind"],
        "message": lambda value: isinstance(value, str),
        **{name: _MAY_MISS[name] for name in ("worker_id", "host", "cause")},
    },
    "part": {
        "files": lambda value: _list(_file, 2)(value) or value == [],
        "error": lambda value: isinstance(value, str),
        **dict.fromkeys(("seconds", "stall_s"), _finite),
    },
    "sync": {name: _MAY_MISS[name] for name in ("members", "settle")},
    "stop": {"reason": lambda value: isinstance(value, str)},
}


def _check(tests: dict[str, Test], values: dict[str, Any]) -> None:
    """ValueError, by name, for a value that is missing or is not what it must be."""
    for name, test in tests.items():
        if name not in values and name not in _MAY_MISS:
            raise ValueError(f"it has no {name}")
        if name in values and not test(values[name]):
            raise ValueError(f"its {name} is {values[name]!r:.60}")


# -- numbers that JSON does not have -------------------------------------------------------------------------------------


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
