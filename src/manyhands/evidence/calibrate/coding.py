"""What codecs compute, measured in the task's own loop: each mean is one of a group whose others say, at once, what this rank says.

All workers are at it at the same time, as in a real step, and each codec finds caches and freed memory as a backward pass
leaves them. In a loop of its own it finds its memory at hand, and takes a fraction of the time.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.codecs import Codec, codec_of
from manyhands.comm.codecs.base import TimedGroup
from manyhands.comm.group import Work
from manyhands.comm.solo import SoloGroup
from manyhands.engines.sim.compute import Coding
from manyhands.evidence.calibrate.fit import two_terms
from manyhands.evidence.calibrate.observe import ObservedOn, observe
from manyhands.replica.replica import Replica
from manyhands.strategies import compressing
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.base import Needs, State, Strategy
from manyhands.strategies.compressing import CompressedState
from manyhands.task import Task
from manyhands.worker import Worker

SETTINGS = (
    "topk:0.01",
    "onebit",
    "threshold:1e30",
    "threshold:1e-30",
    "powersgd:2",
    "powersgd:8",
    "qsgd:4",
    "bf16",
    "int8",
)
"""Every codec. Those in which the payload's length matters twice: `threshold` when it sends nothing, and everything."""

_WARM = 1  # first ticks of a setting that nobody counts
_MOST_ALIKE = 4  # ranks of a group: of so many payloads it is known what one takes


@dataclass(frozen=True, kw_only=True)
class Coded:
    """What one setting takes with all workers at it, medians."""

    codec: str  # with its numbers
    n: int  # numbers of the vector [D']
    nbytes: int  # of the payload
    encode_s: float  # with residuals, and the own payload decoded for them
    decode_s: float  # of one payload


def coded(place: ObservedOn, task: Task, ticks: int) -> tuple[Coded, ...]:
    """Of each of SETTINGS that the task has gradients for, by so many ticks of each worker."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    ticks += _WARM
    for event in observe(place, task, _Coding(ticks=ticks), ticks * len(SETTINGS), kind="codec"):
        found[event.values["codec"]].append(event.values)
    return tuple(_median(text, samples) for text, samples in found.items())


def _median(text: str, samples: Sequence[dict[str, Any]]) -> Coded:
    n, nbytes, encode_s, decode_s = (
        statistics.median(sample[name] for sample in samples) for name in ("n", "nbytes", "encode_s", "decode_s")
    )
    return Coded(codec=text, n=round(n), nbytes=round(nbytes), encode_s=encode_s, decode_s=decode_s)


def codings(measured: Sequence[Coded]) -> dict[str, Coding]:
    """{codec's name: the simulator's constants}. Seconds a byte where two settings of a codec were measured."""
    by_name: defaultdict[str, list[Coded]] = defaultdict(list)
    for one in measured:
        codec = codec_of(one.codec)
        assert codec is not None
        by_name[codec.name].append(one)
    return {name: _fitted(settings) for name, settings in by_name.items()}


def _fitted(settings: Sequence[Coded]) -> Coding:
    xs = [(float(one.n), float(one.nbytes) if len(settings) > 1 else 0.0) for one in settings]
    encode = two_terms(xs, [one.encode_s for one in settings])
    decode = two_terms(xs, [one.decode_s for one in settings])
    return Coding(*(float(f"{value:.4g}") for value in (encode.first, decode.first, encode.second, decode.second)))


# -- on the workers ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Now(State):
    """The setting that is measured now, and what its codec remembers."""

    setting: str = ""
    sent: CompressedState = field(default_factory=CompressedState)


@dataclass(frozen=True, kw_only=True)
class _Coding(Strategy):
    """Every worker trains a model of its own; beside each step it takes a mean with a codec, which nobody else hears of."""

    ticks: int  # of each setting, one after the other

    name: ClassVar[str] = "coding"
    needs: ClassVar[Needs] = Needs(one_model=False)

    @override
    def start(self, replica: Replica, worker: Worker) -> _Now:
        return _Now()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: _Now) -> bool:
        setting, tick = divmod(replica.tick, self.ticks)
        if replica.weight:
            self._mean(SETTINGS[setting % len(SETTINGS)], replica, worker, state, counts=tick >= _WARM)
        replica.apply()
        return replica.any_rank_has_rows if replica.sync_control_bits_if_due(worker) else True

    def _mean(self, setting: str, replica: Replica, worker: Worker, state: _Now, *, counts: bool) -> None:
        options = AllReduce(compress=setting)
        if setting != state.setting:
            state.setting = setting
            state.sent = CompressedState(**compressing.remembered(options, replica, worker))
        own, control_bits = replica.gradients.clone(), replica.control_bits
        group = _Alike(worker)
        compressing.mean_gradients(options, replica, replace(worker, group=group), state.sent)
        group.stop()
        replica.control_bits = control_bits  # the others', by whom all workers stop at the same tick
        replica.gradients.copy_(own)
        if counts:
            worker.emit(
                "codec",
                tick=replica.tick,
                codec=setting,
                n=group.n,
                nbytes=group.nbytes,
                encode_s=group.encode_s,
                decode_s=group.decode_s,
            )


class _Alike(SoloGroup, TimedGroup):
    """A group of some ranks who all say what this one says, at once; and a stopwatch that leaves the others out."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.size, self._device = min(worker.size, _MOST_ALIKE), worker.device
        self.n = self.nbytes = 0  # numbers of the vector, bytes of the payload
        self.encode_s = self.decode_s = 0.0  # so far; of one payload
        self._since = self._now()

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        with self._stopped():
            return super().start_mean_(tensor, weight * self.size, bits, lost)

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        with self._stopped():
            return tensor.detach().repeat(self.size, 1)

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        with self._stopped():
            return super().all_gather_json(value) * self.size

    @override
    def encoded(self, codec: Codec, n: int, nbytes: int) -> None:
        self.n, self.nbytes = n, nbytes

    @override
    def decoded(self, codec: Codec, n: int, nbytes: int, payloads: int) -> None:
        now = self._now()
        self.decode_s, self._since = (now - self._since) / payloads, now

    def stop(self) -> None:
        """What was not decoding was encoding."""
        self.encode_s += self._now() - self._since

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        self.stop()
        yield
        self._since = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
