"""libsvm and libffm text, parsed once: columns in files without names, which are mapped.

libsvm (svmlight): `target [qid:number] index:value index:value …`, one row a line. From # on a line is a comment; empty
lines and comments alone are no rows; what stands behind `qid:` must be a whole number, and is not kept.
libffm: `target field:index:value …`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.ragged import mapped
from manyhands.errors import BadInput
from manyhands.sparse.compile import compiled_exact

Array = NDArray[Any]
Paths = str | Path | Sequence[str | Path]

_CHUNK_BYTES = 1 << 22
_MOST_HARD = 1 << 12
_MOST_NUMBERS = 1 << 32  # keys and fields are uint32
_POWERS_OF_TEN = np.array([float(f"1e{exponent}") for exponent in range(301)])

(
    _DONE,
    _NO_TARGET,
    _TARGET,
    _FIELD,
    _INDEX,
    _VALUE,
    _ZERO,
    _UNSORTED,
    _REPEATED,
    _FEATURES,
    _FIELDS,
    _NOT_FINITE,
    _QID,
) = range(13)


@dataclass(frozen=True)
class SparseText:
    """What the files hold; columns are mapped, copy on write."""

    offsets: Array
    """int64 [rows + 1]"""
    keys: Array
    """uint32 [entries], from 0"""
    values: Array
    """float32 [entries]"""
    targets: Array
    """float32 [rows]"""
    fields: Array | None = None
    """uint32 [entries]; None of libsvm"""


def read(
    paths: Paths,
    *,
    with_fields: bool,
    features: int | None,
    fields: int | None = None,
    zero_based: bool,
) -> SparseText:
    """Raises BadInput, with file, line and column, for text of another form."""
    names = [str(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    found = _Columns(with_fields)
    limits = features if features is not None else _MOST_NUMBERS, fields if fields is not None else _MOST_NUMBERS
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {
            name: stack.enter_context(tempfile.TemporaryFile(prefix="manyhands-")) for name in found.names
        }
        offset = np.zeros(1, np.int64)
        files["offsets"].write(offset.data)
        for name, file in _opened(names):
            with file:
                rows = _read_file(name, file, found, files, offset, limits, zero_based)
            if not rows:
                raise BadInput(f"{name} has no rows: it is empty, or holds comments alone")
        columns = {name: mapped(file, found.dtypes[name]) for name, file in files.items()}
    return SparseText(**columns)


class _Columns:
    """What one chunk is parsed into."""

    def __init__(self, with_fields: bool) -> None:
        self.dtypes = {"offsets": np.int64, "keys": np.uint32, "values": np.float32, "targets": np.float32}
        if with_fields:
            self.dtypes["fields"] = np.uint32
        self.with_fields, self.names = with_fields, list(self.dtypes)
        self.hard = np.zeros((_MOST_HARD, 4), np.int64)
        self.resize(_CHUNK_BYTES)

    def resize(self, size: int) -> None:
        """For so many bytes of text."""
        rows, entries = size // 2 + 1, size // 3 + 1  # "1\n" is a row, "1:1" an entry
        self.size = size
        self.ends, self.targets = np.empty(rows, np.int64), np.empty(rows, np.float32)
        self.keys, self.values = np.empty(entries, np.uint32), np.empty(entries, np.float32)
        self.fields = np.empty(entries if self.with_fields else 0, np.uint32)


def _opened(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Each path or URL, with what * stands for, decompressed by its ending."""
    import fsspec

    for name in names:
        try:
            matches = fsspec.open_files(name, "rb", compression="infer")
            if not matches:
                raise BadInput(f"there is no file {name!r}")
            for match in matches:
                yield match.path, match.open()
        except (OSError, ValueError, ImportError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def _read_file(
    name: str,
    file: Any,
    found: _Columns,
    files: dict[str, IO[bytes]],
    offset: Array,
    limits: tuple[int, int],
    zero_based: bool,
) -> int:
    """Append the rows of a file; returns how many. `offset` [1]: the entries so far, which it counts on."""
    rest, line, rows = b"", 1, 0
    while True:
        try:
            more = file.read(_CHUNK_BYTES)
        except (OSError, EOFError, ValueError) as error:
            raise BadInput(f"{name} cannot be read: {type(error).__name__}: {error}") from error
        text = rest + (more or b"\n")
        whole = text.rfind(b"\n") + 1
        text, rest = text[:whole], text[whole:]
        while text:
            if len(text) > found.size:
                found.resize(len(text))
            state = _parse(
                np.frombuffer(text, np.uint8),
                found.ends,
                found.targets,
                found.keys,
                found.values,
                found.fields,
                found.hard,
                _POWERS_OF_TEN,
                found.with_fields,
                *limits,
                zero_based,
            )
            done, count, entries, hard, problem, at, number = state
            if hard > len(found.hard):
                found.hard = np.zeros((hard, 4), np.int64)
                continue
            if problem == _DONE:
                problem, at = _read_hard(text, found, hard)
            if problem != _DONE:
                raise BadInput(_message(name, text, line, problem, at, number, limits, found.with_fields, zero_based))
            _append(found, files, offset, count, entries)
            rows += count
            line += text.count(b"\n", 0, done)
            text = text[done:]
        if not more:
            return rows


def _read_hard(text: bytes, found: _Columns, count: int) -> tuple[int, int]:
    """Read the numbers that are left to float(); (problem, where)."""
    for is_target, entry, begin, end in found.hard[:count].tolist():
        with np.errstate(over="ignore"):
            number = np.float32(float(text[begin:end]))
        if not np.isfinite(number):
            return _NOT_FINITE, begin
        (found.targets if is_target else found.values)[entry] = number
    return _DONE, 0


def _append(found: _Columns, files: dict[str, IO[bytes]], offset: Array, rows: int, entries: int) -> None:
    ends = found.ends[:rows] + offset[0]
    offset[0] += entries
    parts = {"offsets": ends, "targets": found.targets[:rows], "keys": found.keys[:entries]}
    parts |= {"values": found.values[:entries]} | ({"fields": found.fields[:entries]} if found.with_fields else {})
    for name, part in parts.items():
        files[name].write(part.data)


def _message(
    name: str,
    text: bytes,
    line: int,
    problem: int,
    at: int,
    number: int,
    limits: tuple[int, int],
    with_fields: bool,
    zero_based: bool,
) -> str:
    before = text.count(b"\n", 0, at)
    column = at - text.rfind(b"\n", 0, at)
    end = next((i for i in range(at, len(text)) if text[i : i + 1].isspace()), len(text))
    token = text[at:end].decode(errors="replace")
    token = repr(token if len(token) <= 40 else token[:37] + "…") if token else "the end of the line"
    features, fields = limits
    first = 0 if zero_based or with_fields else 1
    what = {
        _NO_TARGET: f"a row begins with its target, and this one begins with {token}: write the target, a blank, then index:value",
        _TARGET: f"a target must be a number, not {token}",
        _FIELD: f"expected field:index:value, got {token}",
        _INDEX: f"expected {'field:' if with_fields else ''}index:value with a whole number as index, got {token}",
        _VALUE: f"the value behind the colon must be a number, not {token}",
        _ZERO: "the index is 0, and libsvm counts features from 1: pass zero_based=True if this file counts from 0",
        _UNSORTED: f"index {number} comes after a greater one: sort the indices of each row",
        _REPEATED: f"index {number} stands twice in this row: give each feature of a row once",
        _FEATURES: f"index {number} is out of range: there are {features:,} features, from {first}; give features= that count, or leave it out",
        _FIELDS: f"field {number} is out of range: there are {fields:,} fields, from 0; give fields= that count, or leave it out",
        _NOT_FINITE: f"{token} is not finite as float32: scale the values, or leave the entry out",
        _QID: f"expected a whole number behind qid:, got {token}",
    }[problem]
    return f"{name}, line {line + before}, column {column}: {what}"


# -- compiled --------------------------------------------------------------------------------------------------------

_NEWLINE, _TAB, _RETURN, _SPACE, _HASH, _PLUS, _MINUS, _DOT, _COLON = 10, 9, 13, 32, 35, 43, 45, 46, 58
_DIGIT, _E, _SMALL_E, _Q = 48, 69, 101, 113


@compiled_exact
def _is_end(char: int) -> bool:
    return char in (_SPACE, _NEWLINE, _TAB, _RETURN, _HASH)


@compiled_exact
def _behind_blanks(text: Array, at: Any) -> Any:
    """Where the next word or the end of the line is: behind blanks, and behind a comment."""
    while text[at] == _SPACE or text[at] == _TAB or text[at] == _RETURN:
        at += np.uint64(1)
    if text[at] == _HASH:
        while text[at] != _NEWLINE:
            at += np.uint64(1)
    return at


@compiled_exact
def _whole(text: Array, at: Any) -> tuple[Any, Any]:
    """(a whole number below 2^33, or -1 where there is none or a greater one, and where it ends)."""
    number, begin = np.int64(0), at
    while True:
        digit = np.int64(text[at]) - _DIGIT
        if digit < 0 or digit > 9:
            break
        number = min(number * 10 + digit, np.int64(1) << 33)
        at += np.uint64(1)
    return (number if at > begin else np.int64(-1)), at


@compiled_exact
def _digits(text: Array, at: Any, mantissa: Any, digits: Any) -> tuple[Any, Any, Any, Any]:
    """(`mantissa` with the digits behind it, how many it has from the first that is not 0, how many were left out because it
    has 19, where they end)."""
    left_out = np.int64(0)
    while True:
        digit = np.int64(text[at]) - _DIGIT
        if digit < 0 or digit > 9:
            break
        if digits < 19:
            mantissa = mantissa * np.uint64(10) + np.uint64(digit)
            digits += np.int64(mantissa > np.uint64(0))
        else:
            left_out += 1
        at += np.uint64(1)
    return mantissa, digits, left_out, at


@compiled_exact
def _number(text: Array, at: Any, powers: Array) -> tuple[Any, Any, int]:
    """(float32, where it ends, state): state 0: it is what float() gives, rounded to float32; 1: float() must read it; 2: it
    is no number.

    Source of the exact case: How to Read Floating Point Numbers Accurately, William D. Clinger, 1990: a whole number up
    to 2^53, times or divided by a power of ten up to 10^22, is rounded once. Others are off by 2 units in the last place
    of float64 at most; where all numbers that near are the same float32, it is that.
    """
    negative: Any = text[at] == _MINUS
    if negative or text[at] == _PLUS:
        at += np.uint64(1)
    begin = at
    mantissa, digits, exponent, at = _digits(text, at, np.uint64(0), np.int64(0))
    seen = at > begin
    if text[at] == _DOT:
        begin = at + np.uint64(1)
        mantissa, digits, left_out, at = _digits(text, begin, mantissa, digits)
        exponent -= np.int64(at - begin) - left_out
        seen |= at > begin
    if not seen:
        return np.float32(0), at, 2
    if text[at] == _SMALL_E or text[at] == _E:
        at += np.uint64(1)
        below = text[at] == _MINUS
        if below or text[at] == _PLUS:
            at += np.uint64(1)
        power, end = _whole(text, at)
        if power < 0:
            return np.float32(0), at, 2
        exponent += -power if below else power
        at = end
    if mantissa == np.uint64(0):
        return np.float32(-0.0 if negative else 0.0), at, 0
    if exponent < -300 or exponent > 300:
        return np.float32(0), at, 1
    number = np.float64(mantissa)
    if exponent < 0:
        number /= powers[-exponent]
    else:
        number *= powers[exponent]
    if negative:
        number = -number
    if mantissa <= np.uint64(1 << 53) and -22 <= exponent <= 22:
        return np.float32(number), at, 0
    low, high = np.float32(number * (1 - 2.0**-50)), np.float32(number * (1 + 2.0**-50))
    return low, at, 0 if low == high else 1


@compiled_exact
def _parse(
    text: Array,
    ends: Array,
    targets: Array,
    keys: Array,
    values: Array,
    fields: Array,
    hard: Array,
    powers: Array,
    with_fields: bool,
    features: int,
    field_count: int,
    zero_based: bool,
) -> tuple[Any, ...]:
    """Whole lines, until no more fits in `hard`: (bytes, rows, entries, numbers in `hard`, problem, where, number)."""
    at, size = np.uint64(0), np.uint64(len(text))
    rows, entries, hard_count, done = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    most_hard, first = np.uint64(len(hard)), 0 if zero_based or with_fields else 1
    while at < size:
        done = at
        row_entries, row_hard = entries, hard_count
        at = _behind_blanks(text, at)
        if text[at] == _NEWLINE:
            at += np.uint64(1)
            done = at
            continue
        begin = at
        target, at, state = _number(text, at, powers)
        if state == 2 or not _is_end(text[at]):
            problem = _NO_TARGET if text[at] == _COLON else _TARGET
            return 0, 0, 0, 0, problem, np.int64(begin), 0
        if state == 1 and hard_count < most_hard:
            hard[hard_count, 0], hard[hard_count, 1] = 1, rows
            hard[hard_count, 2], hard[hard_count, 3] = begin, at
        hard_count += np.uint64(state)
        if not np.isfinite(target):
            return 0, 0, 0, 0, _NOT_FINITE, np.int64(begin), 0
        targets[rows] = target
        previous, is_first = np.int64(-1), True
        while True:
            at = _behind_blanks(text, at)
            if text[at] == _NEWLINE:
                at += np.uint64(1)
                break
            begin = at
            if is_first and not with_fields and text[at] == _Q:
                is_first = False
                is_qid = text[at + np.uint64(1)] == 105 and text[at + np.uint64(2)] == 100
                if is_qid and text[at + np.uint64(3)] == _COLON:
                    query, at = _whole(text, at + np.uint64(4))
                    if query < 0 or not _is_end(text[at]):
                        return 0, 0, 0, 0, _QID, np.int64(begin), 0
                    continue
            is_first = False
            if with_fields:
                number, at = _whole(text, at)
                if number < 0 or text[at] != _COLON:
                    return 0, 0, 0, 0, _FIELD, np.int64(begin), 0
                if number >= field_count:
                    return 0, 0, 0, 0, _FIELDS, np.int64(begin), number
                fields[entries] = number
                at += np.uint64(1)
            number, at = _whole(text, at)
            if number < 0 or text[at] != _COLON:
                return 0, 0, 0, 0, _INDEX, np.int64(begin), 0
            index = number - first
            if index < 0:
                return 0, 0, 0, 0, _ZERO, np.int64(begin), 0
            if index >= features:
                return 0, 0, 0, 0, _FEATURES, np.int64(begin), number
            if index <= previous and not with_fields:
                return 0, 0, 0, 0, (_REPEATED if index == previous else _UNSORTED), np.int64(begin), number
            previous = index
            keys[entries] = index
            at += np.uint64(1)
            begin = at
            value, at, state = _number(text, at, powers)
            if state == 2 or not _is_end(text[at]):
                return 0, 0, 0, 0, _VALUE, np.int64(begin), 0
            if state == 1 and hard_count < most_hard:
                hard[hard_count, 0], hard[hard_count, 1] = 0, entries
                hard[hard_count, 2], hard[hard_count, 3] = begin, at
            hard_count += np.uint64(state)
            if not np.isfinite(value):
                return 0, 0, 0, 0, _NOT_FINITE, np.int64(begin), 0
            values[entries] = value
            entries += np.uint64(1)
        if hard_count > most_hard:
            if rows == 0:
                row_hard = hard_count  # so much room is needed
            return (
                np.int64(done),
                np.int64(rows),
                np.int64(row_entries),
                np.int64(row_hard),
                _DONE,
                0,
                0,
            )  # this row again
        ends[rows] = entries
        rows += np.uint64(1)
        done = at
    return np.int64(done), np.int64(rows), np.int64(entries), np.int64(hard_count), _DONE, 0, 0
