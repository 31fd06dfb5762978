"""What strategies with the options `compress` and `feedback` share: what is sent, what waits, and what was lost.

Error feedback: what a codec leaves out of a gradient or an update stays in the worker's residual, and is added to its
next one. What rounding a mean of 16-bit numbers loses waits in the residual of the worker that rounded it. So all that
was applied and the residuals are all gradients. A push or mean that does not count (weight 0, dropped) sends nothing of
the residual, and a gradient that is not finite leaves it as it was. A parameter takes part only where somebody has a
gradient for it; until then its residual waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.codecs import Codec, Hints, Matrix, codec_of
from manyhands.comm.codecs.powersgd import PowerSGD
from manyhands.comm.codecs.threshold import Threshold
from manyhands.comm.compressed import compressed_mean_
from manyhands.comm.group import MeanResult
from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.layout import Layout
from manyhands.server.base import Encoded, Pushed
from manyhands.server.shard_ranges import parts_of
from manyhands.strategies import server_strategy
from manyhands.strategies.base import State, server_of
from manyhands.strategies.server_strategy import OverlapState
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """The options of a strategy that compresses what it exchanges."""

    compress: str = "none"
    """The codec of what is sent: topk:FRACTION, onebit, threshold:TAU[:CLIP], powersgd:RANK, qsgd:BITS, bf16, int8, or
    none. Give one where the link is what a step waits for."""
    feedback: bool | None = None
    """Whether what a codec leaves out is added to the next exchange. `none`: as its paper, all but qsgd do. Turn it off
    to save a vector of memory, and see whether it still learns."""

    def compresses(self) -> bool:
        return self.compress != "none"


@dataclass(kw_only=True)
class CompressedState(State):
    """What this worker must remember of what it sent."""

    own: ClassVar[tuple[str, ...]] = ("residual", "seed")
    residual: Tensor | None = None  # [D'], joined, with error feedback: what has yet to be sent
    guess: Tensor | None = None  # [1, numbers] PowerSGD's factors of the step before
    seed: int = 0  # with this, the rank and `sent` QSGD draws
    sent: int = 0  # how often something of weight was encoded

    @override
    def taken_over(self) -> Self:
        """The other goes on with what it left out itself: here nothing is left out yet."""
        if self.residual is not None:
            self.residual.zero_()
        return self

    @override
    def left_out(self) -> float | None:
        return None if self.residual is None else float(self.residual.norm())

    @override
    def share_anew(self, before: int, size: int) -> None:
        if self.residual is not None:
            self.residual.mul_(size / before)

    def shared(self, others: list[Any], size: int, *, adds: bool) -> Tensor | None:
        """For `merge` with another number of ranks: the residual of each, so that nothing is lost.

        adds: what workers send adds up, and each takes its part of the sum; else it is averaged, and each takes the
            mean.
        """
        if self.residual is None:
            return None
        total = sum((other.residual for other in others), torch.zeros_like(self.residual))
        return self.residual.copy_(total / (size if adds else len(others)))


@dataclass(kw_only=True)
class CompressedOverlapState(OverlapState, CompressedState):
    """Of a strategy that may do both."""


# -- options -----------------------------------------------------------------------------------------------------------


def check(strategy: str, options: CompressOptions) -> None:
    """Raise BadInput, by name, for a codec that does not exist, or feedback that nothing asks for."""
    if not isinstance(options.compress, str):
        raise BadInput(
            f"strategy {strategy}: compress must be a string such as topk:0.01, or none; not {options.compress!r}"
        )
    try:
        codec = codec_of(options.compress)
    except BadInput as error:
        raise type(error)(f"strategy {strategy}: compress={options.compress}: {error}") from None
    if options.feedback not in (None, True, False):
        raise BadInput(f"strategy {strategy}: feedback must be true, false or none; not {options.feedback!r}")
    if codec is None and options.feedback is not None:
        raise BadInput(
            f"strategy {strategy}: feedback={str(options.feedback).lower()} needs compress, and compress is none: "
            "leave feedback out, or give compress"
        )


def has_feedback(options: CompressOptions) -> bool:
    """Whether what is left out waits: as asked for; else where the codec is biased."""
    codec = codec_of(options.compress)
    return codec is not None and (codec.biased if options.feedback is None else options.feedback)


def remembered(options: CompressOptions, replica: Replica, worker: Worker) -> dict[str, Any]:
    """The fields of `CompressedState` at the start."""
    codec = codec_of(options.compress)
    if codec is None or (worker.mesh.data.size == 1 and not worker.elastic):
        return {}
    fields: dict[str, Any] = {"seed": torch.initial_seed()}
    if has_feedback(options):
        fields["residual"] = replica.zeros().joined()
    if isinstance(codec, PowerSGD):
        numbers = sum(columns for _, _, columns in _matrices(replica.layout)) * codec.rank
        draws = torch.Generator().manual_seed(0)  # the same on all workers
        fields["guess"] = torch.randn(1, numbers, generator=draws, dtype=torch.float64).to(
            replica.layout.device, replica.layout.dtype
        )
    return fields


# -- exchanges ---------------------------------------------------------------------------------------------------------


def mean_gradients(
    options: CompressOptions, replica: Replica, worker: Worker, state: CompressedState
) -> Callable[[], None]:
    """`Replica.mean_gradients`, compressed. With one worker nothing is sent, and nothing compressed.

    What is returned is to be called once the exchange counts on all ranks: it takes note of what was sent.
    """
    codec = codec_of(options.compress)
    if codec is None or (worker.mesh.data.size == 1 and not worker.elastic):
        replica.mean_gradients(worker.mesh.data)
        return _nothing
    layout, weight, guess = replica.layout, replica.weight, _copy_of_guess(state)
    whole = _with_residual(state, replica.gradients.joined())
    vector = _without(layout, whole.clone(), replica.grad_mask)
    own = None if state.residual is None else torch.empty_like(vector)
    hints = Hints(_draws(state, replica), _matrices_in(codec, guess, layout, 0, layout.padded))
    total = compressed_mean_(worker.mesh.data, codec, vector, weight, replica.bits(), hints, own)
    replica.rounds += worker.mesh.data.size > 1
    grad_mask = total.bits >> replica.control.width
    if total.weight:
        replica.gradients.take_joined_(_without(layout, vector, grad_mask))
    replica.record_mean(total)

    def remember() -> None:
        state.sent += weight > 0
        _keep_guess(state, guess)
        if total.weight:
            _remember(codec, state, whole, own, layout, grad_mask, weight)

    return remember


def mean_(
    options: CompressOptions,
    replica: Replica,
    worker: Worker,
    state: CompressedState,
    update: FlatVector,
    weight: float,
    bits: int,
) -> tuple[MeanResult, Callable[[], None]]:
    """The mean of everybody's update, compressed. With one worker nothing is sent, and nothing compressed.

    The second of the two is to be called once the mean counts on all ranks: it takes note of what was sent.
    """
    codec = codec_of(options.compress)
    if codec is None or (worker.mesh.data.size == 1 and not worker.elastic):
        return update.mean_(worker.mesh.data, weight, bits), _nothing
    layout, all_of_it, guess = replica.layout, _everything(replica.layout), _copy_of_guess(state)
    whole = _with_residual(state, update.joined())
    vector = whole.clone()
    own = None if state.residual is None else torch.empty_like(vector)
    hints = Hints(_draws(state, replica), _matrices_in(codec, guess, layout, 0, layout.padded))
    total = compressed_mean_(worker.mesh.data, codec, vector, weight, bits, hints, own)
    if total.weight:
        _without(layout, vector, all_of_it)
    update.take_joined_(vector)

    def remember() -> None:
        state.sent += weight > 0
        _keep_guess(state, guess)
        if total.weight:
            _remember(codec, state, whole, own, layout, all_of_it, weight)

    return total, remember


def pull(options: CompressOptions, replica: Replica, worker: Worker) -> None:
    """`server_strategy.pull`. Where a codec makes something of zeros, the center's padding is not 0, and is left there."""
    server_strategy.pull(replica, worker)
    clear_padding(options, replica, replica.parameters)


