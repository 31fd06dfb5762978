"""The computing times of codecs, measured in the task's own loop by means of a group that echoes this rank's values.

All workers measure at the same time, as in a real step, and each codec runs on caches and freed memory as a backward
pass leaves them. In a separate loop its memory would be in the cache, and it would take a fraction of the time.
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

from manyhands.comm.codecs import codec_of
from manyhands.comm.group import Work
from manyhands.comm.solo import SoloGroup
from manyhands.engines.sim.compute import Coding
from manyhands.evidence.calibrate.fit import two_terms
from manyhands.evidence.calibrate.observe import RunSetup, observe
from manyhands.replica.replica import Replica
from manyhands.strategies import compression
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.base import Needs, State, StepResult, Strategy
from manyhands.strategies.compression import CompressedState
from manyhands.task import Task
from manyhands.worker import Mesh, Worker

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
"""Every codec; twice those whose time depends on the payload's length: `threshold` sending nothing, and everything."""

_WARM = 1  # ticks at the start of a setting that are not measured
_MOST_RANKS = 4  # of an echo group: enough payloads to know the time of one


@dataclass(frozen=True, kw_only=True)
class CodecTimes:
    """The median times of one setting with all workers computing."""

    codec: str  # with its options
    n: int  # numbers of the vector [D']
    nbytes: int  # of the payload
    encode_s: float  # with residuals, and decoding the own payload for them
    decode_s: float  # of one payload


def time_codecs(setup: RunSetup, task: Task, ticks: int) -> tuple[CodecTimes, ...]:
    """Measure each of SETTINGS that applies to the task's gradients, in `ticks` ticks of each worker."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    ticks += _WARM
    for event in observe(setup, task, _CodecTiming(ticks=ticks), ticks * len(SETTINGS), event_type="codec"):
        found[event.values["codec"]].append(event.values)
    times = []
    for text, samples in found.items():
        names = ("n", "nbytes", "encode_s", "decode_s")
        n, nbytes, encode_s, decode_s = (statistics.median(one[name] for one in samples) for name in names)
        times.append(CodecTimes(codec=text, n=round(n), nbytes=round(nbytes), encode_s=encode_s, decode_s=decode_s))
    return tuple(times)


def codings(measured: Sequence[CodecTimes]) -> dict[str, Coding]:
    """{codec's name: the simulator's constants}; with seconds a byte if two settings of a codec were measured."""
    by_name: defaultdict[str, list[CodecTimes]] = defaultdict(list)
    for one in measured:
        codec = codec_of(one.codec)
        assert codec is not None
        by_name[codec.name].append(one)
    return {name: _fitted(settings) for name, settings in by_name.items()}


def _fitted(settings: Sequence[CodecTimes]) -> Coding:
    xs = [(float(one.n), float(one.nbytes) if len(settings) > 1 else 0.0) for one in settings]
    encode = two_terms(xs, [one.encode_s for one in settings])
    decode = two_terms(xs, [one.decode_s for one in settings])
    return Coding(*(float(f"{value:.4g}") for value in (encode.first, decode.first, encode.second, decode.second)))


# -- on the workers ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _CodecState(State):
    """The current setting and its codec's state."""

    setting: str = ""
    sent: CompressedState = field(default_factory=CompressedState)


@dataclass(frozen=True, kw_only=True)
class _CodecTiming(Strategy):
    """Every worker trains its own model. In each step it also takes a mean with a codec, over an echo group."""

    ticks: int  # of each setting, one after the other

    name: ClassVar[str] = "coding"
    needs: ClassVar[Needs] = Needs(one_model=False)

    @override
    def start(self, replica: Replica, worker: Worker) -> _CodecState:
        return _CodecState()

    @override
    def exchange(self, replica: Replica, worker: Worker, state: _CodecState) -> StepResult:
        setting, tick = divmod(replica.tick, self.ticks)
        if replica.weight:
            self._mean(SETTINGS[setting % len(SETTINGS)], replica, worker, state, counts=tick >= _WARM)
        return StepResult(applied=replica.apply(), rows_left=replica.control.rows_left(worker))

    def _mean(self, setting: str, replica: Replica, worker: Worker, state: _CodecState, *, counts: bool) -> None:
        options = AllReduce(compress=setting)
        if setting != state.setting:
            state.setting = setting
            state.sent = CompressedState(**compression.remembered(options, replica, worker))
        own, received = replica.gradients.clone(), replica.control.received
        group = _EchoGroup(worker)
        mesh = Mesh(world=group, data=group, rows=worker.mesh.rows)
        compression.mean_gradients(options, replica, replace(worker, group=group, mesh=mesh), state.sent)()
        group.stop()
        replica.control.received = received  # all workers' bits, which stop them at the same tick
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


class _EchoGroup(SoloGroup):
    """A group whose other ranks have this rank's values, without communication. Times encoding and decoding."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.size, self._device = min(worker.size, _MOST_RANKS), worker.device
        self.n = self.nbytes = 0
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
    def encoded(self, codec: str, n: int, nbytes: int) -> None:
        self.n, self.nbytes = n, nbytes

    @override
    def decoded(self, codec: str, n: int, nbytes: int, payloads: int = 1) -> None:
        now = self._now()
        self.decode_s, self._since = (now - self._since) / payloads, now

    def stop(self) -> None:
        """Count the time since decoding as encoding."""
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
