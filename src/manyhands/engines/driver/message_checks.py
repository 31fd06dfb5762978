"""Which messages of a process are valid, and which of a driver: checked before anybody acts on another host's. Pure.

The types of a process's messages are listed in host_processes.py, those of a driver's in hosts/processes.py. Extra
fields are left out of what is returned, so that nobody can come to rely on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from manyhands.data.leases import Segment
from manyhands.engines.driver.run_monitor import Failure
from manyhands.errors import is_whole
from manyhands.events import Event
from manyhands.transport.frame import FrameError
from manyhands.units import printable

_MOST_PARTS = 1 << 20  # slices of a global batch
_MOST_TEXT = 1 << 20
Check = Callable[[Any], Any]


def checked(process_index: int, body: Any) -> dict[str, Any]:
    """A process's message with the fields of its type, without control characters. FrameError says what is wrong."""
    message = _of_kinds(_KINDS, body)
    kind = message["type"]
    said_of = [message, *message.get("events", []), message.get("event", {})]
    if others := [one["rank"] for one in said_of if one.get("rank") not in (None, process_index)]:
        raise FrameError(f"a message of type {kind} of process {others[0]} from process {process_index}")
    if kind == "value" and "value" in body:  # a shard returns none
        message["value"] = body["value"]
    return message


def order(body: Any) -> dict[str, Any]:
    """The same of a driver's message to a host that joined it."""
    return _of_kinds(_ORDERS, body)


def _of_kinds(kinds: dict[str, dict[str, Check]], body: Any) -> dict[str, Any]:
    kind = body.get("type") if isinstance(body, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise FrameError(f"a message of type {printable(kind, 40)!r}, which is not one of {', '.join(kinds)}")
    message: dict[str, Any] = {"type": kind}
    for name, check in kinds[kind].items():
        if name not in body:
            raise FrameError(f"a message of type {kind} without {name}")
        try:
            message[name] = check(body[name])
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            what = f"{name} of a message of type {kind} that makes no sense ({printable(error)})"
            raise FrameError(f"{what}: {printable(repr(body[name]))}") from error
    return message


def _expected(what: str, right: Callable[[Any], bool], taken: Callable[[Any], Any] = lambda value: value) -> Check:
    """The check of one kind of value; taken: what of it goes on."""

    def check(value: Any) -> Any:
        _expect(right(value), what)
        return taken(value)

    return check


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_line = _expected("a text", _is_text, lambda text: printable(text, _MOST_TEXT))
_lines = _expected("a text", _is_text, lambda text: printable(text, _MOST_TEXT, keep="\n\t"))
_whole = _expected("a whole number", lambda value: is_whole(value, -(1 << 62)), int)
_count = _expected("a number of at least 0", lambda value: is_whole(value, 0), int)
_yes_or_no = _expected("true or false", lambda value: isinstance(value, bool))
_object = _expected("an object", _is_object, dict)
_texts = _expected("texts by name", lambda value: _is_object(value) and all(map(_is_text, value.values())), dict)
_values = _expected(
    "an object",
    _is_object,
    lambda value: {name: _lines(part) if _is_text(part) else part for name, part in value.items()},
)
_events = _expected("events", lambda value: isinstance(value, list), lambda value: [_event(one) for one in value])


def _seconds(value: Any) -> float:
    _expect(isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value), "seconds")
    return float(value)


def _positive_seconds(value: Any) -> float:
    _expect(_seconds(value) > 0, "more than 0 seconds")
    return float(value)


def _or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _process_indices(value: Any) -> list[int]:
    _expect(isinstance(value, list) and len(value) == len(set(map(_whole, value))), "different process indices")
    return list(value)


def _members(value: Any) -> list[list[int]]:
    """By host; a worker is on one host."""
    _expect(isinstance(value, list) and all(map(_process_indices, value)), "the ids of each host's members")
    _process_indices([worker_id for ids in value for worker_id in ids])
    return list(value)


def _names(value: Any) -> list[str]:
    _expect(isinstance(value, list) and all(map(_is_text, value)), "names")
    return [_line(name) for name in value]


