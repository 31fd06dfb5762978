"""The conformance suite of groups: the guarantees of `Group`, as checks for any implementation.

Run every check of `GROUP_SUITE` on every rank of a group, in the same order:

    for name, check in GROUP_SUITE.items():
        check(group)

A check raises CheckFailed. Inputs come from seeds, so each rank knows all inputs and verifies its own results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.checks import slice_of
from manyhands.comm.group import Group, MeanResult, Work
from manyhands.comm.reducing import naive_mean
from manyhands.errors import BadInput, ManyhandsError

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LARGE = {(2, torch.bfloat16): [2_200_000]}
"""Elements of further 16-bit means, by group size and dtype: around the limit between swapping and a ring."""


class CheckFailed(ManyhandsError):
    """An implementation violates its contract."""


def expect(condition: bool, message: str) -> None:
    """Raise CheckFailed unless `condition` holds."""
    if not condition:
        raise CheckFailed(message)


def checks_of(module: Mapping[str, Any], prefix: str = "check_") -> dict[str, Any]:
    """{name: check_name} of a module's globals(), in the order in which they are written."""
    return {name.removeprefix(prefix): check for name, check in module.items() if name.startswith(prefix)}


def vector(rank: int, n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """[n] the input of `rank`, the same wherever it is computed."""
    return _drawn(rank, n, dtype, seed).clone()


@lru_cache(maxsize=8)  # checks ask for the same ones again and again, and to draw takes ten times as long as to copy
def _drawn(rank: int, n: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 20, (n,), generator=generator).to(dtype)


def vectors(group: Group, n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """The inputs of all ranks, in rank order."""
    return [vector(rank, n, dtype, seed) for rank in range(group.size)]


def allocated(group: Group, values: Tensor) -> Tensor:
    """A copy of `values` in memory of the group."""
    tensor = group.allocate(values.numel(), values.dtype)
    tensor.copy_(values)
    return tensor


def expect_close(got: Tensor, wanted: Tensor, what: str) -> None:
    """Expect equal numbers, within the rounding of the dtype."""
    error = float((got.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
    scale = max(1.0, float(wanted.double().abs().max())) if wanted.numel() else 1.0
    limit = TOLERANCE.get(wanted.dtype, 0.0) * scale
    expect(error <= limit, f"{what}: off by {error} where {limit} is allowed")


def expect_same_everywhere(group: Group, tensor: Tensor, what: str) -> None:
    """Expect the same bits on all ranks."""
    rows = group.all_gather(tensor).cpu().reshape(group.size, -1)
    first = rows[0].contiguous().view(torch.uint8)
    for rank, row in enumerate(rows):
        same = torch.equal(row.contiguous().view(torch.uint8), first)
        expect(same, f"{what}: rank {rank} holds other bits than rank 0")


def expect_refused(action: Callable[[], object], what: str) -> None:
    try:
        action()
    except BadInput:
        return
    raise CheckFailed(f"{what}: expected BadInput, nothing was raised")


def _check_mean(group: Group, tensor: Tensor, values: Sequence[Tensor], weights: Sequence[float], what: str) -> None:
    total = group.mean_(tensor, weights[group.rank])
    expect(math.isclose(total.weight, sum(weights)), f"{what}: total {total.weight}, expected {sum(weights)}")
    wanted = values[0] if group.size == 1 else naive_mean([v.double() for v in values], weights).to(tensor.dtype)
    expect_close(tensor.reshape(-1).cpu(), wanted, what)
    expect_same_everywhere(group, tensor, what)


def check_place(group: Group) -> None:
    """rank is in range(size), and all ranks are different."""
    expect(0 <= group.rank < group.size, f"rank {group.rank} is not in range({group.size})")
    ranks = group.all_gather(torch.tensor([group.rank])).reshape(-1).tolist()
    expect(ranks == list(range(group.size)), f"the ranks are {ranks}")


def check_allocate(group: Group) -> None:
    """Allocated memory is zero, the rank's own, and aligned like torch's own."""
    for n, dtype in ((0, torch.float32), (1, torch.bfloat16), (1000, torch.float64), (7, torch.float32)):
        tensor = group.allocate(n, dtype)
        right = tensor.shape == (n,) and tensor.dtype == dtype
        expect(right, f"expected {n} {dtype}, got {tensor.shape} {tensor.dtype}")
        expect(not tensor.any(), "allocated memory is not zero")
        expect(tensor.data_ptr() % 64 == 0, "allocated memory is not aligned to 64 bytes")
    tensor.fill_(group.rank)
    group.barrier()
    expect(bool((tensor == group.rank).all()), "allocated memory is shared with another rank's")
    group.barrier()


def check_mean_sizes(group: Group) -> None:
    """Any n: fewer than ranks, not divisible by them, none, many; allocated or not."""
    weights = [1.0 + rank for rank in range(group.size)]
    for n in (0, 1, 2, 3, 7, 64, 65, 1000, 4099, 300_001):
        values = vectors(group, n, seed=n)
        _check_mean(group, allocated(group, values[group.rank]), values, weights, f"mean of {n} allocated")
        _check_mean(group, values[group.rank].clone(), values, weights, f"mean of {n} from elsewhere")


def check_mean_dtypes(group: Group) -> None:
    """Every floating dtype, with uneven weights."""
    weights = [0.5 + 3 * rank for rank in range(group.size)]
    for dtype in FLOATS:
        values = vectors(group, 777, dtype)
        _check_mean(group, allocated(group, values[group.rank]), values, weights, f"mean of allocated {dtype}")
        _check_mean(group, values[group.rank].clone(), values, weights, f"mean of {dtype} from elsewhere")


def check_mean_shapes(group: Group) -> None:
    """Slices of allocated memory, matrices, scalars, transposed and strided tensors, leaves that require grad."""
    weights = [2.0 + rank for rank in range(group.size)]
    values, mine = vectors(group, 600), vector(group.rank, 600)
    base = allocated(group, torch.cat([mine, mine, mine]))
    _check_mean(group, base[600:1200], values, weights, "a slice of allocated memory")
    untouched = torch.equal(base[:600].cpu(), mine) and torch.equal(base[1200:].cpu(), mine)
    expect(untouched, "a mean of a slice touched its neighbours")
    _check_mean(group, mine.clone().view(20, 30), values, weights, "a matrix")
    transposed = mine.clone().view(20, 30).t().contiguous().t()
    _check_mean(group, transposed, values, weights, "a transposed matrix")
    strided = torch.zeros(1200, dtype=torch.float64)
    strided[::2] = mine
    _check_mean(group, strided[::2], values, weights, "every second element")
    expect(not strided[1::2].any(), "a mean of every second element touched the others")
    parameter = torch.nn.Parameter(mine.clone())
    _check_mean(group, parameter.detach(), values, weights, "a parameter's data")
    group.mean_(parameter)
    expect(parameter.requires_grad and parameter.grad_fn is None, "a mean of a parameter was recorded by autograd")
    _check_mean(group, mine[0].clone(), [v[:1] for v in values], weights, "a scalar")


def check_mean_mixed(group: Group) -> None:
    """Tensors of the group's memory on some ranks and not on others, and at different offsets."""
    values, weights = vectors(group, 200_003), [1.0] * group.size
    base = group.allocate(400_006, torch.float64)
    mine = base[:200_003] if group.rank % 2 == 0 else values[group.rank].clone()
    mine.copy_(values[group.rank])
    _check_mean(group, mine, values, weights, "allocated on even ranks only")
    start = group.rank * 3
    mine = base[start : start + 200_003]
    mine.copy_(values[group.rank])
    _check_mean(group, mine, values, weights, "at different places")


def check_weight_zero(group: Group) -> None:
    """A rank of weight 0 gets the others' mean; its own values do not count, including NaN and infinity."""
    for silent in range(group.size if group.size > 1 else 0):
        weights = [0.0 if rank == silent else 1.5 + rank for rank in range(group.size)]
        for place in (allocated, lambda group, values: values.clone()):
            values = vectors(group, 1001)
            mine = values[group.rank]
            if group.rank == silent:
                mine = torch.full_like(mine, math.nan)
                mine[::2] = math.inf
            _check_mean(group, place(group, mine), values, weights, f"with weight 0 on rank {silent}")


def check_total_zero(group: Group) -> None:
    """If all weights are 0, tensors keep their bits; control bits are still exchanged."""
    mine = vector(group.rank, 500)
    mine[3] = math.nan
    for tensor in (allocated(group, mine), mine.clone(), mine.clone().float(), mine.clone().bfloat16()):
        before = tensor.clone()
        total = group.mean_(tensor, 0.0, 1 << group.rank)
        expect(total == MeanResult(0.0, (1 << group.size) - 1), f"total weight 0 gave {total}")
        expect(torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)), "total weight 0 changed a tensor")


def check_nan_is_seen_by_all(group: Group) -> None:
    """A NaN of a rank whose weight is not 0 reaches all ranks."""
    tensor = allocated(group, vector(group.rank, 300))
    if group.rank == group.size - 1:
        tensor[17] = math.nan
    group.mean_(tensor)
    expect(bool(tensor[17].isnan()) and int(tensor.isnan().sum()) == 1, "a NaN did not reach every rank")


def check_one_rank_multiplies_nothing(group: Group) -> None:
    """With one rank the tensor keeps its bits, whatever the weight."""
    if group.size == 1:
        tensor = vector(0, 100, torch.float32)
        total = group.mean_(tensor, 0.1, 5)
        unchanged = torch.equal(tensor, vector(0, 100, torch.float32)) and total == MeanResult(0.1, 5)
        expect(unchanged, "one rank changed its tensor")


def check_bits(group: Group) -> None:
    """The OR of control bits of any length, with any n; weights are summed in float64."""
    tensor = allocated(group, torch.ones(10, dtype=torch.float64))
    for length in (0, 1, 63, 64, 65, 900, 5000, 100_000, 10_000_000):
        mine = (1 << length | 1 << group.rank) if length else 0
        wanted = (1 << length | (1 << group.size) - 1) if length else 0
        total = group.mean_(tensor if length % 2 else tensor[:0], 1 / 3, mine)
        expect(total.bits == wanted, f"the OR of {length} bits is wrong")
    expect(group.mean_(tensor, bits=7 if group.rank == 0 else 0).bits == 7, "bits of one rank only got lost")
    weight = group.mean_(tensor, 1e-9 if group.rank else 1e9).weight
    right = math.isclose(weight, 1e9 + (group.size - 1) * 1e-9, rel_tol=1e-15)
    expect(right, f"weights are not summed in float64: {weight}")


def check_lost(group: Group) -> None:
    """`lost` holds the rounding error of a 16-bit mean, over all ranks: together they are exact in the wider dtype."""
    for dtype, wide in ((torch.bfloat16, torch.float64), (torch.float16, torch.float32)):
        for n in (0, 5, 10_001, *LARGE.get((group.size, dtype), ())):
            weights = [0.0 if rank == 1 else 1.0 + rank for rank in range(group.size)]
            tensor, lost = vector(group.rank, n, dtype), torch.full((n,), math.nan, dtype=wide)
            given = [one.to(wide) for one in vectors(group, n, dtype)]
            if not weights[group.rank]:
                tensor.fill_(math.nan)
            group.mean_(tensor, weights[group.rank], lost=lost)
            expect_same_everywhere(group, tensor, "a mean with `lost`")
            group.all_reduce_(lost)
            wanted = given[0] if group.size == 1 else naive_mean(given, weights)
            expect_close(tensor.to(wide) + lost, wanted, f"a mean of {n} {dtype} with its rounding error")
    one = torch.ones(3)
    expect_refused(lambda: group.mean_(one, lost=torch.ones(3)), "lost of a mean that is not of 16-bit numbers")


def check_handles(group: Group) -> None:
    """Many means in flight at once, waited for in order, with other operations before and between."""
    for count, n in ((3, 50_000), (40, 1000), (150, 16)):
        tensors = [allocated(group, vector(group.rank, n, seed=i)) for i in range(count)]
        handles: list[Work] = [group.start_mean_(tensor, 1.0 + group.rank, 1 << i) for i, tensor in enumerate(tensors)]
        totals = [handle.wait() for handle in handles]
        weights = [1.0 + rank for rank in range(group.size)]
        for i, (tensor, total) in enumerate(zip(tensors, totals, strict=True)):
            expect(total.bits == 1 << i, f"handle {i} of {count} has another one's bits")
            wanted = vector(0, n, seed=i) if group.size == 1 else naive_mean(vectors(group, n, seed=i), weights)
            expect_close(tensor.cpu(), wanted, f"handle {i} of {count}")
    first = group.start_mean_(values := vector(group.rank, 99))
    gathered = group.all_gather(torch.tensor([group.rank]))
    expect(first.wait() == first.wait(), "waiting twice gave two answers")
    expect(gathered.shape == (group.size, 1), "an operation between start and wait went wrong")
    expect_same_everywhere(group, values, "a mean with another operation before its wait")


def check_sums(group: Group) -> None:
    """all_reduce_ adds, for floats and integers, the same bits everywhere."""
    for dtype in (*FLOATS, *INTEGERS):
        for n in (0, 1, 5, 10_001):
            values = vectors(group, n, dtype)
            wanted = torch.stack([v.double() for v in values]).sum(0).to(dtype)
            for tensor in (allocated(group, values[group.rank]), values[group.rank].clone()):
                group.all_reduce_(tensor)
                expect_close(tensor.cpu(), wanted, f"sum of {n} {dtype}")
                expect_same_everywhere(group, tensor, f"sum of {n} {dtype}")


def check_gather(group: Group) -> None:
    """all_gather returns every rank's tensor, of any dtype and shape, in rank order."""
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for n in (0, 1, 6, 150_000):
            values = [v.to(dtype) for v in vectors(group, n, torch.uint8)]
            for tensor in (allocated(group, values[group.rank]), values[group.rank].clone()):
                rows = group.all_gather(tensor)
                expect(torch.equal(rows.cpu(), torch.stack(values)), f"all_gather of {n} {dtype}")
    mine = vector(group.rank, 6).view(2, 3)
    rows = group.all_gather(mine.t())
    right = rows.shape == (group.size, 3, 2) and torch.equal(rows[group.rank].cpu(), mine.t())
    expect(right, "all_gather of a transposed matrix")
    rows.zero_()
    expect(bool(mine.any()), "what all_gather gave shares memory with the tensor")


def check_reduce_scatter(group: Group) -> None:
    """reduce_scatter returns the slice [r·n//size, (r+1)·n//size) of the sum on rank r, and changes no tensor."""
    for n in (0, 1, 3, 7, 1000, 300_001):
        for dtype in (torch.float64, torch.bfloat16, torch.int32):
            values = vectors(group, n, dtype)
            low, high = slice_of(group.rank, group.size, n)
            wanted = torch.stack([v.double() for v in values]).sum(0).to(dtype)[low:high]
            for tensor in (allocated(group, values[group.rank]), values[group.rank].clone()):
                expect_close(group.reduce_scatter(tensor).cpu(), wanted, f"reduce_scatter of {n} {dtype}")
                expect(torch.equal(tensor.cpu(), values[group.rank]), "reduce_scatter changed its input")


def check_broadcast(group: Group) -> None:
    """broadcast_ gives every rank the source's tensor, of any dtype, shape and layout."""
    for source in range(group.size):
        for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
            for n in (0, 1, 6, 300_000):
                values = [v.to(dtype) for v in vectors(group, n, torch.uint8, seed=source)]
                for tensor in (allocated(group, values[group.rank]), values[group.rank].clone()):
                    group.broadcast_(tensor, source)
                    expect(torch.equal(tensor.cpu(), values[source]), f"broadcast_ of {n} {dtype} from {source}")
        matrix = vector(group.rank, 6).view(2, 3).t()
        group.broadcast_(matrix, source)
        expect(torch.equal(matrix, vector(source, 6).view(2, 3).t()), "broadcast_ of a transposed matrix")
        counter = torch.tensor(group.rank)
        group.broadcast_(counter, source)
        expect(int(counter) == source, "broadcast_ of a scalar")


def check_point_to_point(group: Group) -> None:
    """send and receive_ between any pairs, in both directions, of any size."""
    for n in (0, 1, 1000, 700_000):
        for low in range(group.size):
            for high in range(low + 1, group.size):
                if group.rank == low:
                    group.send(vector(low, n), high)
                    _expect_received(group, high, n)
                elif group.rank == high:
                    _expect_received(group, low, n)
                    group.send(vector(high, n).view(-1), low)
    if group.size > 1:  # round the ring, in an order that cannot block
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        if group.rank == 0:
            group.send(vector(0, 1000), right)
            _expect_received(group, left, 1000)
        else:
            _expect_received(group, left, 1000)
            group.send(vector(group.rank, 1000), right)


def _expect_received(group: Group, source: int, n: int) -> None:
    tensor = torch.zeros(2 * n, dtype=torch.float64)[::2] if n % 3 else torch.zeros(n, dtype=torch.float64)
    group.receive_(tensor, source)
    expect(torch.equal(tensor, vector(source, n)), f"{n} elements from {source} arrived changed")


def check_swap(group: Group) -> None:
    """swap in pairs, in circles of both directions, in disjoint circles, and in a line, of any size.

    The ledger of a sender has the bytes that it sends.
    """
    rank, size = group.rank, group.size
    before = group.ledger.as_dict().get("send", {"bytes": 0})["bytes"]
    sent = 0
    for n in (0, 1, 1000, 700_000):
        partner = rank ^ 1
        if partner < size:
            _expect_swapped(group, partner, partner, n)
            sent += n
        for step in range(1, size):
            _expect_swapped(group, (rank + step) % size, (rank - step) % size, n)
            sent += n
        if rank == 0 and size > 1:
            group.send(vector(0, n), 1)
        elif rank == size - 1 and size > 1:
            _expect_received(group, rank - 1, n)
        elif size > 1:
            _expect_swapped(group, rank + 1, rank - 1, n)
        sent += n * (rank < size - 1)
    after = group.ledger.as_dict().get("send", {"bytes": 0})["bytes"]
    expect(after - before == 8 * sent, f"swaps sent {after - before} bytes by the ledger, expected {8 * sent}")


def _expect_swapped(group: Group, target: int, source: int, n: int) -> None:
    into = torch.zeros(2 * n, dtype=torch.float64)[::2] if n % 3 else torch.zeros(n, dtype=torch.float64)
    own = vector(group.rank, n)
    group.swap(own, target, into, source)
    what = f"a swap of {n} elements with {target} and {source}"
    expect(torch.equal(into, vector(source, n)), f"{what}: received other numbers")
    expect(torch.equal(own, vector(group.rank, n)), f"{what} changed what was sent")


def check_json(group: Group) -> None:
    """all_gather_json returns JSON of any length in rank order."""
    wanted = [{"rank": rank, "text": "é" * (rank * 700_000), "list": [1.5, None, True]} for rank in range(group.size)]
    expect(group.all_gather_json(wanted[group.rank]) == wanted, "all_gather_json of up to megabytes")
    expect(group.all_gather_json(group.rank) == list(range(group.size)), "all_gather_json of numbers")
    expect(group.all_gather_json("")[-1] == "", "all_gather_json of nothing")


def check_barrier(group: Group) -> None:
    """barrier returns, and time in it counts as waiting."""
    before = group.waited_s
    for _ in range(20):
        group.barrier()
    expect(group.waited_s >= before, "waited_s went down")


def check_ledger(group: Group) -> None:
    """The ledgers of all ranks have 2·(size-1)·n elements for a mean, (size-1)·n for a broadcast. (CASE 8)"""
    before = {name: dict(counts) for name, counts in group.ledger.as_dict().items()}
    n, size = 7, group.size
    group.mean_(allocated(group, torch.ones(n)), bits=3)
    group.all_reduce_(allocated(group, torch.ones(n)))
    group.broadcast_(torch.ones(n), 0)
    group.all_gather(torch.ones(n))
    if group.rank == 0 and size > 1:
        group.send(torch.ones(n), 1)
    elif group.rank == 1:
        group.receive_(torch.ones(n), 0)
    after = group.ledger.as_dict()
    mine = {name: after[name]["bytes"] - before.get(name, {"bytes": 0})["bytes"] for name in after}
    wanted = {"mean_": 2 * (size - 1), "all_reduce_": 2 * (size - 1), "broadcast_": size - 1, "send": min(1, size - 1)}
    wanted["all_gather"] = size * (size - 1)
    all_ranks = group.all_gather_json(mine)
    for name, count in wanted.items():
        moved, right = sum(row.get(name, 0) for row in all_ranks), count * n * 4
        expect(moved == right, f"{name} of {n} float32 on {size} ranks moved {moved} bytes, expected {right}")


def check_refusals(group: Group) -> None:
    """Wrong input raises BadInput before anything is sent, so the group stays usable."""
    tensor = torch.ones(3)
    expect_refused(lambda: group.mean_(tensor, -1.0), "a negative weight")
    expect_refused(lambda: group.mean_(tensor, math.nan), "a weight of NaN")
    expect_refused(lambda: group.mean_(tensor, math.inf), "an infinite weight")
    expect_refused(lambda: group.mean_(tensor, 1.0, -1), "negative bits")
    expect_refused(lambda: group.mean_(torch.ones(3, dtype=torch.int64)), "a mean of integers")
    expect_refused(lambda: group.all_reduce_(torch.ones(3, dtype=torch.bool)), "a sum of truth values")
    expect_refused(lambda: group.broadcast_(tensor, group.size), "a source outside the group")
    expect_refused(lambda: group.send(tensor, group.rank), "sending to oneself")
    expect_refused(lambda: group.receive_(tensor, group.rank), "receiving from oneself")
    expect_refused(lambda: group.swap(tensor, group.rank, torch.ones(3), group.rank), "swapping with oneself")
    if group.size > 1:
        peer = (group.rank + 1) % group.size
        expect_refused(lambda: group.swap(tensor, peer, torch.ones(2), peer), "swapping with another shape")
    expect_refused(lambda: group.all_gather_json(object()), "an object that is not JSON")
    group.mean_(tensor)
    expect_close(tensor, torch.ones(3), "the mean after refusals")


GROUP_SUITE: dict[str, Callable[[Group], None]] = checks_of(globals())
"""All checks by name, in the order in which they are written above."""
