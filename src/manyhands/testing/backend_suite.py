"""The conformance suite of torch.distributed backends: what a program may expect of a process group, whoever made it.

Run every check of `BACKEND_SUITE` on every rank of a process group, in the same order:

    for name, check in BACKEND_SUITE.items():
        check(group)                      # dist.group.WORLD, or what dist.new_group gave

A check raises CheckFailed. Inputs come from seeds, so each rank knows all inputs and verifies its own results. gloo passes
it, and so does `manyhands`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.testing.group_suite import checks_of, expect

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
REDUCED: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.sum,
    "PRODUCT": torch.prod,
    "MIN": torch.amin,
    "MAX": torch.amax,
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor.clone(),
    "transposed": lambda tensor: tensor.t().contiguous().t(),
}
"""[rows, columns] -> the same numbers in another layout. gloo takes none with gaps: it would reduce what lies in them."""
Group = Any


def rank_of(group: Group) -> int:
    return dist.get_rank(group)


def global_rank(group: Group, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def numbers(rank: int, dtype: torch.dtype = torch.float32, rows: int = 3, columns: int = 4) -> Tensor:
    """[rows, columns] of `rank`, the same wherever it is computed; small enough for a product of int8."""
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.rand(rows, columns, generator=generator) < 0.5
    if dtype.is_complex or dtype.is_floating_point:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(rows, columns, generator=generator, dtype=wide).to(dtype)
    return torch.randint(1, 3, (rows, columns), generator=generator).to(dtype)


def all_numbers(group: Group, dtype: torch.dtype = torch.float32, rows: int = 3) -> Tensor:
    """[size, rows, columns]"""
    return torch.stack([numbers(rank, dtype, rows) for rank in range(dist.get_world_size(group))])


def expect_close(got: Tensor, wanted: Tensor, what: str) -> None:
    off = float((got.to(torch.complex128) - wanted.to(torch.complex128)).abs().max()) if wanted.numel() else 0.0
    limit = TOLERANCE.get(wanted.dtype, 1e-5 if wanted.dtype.is_complex else 0.0) * 10
    expect(got.shape == wanted.shape and off <= limit, f"{what}: off by {off}, expected {wanted.tolist()}")


def finish(work: Any, asynchronous: bool, what: str) -> None:
    """What an operation gave: nothing, or a work that ends."""
    expect((work is not None) is asynchronous, f"{what} with async_op={asynchronous} gave {work}")
    if work is not None:
        work.wait()


def ways() -> Iterator[tuple[str, bool]]:
    return product(SHAPES, (False, True))


def check_all_reduce(group: Group) -> None:
    """Every reduction and dtype, in every layout, at once and asynchronously."""
    for dtype, (name, reduce) in product((*FLOATS, *INTEGERS), REDUCED.items()):
        parts = all_numbers(group, dtype).to(torch.float64 if dtype.is_floating_point else torch.int64)
        wanted = reduce(parts, 0).to(dtype)
        for shape, asynchronous in ways():
            what = f"all_reduce {name} of {dtype}, {shape}"
            tensor = SHAPES[shape](numbers(rank_of(group), dtype))
            work = dist.all_reduce(tensor, getattr(dist.ReduceOp, name), group=group, async_op=asynchronous)
            finish(work, asynchronous, what)
            expect_close(tensor, wanted, what)


def check_all_reduce_of_complex_numbers(group: Group) -> None:
    for dtype in (torch.complex64, torch.complex128):
        tensor = numbers(rank_of(group), dtype)
        dist.all_reduce(tensor, group=group)
        expect_close(tensor, all_numbers(group, dtype).sum(0), f"all_reduce of {dtype}")


def check_bitwise_reductions(group: Group) -> None:
    for name, of_two in (("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or), ("BXOR", torch.bitwise_xor)):
        parts = list(all_numbers(group, torch.int32))
        wanted = parts[0]
        for part in parts[1:]:
            wanted = of_two(wanted, part)
        tensor = numbers(rank_of(group), torch.int32)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name), group=group)
        expect_close(tensor, wanted, f"all_reduce {name}")


def check_all_reduce_has_the_same_bits_everywhere(group: Group) -> None:
    """Of sizes around the limits of algorithms."""
    for n in (0, 1, 7, 1000, 300_001):
        tensor = torch.randn(n, generator=torch.Generator().manual_seed(rank_of(group)))
        dist.all_reduce(tensor, group=group)
        rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, tensor, group=group)
        expect(all(torch.equal(row, tensor) for row in rows), f"all_reduce of {n} numbers has different bits")


def check_gradients_need_no_care(group: Group) -> None:
    """A leaf that requires grad is reduced in place, within no_grad and without."""
    tensor = numbers(rank_of(group)).requires_grad_()
    with torch.no_grad():
        dist.all_reduce(tensor, group=group)
    expect_close(tensor.detach(), all_numbers(group).sum(0), "all_reduce of a leaf")
    expect(tensor.requires_grad, "all_reduce took requires_grad away")


def check_broadcast(group: Group) -> None:
    for dtype, source in product((*FLOATS, *INTEGERS, torch.bool, torch.complex64), range(dist.get_world_size(group))):
        for shape, asynchronous in ways():
            tensor, what = SHAPES[shape](numbers(rank_of(group), dtype)), f"broadcast of {dtype} from {source}, {shape}"
            finish(dist.broadcast(tensor, global_rank(group, source), group, asynchronous), asynchronous, what)
            expect(torch.equal(tensor, numbers(source, dtype)), what)


def check_all_gather(group: Group) -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        for shape, asynchronous in ways():
            tensor, what = SHAPES[shape](numbers(rank_of(group), dtype)), f"all_gather of {dtype}, {shape}"
            rows = [torch.zeros_like(numbers(0, dtype)) for _ in range(dist.get_world_size(group))]
            finish(dist.all_gather(rows, tensor, group, asynchronous), asynchronous, what)
            expect(torch.equal(torch.stack(rows), all_numbers(group, dtype)), what)


def check_all_gather_into_one_tensor(group: Group) -> None:
    """Concatenated along the first dimension."""
    for asynchronous in (False, True):
        wanted = all_numbers(group).flatten(0, 1)
        output = torch.zeros_like(wanted)
        work = _all_gather_single()(output, numbers(rank_of(group)), group, asynchronous)
        finish(work, asynchronous, "all_gather_single")
        expect(torch.equal(output, wanted), "all_gather_single")


def check_reduce_scatter(group: Group) -> None:
    """A list, and one tensor; each rank gets its part of the sum."""
    size, rank = dist.get_world_size(group), rank_of(group)
    total = all_numbers(group, rows=2 * size).sum(0)
    wanted = total[2 * rank : 2 * rank + 2]
    for asynchronous in (False, True):
        output, mine = torch.zeros(2, 4), numbers(rank, rows=2 * size)
        work = dist.reduce_scatter(output, list(mine.split(2)), group=group, async_op=asynchronous)
        finish(work, asynchronous, "reduce_scatter")
        expect_close(output, wanted, "reduce_scatter")
        output.zero_()
        work = _reduce_scatter_single()(output, mine, group=group, async_op=asynchronous)
        finish(work, asynchronous, "reduce_scatter_single")
        expect_close(output, wanted, "reduce_scatter_single")


def check_reduce_gather_scatter(group: Group) -> None:
    """To one rank, and from one."""
    size, rank = dist.get_world_size(group), rank_of(group)
    for root in range(size):
        there = global_rank(group, root)
        tensor = numbers(rank)
        dist.reduce(tensor, there, group=group)
        rows = [torch.zeros(3, 4) for _ in range(size)] if rank == root else None
        dist.gather(numbers(rank), rows, there, group=group)
        if rows is not None:
            expect_close(tensor, all_numbers(group).sum(0), "reduce")
            expect(torch.equal(torch.stack(rows), all_numbers(group)), "gather")
        output = torch.zeros(3, 4)
        dist.scatter(output, list(all_numbers(group)) if rank == root else None, there, group=group)
        expect(torch.equal(output, numbers(rank)), "scatter")


def check_all_to_all(group: Group) -> None:
    size, rank = dist.get_world_size(group), rank_of(group)
    output = torch.zeros(size, 4)
    dist.all_to_all_single(output, numbers(rank, rows=size), group=group)
    wanted = torch.stack([numbers(other, rows=size)[rank] for other in range(size)])
    expect(torch.equal(output, wanted), "all_to_all_single")


def check_send_and_receive(group: Group) -> None:
    """In a circle, of any size, by tag, and of whoever sends."""
    size, rank = dist.get_world_size(group), rank_of(group)
    if size == 1:
        return
    right, left = global_rank(group, (rank + 1) % size), global_rank(group, (rank - 1) % size)
    for rows in (1, 100_000):
        mine, came = numbers(rank, rows=rows), torch.zeros(rows, 4)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, right, group), dist.P2POp(dist.irecv, came, left, group)]
        ):
            work.wait()
        expect(torch.equal(came, numbers((rank - 1) % size, rows=rows)), f"a circle of {rows} rows")
    if rank == 0:
        sent = [dist.isend(torch.tensor([float(tag)]), global_rank(group, 1), group, tag) for tag in (7, 8)]
        for one in sent:
            assert one is not None
            one.wait()
        dist.send(torch.tensor([9.0]), global_rank(group, 1), group)
    elif rank == 1:
        first, second, last = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        dist.recv(second, global_rank(group, 0), group, 8)
        dist.recv(first, global_rank(group, 0), group, 7)
        source = dist.recv(last, None, group)
        found = (float(first), float(second), float(last), source)
        expect(found == (7.0, 8.0, 9.0, global_rank(group, 0)), f"messages by tag: {found}")


def check_objects(group: Group) -> None:
    size, rank = dist.get_world_size(group), rank_of(group)
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank}, group)
    expect(found == [{"rank": other, "text": "x" * other} for other in range(size)], f"all_gather_object: {found}")
    last = size - 1
    given = [rank, "first"]
    dist.broadcast_object_list(given, global_rank(group, last), group)
    expect(given == [last, "first"], f"broadcast_object_list: {given}")


def check_barrier(group: Group) -> None:
    dist.barrier(group)
    work = dist.barrier(group, async_op=True)
    finish(work, True, "barrier")


def check_what_a_work_holds(group: Group) -> None:
    """Its future has the tensors, and what is added to it is done."""
    tensor = numbers(rank_of(group))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    expect_close(future.wait(), 2 * all_numbers(group).sum(0), "what was added to a work's future")


def _all_gather_single() -> Any:
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _reduce_scatter_single() -> Any:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


BACKEND_SUITE = checks_of(globals())
"""{name: check}"""