def center(options: CompressOptions, replica: Replica, worker: Worker) -> FlatVector:
    """`server_strategy.center`, its padding 0."""
    vector = server_strategy.center(replica, worker)
    clear_padding(options, replica, vector)
    return vector


def push(
    options: CompressOptions,
    replica: Replica,
    worker: Worker,
    state: CompressedState,
    update: FlatVector,
    weight: float = 1.0,
    bits: int = 0,
    since: Sequence[int] = (),
) -> Pushed:
    """`Server.push` of an update, compressed. With one worker nothing is."""
    codec = codec_of(options.compress)
    if codec is None or worker.mesh.data.size == 1:
        return server_strategy.push(replica, worker, update, weight, bits, since)
    whole = _with_residual(state, update.joined())
    encoded, own = _encoded(codec, replica, worker, state, whole, weight)
    pushed = server_of(worker).push(encoded, weight, bits, since=since)
    if weight and pushed.applied:
        _remember(codec, state, whole, own, replica.layout, _everything(replica.layout))
    return pushed


def start_exchange(
    options: CompressOptions,
    replica: Replica,
    worker: Worker,
    state: CompressedOverlapState,
    update: FlatVector | None,
    weight: float = 1.0,
    *,
    pull: bool,
) -> None:
    """`Server.start_exchange`, compressed, of a rule that drops nothing. update: not touched until it is over."""
    codec, into, server = codec_of(options.compress), state.coming if pull else None, server_of(worker)
    if update is None:
        server.start_exchange(into=into)
    elif codec is None or worker.mesh.data.size == 1:
        server.start_exchange(update.joined(), weight, into=into, since=state.since)
    else:
        whole = _with_residual(state, update.joined())
        encoded, own = _encoded(codec, replica, worker, state, whole, weight)
        server.start_exchange(encoded, weight, into=into, since=state.since)
        _remember(codec, state, whole, own, replica.layout, _everything(replica.layout))