def _segment(value: Any) -> dict[str, Any]:
    _expect(isinstance(value, dict) and {"epoch", "first", "until", "parts"} <= value.keys(), "a segment")
    for name, part in value.items():
        right = isinstance(part, bool) if name == "fixed" else name == "left" or is_whole(part, 0)
        _expect(right, f"{'true or false' if name == 'fixed' else 'a number of at least 0'} as {name}")
    _expect(value["parts"] <= _MOST_PARTS, f"at most {_MOST_PARTS} parts")
    return vars(Segment(**value))


def _event(value: Any) -> dict[str, Any]:
    _expect(isinstance(value, dict) and value.keys() <= _EVENT.keys() and "type" in value, "an event")
    return {name: _EVENT[name](part) for name, part in value.items()}


def _shared(value: Any) -> dict[str, Any]:
    """What all processes of a run are to know, and which of them are here."""
    _expect(
        isinstance(value, dict) and {"process_indices", "size", "threads", "timeout_s", "network"} <= value.keys(),
        "a launch",
    )
    _expect(
        isinstance(_process_indices(value["process_indices"]), list) and is_whole(value["size"]),
        "process indices, and how many workers there are",
    )
    _expect(_is_text(value.get("faults", "")), "faults")
    _expect(_seconds(value["timeout_s"]) > 0 and (value["threads"] is None or is_whole(value["threads"])), "its limits")
    network = value["network"]
    _expect(isinstance(network, dict) and isinstance(network.get("hosts"), list), "hosts")
    _expect(all(isinstance(_process_indices(ranks), list) for ranks in network["hosts"]), "each host's ranks")
    names = network.get("names")
    _expect(isinstance(names, list) and all(isinstance(name, str) for name in names), "the hosts' names")
    return dict(value)


def _expect(right: bool, what: str) -> None:
    if not right:
        raise ValueError(f"expected {what}")


_EVENT: dict[str, Check] = {
    "type": _line,
    "time_s": _seconds,
    "generation": _count,
    "rank": _or_none(_count),
    "tick": _count,
    "step": _count,
    "values": _values,
}
assert _EVENT.keys() == {field.name for field in fields(Event)}

_FAILURE: dict[str, Check] = {
    "rank": _whole,
    "phase": _line,
    "step": _count,
    "message": _lines,
    "detail": _lines,
    "error": _line,
    "family": _line,
    "exit_code": _whole,
    "secondary": _yes_or_no,
    "lost": _or_none(_whole),
}
assert _FAILURE.keys() == {field.name for field in fields(Failure)}

_KINDS: dict[str, dict[str, Check]] = {
    "started": {},
    "beat": {"phase": _line, "step": _count, "idle_s": _seconds, "events": _events},
    "ask": {"event": _event},
    "lease": {"segment": _segment, "replica": _count},
    "lease_of_push": {"segment": _segment, "replica": _count, "push": _count},
    "rows": {"number": _whole, "part": _count, "last": _yes_or_no, "parts": _count, "rows": _count},
    "arrive": {"name": _line, "process_indices": _process_indices, "value": lambda value: value},
    "place": {"generation": _whole, "blank": _yes_or_no, "lost": _or_none(_whole)},
    "connect": {"shard": _count},
    "connection_closed": {"worker_id": _count, "applied": _count, "tick": _whole},
    "pushes_of_lost": {"generation": _count},
    "copied": {"link": _count},
    "backup_lost": {"link": _count},
    "value": {},
    "error": _FAILURE,
    "exited": {"status": _whole, "phase": _or_none(_line), "step": _or_none(_count), "detail": _lines},
}

_ORDERS: dict[str, dict[str, Check]] = {
    "launch": {"host": _line, "shared": _shared, "variables": _texts, "silence_s": _positive_seconds},
    "to_process": {"process_index": _whole, "body": _object},
    "signal": {"number": _count},
    "signal_to": {"number": _count, "process_indices": _process_indices},
    "start_worker": {"worker_id": _count, "faults": _line},
    "form": {"generation": _count, "hosts": _members, "names": _names},
    "stacks": {},
    "end": {"grace_s": _seconds},
    "over": {"error": _lines, "preempted": _yes_or_no},
    "again": {"why": _lines},
}
