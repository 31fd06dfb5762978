"""What all workers have alike where a script is replicated, compared along with gradients: inputs, lines, parameters."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import BadInput, Line, ManyhandsError
from manyhands.own_loop.first_step_checks import checksum
from manyhands.own_loop.whole.exchange import Workers
from manyhands.replica.control_bits import have_differed, with_inverse

_CHECK = 32
CHECK_BITS = 2 * _CHECK
"""Of a check sum and of its inverse."""
_SAMPLED = 512  # elements of a tensor that a digest looks at
_FIRST, _EVERY = (1, 10, 100), 1000  # backwards at which parameters are compared

Fact = tuple[Line, str]


class EqualFacts:
    """Check sums since the last comparison, by line of the script and by what they are of."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._facts: dict[Fact, int] = {}
        self._backwards = 0
        self._parameters: dict[int, int] = {}  # check sums, by number, where they are compared with this backward

    def add(self, line: Line, what: str, digest: int) -> None:
        """At this line, something has this digest."""
        fact = line, what
        self._facts[fact] = zlib.crc32(digest.to_bytes(8, "little"), self._facts.get(fact, 0))

    def check_of(self, line: Line) -> int:
        """The check sum, and its inverse, of a backward at this line and of all facts since the one before."""
        self._backwards += 1
        self._parameters = {}
        if self._backwards in _FIRST or self._backwards % _EVERY == 0:
            self._parameters = {number: checksum(leaf) for number, leaf in self._workers.leaves.numbered()}
        found = zlib.crc32(str(line).encode())
        for digest in [*self._facts.values(), *self._parameters.values()]:
            found = zlib.crc32(digest.to_bytes(4, "little"), found)
        return with_inverse(found, _CHECK)

    def compare(self, bits: int, line: Line) -> None:
        """bits: the OR of all workers' `check_of`. A collective where they differ.

        Raises ManyhandsError where the script branches otherwise on another worker or parameters differ, BadInput for
        other inputs.
        """
        facts, self._facts = self._facts, {}
        if not have_differed(bits, _CHECK):
            return
        own = {
            "line": str(line),
            "facts": {f"{what} in {at}": digest for (at, what), digest in facts.items()},
            "parameters": {str(number): found for number, found in self._parameters.items()},
        }
        first, *others = self._workers.group.all_gather_json(own)
        for rank, theirs in enumerate(others, start=1):
            if theirs["line"] != first["line"]:
                raise ManyhandsError(
                    f"the script branches otherwise on the workers: worker 0 calls backward in {first['line']}, worker {rank} in {theirs['line']}. Every "
                    "worker runs the whole script: a branch that looks at the time, at files or at a worker's own numbers differs"
                )
            other = _first_difference(first["facts"], theirs["facts"])
            if other:
                raise BadInput(other_values(other, first["facts"].get(other), rank, theirs["facts"].get(other)))
            if number := _first_difference(first["parameters"], theirs["parameters"]):
                raise ManyhandsError(
                    f"at backward {self._backwards}, {self._name_of(int(number))} of worker {rank} is not what it is on worker 0. Every worker runs the whole "
                    "script, so something changes it by numbers that workers do not have alike: the time, a generator without a seed"
                )

    def _name_of(self, number: int) -> str:
        from manyhands.own_loop.observed.modules import outermost_modules

        leaf = dict(self._workers.leaves.numbered([number])).get(number)
        for module in outermost_modules():
            for name, parameter in module.named_parameters():
                if parameter is leaf:
                    return f"{name} of a {type(module).__name__}"
        return "a tensor" if leaf is None else f"a tensor of shape {list(leaf.shape)}"


def other_values(what: str, own: object, rank: int, theirs: object) -> str:
    """The error of workers that compute with other values."""
    return (
        f"the workers compute with other values: {what} is {_shown(own)} on worker 0 and {_shown(theirs)} on worker {rank}. Every worker runs the whole script, "
        "with the same random numbers: what it draws from a generator without a seed, from the time or os.urandom differs. Draw it from torch, numpy or "
        'random, or let each worker have its own rows: batches="slices"'
    )


def _shown(value: object) -> str:
    return "missing" if value is None else f"{value:08x}" if isinstance(value, int) else str(value)


def _first_difference(one: dict[str, int], other: dict[str, int]) -> str:
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), "")


def digest_of(value: Any) -> int:
    """Of up to 512 elements of a tensor; of a number or a text. Of other values only the type counts."""
    if not isinstance(value, Tensor):
        plain = value if isinstance(value, int | float | complex | str | None) else type(value).__name__
        return zlib.crc32(repr(plain).encode())
    found = zlib.crc32(f"{list(value.shape)} {value.dtype}".encode())
    if value.layout != torch.strided or not value.numel():
        return found
    return checksum(value.detach().reshape(-1)[:: value.numel() // _SAMPLED | 1], found)
