"""Inputs that nobody meant: valid ones damaged, from a seed, so that a failure can be had again.

A parser survives an input when it takes it, or raises what its contract names, without taking more memory than `bounded` gives.
"""

import copy
import json
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ODD_NUMBERS = (0, -1, 1, 2, 255, 256, 65_535, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "²", "NaN", "\x1b[2J", "../x", "/etc/passwd", "a" * 300),
    *([], {}, [[]], [None], {"": {}}),
    *(0, -1, 1, 1.5, -0.0, 1e308, float("nan"), float("inf"), 1 << 31, 1 << 63, 1 << 200, -(1 << 63)),
)


class Damage(random.Random):
    """Draws damaged copies of valid inputs."""

    def of_bytes(self, *valid: bytes) -> bytes:
        """One of them after up to four changes; seldom bytes of no meaning at all."""
        if self.random() < 0.02:
            return self.randbytes(self.choice((0, 1, 7, 64, 200)))
        data = bytearray(self.choice(valid))
        for _ in range(self.randint(1, 4)):
            self._change(data)
        return bytes(data)

    def _change(self, data: bytearray) -> None:
        at = self.randrange(len(data) + 1)
        size = self.choice((1, 2, 4, 8, 64))
        match self.randrange(6):
            case 0 if data:  # a bit
                data[min(at, len(data) - 1)] ^= 1 << self.randrange(8)
            case 1:  # an extreme number
                number = self.choice(ODD_NUMBERS) & (1 << 64) - 1
                data[at : at + min(size, 8)] = number.to_bytes(8, "little")[:size]
            case 2:  # a hole
                del data[at : at + size]
            case 3:  # strange bytes
                data[at:at] = self.randbytes(size)
            case 4:  # again
                data[at:at] = data[max(0, at - size) : at]
            case _:  # the end
                del data[at:]

    def of_json(self, valid: Any) -> Any:
        """A copy with up to three values replaced, dropped, moved or repeated, at any depth."""
        value = copy.deepcopy(valid)
        for _ in range(self.randint(1, 3)):
            value = self._changed(value)
        return value

    def _changed(self, value: Any) -> Any:
        if not isinstance(value, dict | list) or not value or self.random() < 0.05:
            return copy.deepcopy(self.choice(ODD_VALUES))
        key = self.choice(list(value)) if isinstance(value, dict) else self.randrange(len(value))
        match self.randrange(8):
            case 0 if isinstance(value, dict):
                del value[key]
            case 0:
                value.pop(key)
            case 1 if isinstance(value, dict):
                value[self.choice(("", "x", "../x", "rank-00001.json"))] = copy.deepcopy(value[key])
            case 1:
                value.append(copy.deepcopy(value[key]))
            case 2:
                value[key] = copy.deepcopy(self.choice(ODD_VALUES))
            case 3 if isinstance(value[key], int):
                value[key] = self.choice(ODD_NUMBERS) * self.choice((1, -1))
            case _:
                value[key] = self._changed(value[key])
        return value

    def of_text(self, pieces: Sequence[str], most: int = 4) -> str:
        """Some pieces one after the other, with up to two characters changed."""
        text = "".join(self.choice(pieces) for _ in range(self.randint(1, most)))
        for _ in range(self.randint(0, 2)):
            at = self.randrange(len(text) + 1)
            text = text[:at] + self.choice((*",=:\"'[](){}-²½@+ /\x00é", "")) + text[at + self.randint(0, 1) :]
        return text


def json_bytes(value: Any) -> bytes:
    """As hostile writers have it: with NaN, and what no encoding has replaced."""
    return json.dumps(value).encode(errors="replace")


def survive(
    call: Callable[[Any], Any], inputs: Iterator[Any], expected: type[BaseException] | tuple[type[BaseException], ...]
) -> tuple[int, int]:
    """(how many were taken, how many refused); AssertionError names the first input that ends in another exception."""
    taken = refused = 0
    for number, given in enumerate(inputs):
        try:
            call(given)
            taken += 1
        except expected:
            refused += 1
        except Exception as error:
            raise AssertionError(f"input {number} ended in {type(error).__name__}: {error}\n{given!r:.2000}") from error
    return taken, refused


@contextmanager
def bounded(megabytes: int = 256) -> Iterator[None]:
    """Within, this process may take so much more memory: beyond it, allocating raises."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (megabytes << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def writes_only_in(folder: Path) -> Iterator[None]:
    """What lies beside a folder is afterwards what it was."""

    def beside() -> dict[str, bytes | None]:
        found = [path for path in folder.parent.rglob("*") if not path.is_relative_to(folder)]
        return {str(path): path.read_bytes() if path.is_file() else None for path in found}

    before = beside()
    yield
    assert beside() == before
