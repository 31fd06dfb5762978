"""What a member of a run may report of its processes, and how the driver treats the rest."""

from typing import Any

import pytest

from manyhands.engines.driver.message_checks import checked
from manyhands.transport.frame import FrameError
from refusals import refused

SEGMENT = {"epoch": 0, "first": 0, "until": 4, "parts": 2}
FAILURE = {
    "rank": 2,
    "phase": "compute",
    "step": 7,
    "message": "it broke",
    "detail": "Traceback\n  in f",
    "error": "KeyError",
    "family": "",
    "exit_code": 1,
    "secondary": False,
    "lost": None,
}
GOOD: dict[str, dict[str, Any]] = {
    "started": {},
    "beat": {"phase": "compute", "step": 7, "idle_s": 0.5, "events": [{"type": "step", "rank": 2, "values": {"a": 1}}]},
    "ask": {"event": {"type": "validation", "values": {"metrics": {}}}},
    "lease": {"segment": SEGMENT, "replica": 1},
    "rows": {"number": -1, "part": 0, "last": True, "parts": 0, "rows": 5},
    "arrive": {"name": "ring", "process_indices": [0, 2, -1], "value": ["10.0.0.2", 7000]},
    "place": {"generation": -1, "blank": True, "lost": None},
    "value": {"value": {"tensor": 0}},
    "error": FAILURE,
    "exited": {"status": -9, "phase": None, "step": None, "detail": ""},
}
BAD_EVENTS = ({}, {"type": 1}, {"type": "x", "rank": "2"}, {"type": "x", "rank": 3}, {"type": "x", "rank": 1 << 40},
              {"type": "x", "more": 1}, {"type": "x", "values": []}, 7)  # fmt: skip
BAD_SEGMENTS = (
    {"until": -1},
    {"parts": 0},
    {"parts": 1 << 40},
    {"more": 1},
    {"left": [[0, 9]]},
    {"left": 3},
    {"epoch": None},
)
BAD: dict[str, list[dict[str, Any]]] = {
    "beat": [
        *({"phase": 3}, {"step": "7"}, {"step": -1}, {"idle_s": "long"}, {"idle_s": float("nan")}, {"events": {}}),
        *({"events": [event]} for event in BAD_EVENTS),
    ],
    "ask": [{"event": None}, {"event": {"values": {}}}, {"event": {"type": "x", "rank": 3}}],
    "lease": [
        *({"segment": {**SEGMENT, **wrong}} for wrong in BAD_SEGMENTS),
        *({"segment": {}}, {"replica": -1}, {"replica": None}),
    ],
    "rows": [{"number": "0"}, {"part": -1}, {"last": 1}, {"parts": None}, {"rows": -1}],
    "arrive": [{"name": 3}, *({"process_indices": wrong} for wrong in ("all", [0, "1"], [2, 2], [[]]))],
    "place": [{"generation": None}, {"blank": 1}, {"lost": "2"}],
    "error": [{"rank": 0}, {"message": None}, {"secondary": "no"}, {"exit_code": []}, {"family": {}}],
    "exited": [{"status": "killed"}, {"phase": 3}, {"detail": None}],
}


def test_what_makes_sense_passes() -> None:
    for kind, fields in GOOD.items():
        passed = checked(2, {"type": kind, **fields, "something": "more"})
        segment = passed.pop("segment", None)
        assert passed == {"type": kind, **{name: value for name, value in fields.items() if name != "segment"}}
        assert segment is None or segment.items() >= SEGMENT.items()


def test_what_makes_no_sense_is_named() -> None:
    cases = [(kind, {**GOOD[kind], **wrong}, kind) for kind, many in BAD.items() for wrong in many]
    for kind, fields in GOOD.items():  # every field is needed
        if kind not in ("started", "value"):
            lacking = [{other: fields[other] for other in fields if other != name} for name in fields]
            cases += [(kind, one, "without|from seat|makes no sense") for one in lacking]
    for kind, fields, words in cases:
        refused(words, checked, 2, {"type": kind, **fields}, kind=FrameError)


def test_other_kinds_are_none() -> None:
    bodies: tuple[Any, ...] = (None, 7, [], {}, {"type": 3}, {"type": "lost", "why": "x"}, {"type": "\x1b[2J"})
    for body in bodies:
        with pytest.raises(FrameError, match="not one of started, beat") as raised:
            checked(2, body)
        assert "\x1b" not in str(raised.value)


def test_texts_command_no_terminal_and_forge_no_line() -> None:
    passed = checked(
        2, {"type": "error", **FAILURE, "message": "a\x1b[2Jb", "phase": "x\nERROR y", "detail": "a\nb\x07"}
    )
    assert (passed["message"], passed["phase"], passed["detail"]) == ("a?[2Jb", "x?ERROR y", "a\nb?")
    event = {"type": "warning", "values": {"message": "\x9b1mbold"}}
    assert checked(2, {"type": "ask", "event": event})["event"]["values"]["message"] == "?1mbold"