def take_center(options: CompressOptions, replica: Replica, state: OverlapState) -> None:
    """The center that has come, into the replica's parameters."""
    assert state.coming is not None
    replica.parameters.take_joined_(state.coming)
    state.has_come = False
    replica.rounds += 1
    clear_padding(options, replica, replica.parameters)


def push_gradients(options: CompressOptions, replica: Replica, worker: Worker, state: CompressedState) -> Pushed:
    """`Server.push` of the replica's gradients, compressed, for rules that answer with a mean of all. With one worker
    nothing is.

    The answer's bits say which parameters it is for; the answer is 0 elsewhere.
    """
    codec, bits = codec_of(options.compress), replica.bits()
    if codec is None or worker.mesh.data.size == 1:
        return server_strategy.push(replica, worker, replica.gradients, replica.weight, bits)
    layout, weight = replica.layout, replica.weight
    whole = _with_residual(state, replica.gradients.joined())
    vector = _without(layout, whole.clone(), replica.grad_mask)
    encoded, own = _encoded(codec, replica, worker, state, vector, weight)
    pushed = server_of(worker).push(encoded, weight, bits)
    grad_mask = pushed.bits >> replica.control.width
    if pushed.answer is not None:
        _without(layout, pushed.answer, grad_mask)
    if weight and pushed.applied:
        _remember(codec, state, whole, own, layout, grad_mask)
    return pushed


def _encoded(
    codec: Codec, replica: Replica, worker: Worker, state: CompressedState, vector: Tensor, weight: float
) -> tuple[Encoded, Tensor]:
    """What the server is sent, and [D'] what it makes of it."""
    server = server_of(worker)
    if not weight:
        vector = torch.zeros_like(vector)
    draws, at, payloads, own = _draws(state, replica), 0, [], []
    for part in parts_of(vector, server.shards):
        hints = Hints(draws, _matrices_in(codec, state.guess, replica.layout, at, at + len(part)))
        payloads.append(codec.encode(part, hints))
        own.append(codec.decode(payloads[-1], len(part), part.dtype))
        at += len(part)
    state.sent += weight > 0
    return Encoded(tuple(payloads), len(vector), vector.dtype), torch.cat(own).to(vector.device)


# -- residuals ---------------------------------------------------------------------------------------------------------


def _with_residual(state: CompressedState, vector: Tensor) -> Tensor:
    return vector.clone() if state.residual is None else vector + state.residual


def _remember(
    codec: Codec,
    state: CompressedState,
    whole: Tensor,
    own: Tensor | None,
    layout: Layout,
    grad_mask: int,
    weight: float = 1.0,
) -> None:
    """Unsent parts of the `grad_mask` parameters wait, all without weight; non-finite values leave no trace."""
    if state.residual is None or own is None:
        return
    left = (whole if weight else state.residual) - _without(layout, own, grad_mask)
    if not FlatVector([left]).is_finite():
        return
    state.residual.copy_(left)
    if isinstance(codec, Threshold):
        codec.clip_(state.residual)


def _copy_of_guess(state: CompressedState) -> Tensor | None:
    """What a codec may overwrite before it is known that all ranks have the result: theirs must be the same."""
    return None if state.guess is None else state.guess.clone()


def _keep_guess(state: CompressedState, guess: Tensor | None) -> None:
    if state.guess is not None and guess is not None:
        state.guess.copy_(guess)


def _nothing() -> None:
    """Nothing was left out."""


def _without(layout: Layout, vector: Tensor, grad_mask: int) -> Tensor:
    """`vector` [D'], 0 in the padding and where no bit says that a parameter got a gradient."""
    ends = [*layout.offsets[1:], layout.padded]
    for number, start, size, end in zip(layout.numbers, layout.offsets, layout.sizes, ends, strict=True):
        begin = start + size if grad_mask >> number & 1 else start
        if begin < end:
            vector[begin:end].zero_()
    return vector


def _everything(layout: Layout) -> int:
    """A bit for each parameter."""
    return (1 << len(layout.names)) - 1


def clear_padding(options: CompressOptions, replica: Replica, vector: FlatVector) -> None:
    """0 where `vector`, a center, has no parameter."""
    codec = codec_of(options.compress)
    if codec is not None and not codec.keeps_zeros:
        for shard, part in zip(replica.shards, vector.parts, strict=True):
            _without(shard.layout, part, _everything(replica.layout))


# -- hints -------------------------------------------------------------------------------------------------------------


def _draws(state: CompressedState, replica: Replica) -> torch.Generator:
    """A generator of this sending's own."""
    return replica.generator(state.seed, state.sent)


def _matrices(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(start, rows, columns) of parameters of two or more dimensions; the outermost dimension is the rows."""
    for offset, shape, stride in zip(layout.offsets, layout.shapes, layout.strides, strict=True):
        if len(shape) > 1 and shape.numel():
            rows = max(zip(stride, shape, strict=True))[1]
            yield offset, rows, shape.numel() // rows


def _matrices_in(codec: Codec, of: Tensor | None, layout: Layout, low: int, high: int) -> list[Matrix]:
    """What lies in [low, high) of the vector, with the guesses `of` all: of a matrix that is cut, its whole rows."""
    if not isinstance(codec, PowerSGD) or of is None:
        return []
    found, used = [], 0
    for start, rows, columns in _matrices(layout):
        guess = of[0, used : used + columns * codec.rank].view(columns, codec.rank)
        used += columns * codec.rank
        first, last = max(0, -(-(low - start) // columns)), min(rows, (high - start) // columns)
        if first < last:
            found.append(Matrix(start + first * columns - low, last - first, columns, guess))
    return found
