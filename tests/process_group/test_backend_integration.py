"""The backend `manyhands` and gloo pass the same suite; and what programs that use torch.distributed get of it."""

import importlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Outcome, forked, values
from torch import Tensor, nn

import manyhands_backend
from manyhands.errors import PeerLost
from manyhands.testing.backend_suite import BACKEND_SUITE, all_numbers, numbers

BACKENDS = ["gloo", "manyhands"]


def on_backend(
    name: str, size: int, program: Callable[[], Any], folder: Path, *, deadline_s: float = 60
) -> list[Outcome]:
    """What `program` gives in `size` processes, in each of which this is the default process group."""
    store = str(folder / f"store-{time.monotonic_ns()}")
    manyhands_backend.register()

    def run(rank: int) -> Any:
        warnings.simplefilter("ignore")
        dist.init_process_group(name, store=dist.FileStore(store, size), rank=rank, world_size=size)
        assert dist.get_backend() == name
        try:
            return program()
        finally:
            dist.destroy_process_group()

    return forked(size, run, deadline_s)


def conformance(group: Any) -> int:
    for check in BACKEND_SUITE.values():
        check(group)
    return len(BACKEND_SUITE)


def _in_a_part() -> int | None:
    group = dist.new_group([0, 2])
    return None if dist.get_rank() == 1 else conformance(group)


@pytest.mark.parametrize(
    ("name", "size"),
    [("manyhands", 1), ("manyhands", 3), *(pytest.param("gloo", n, marks=pytest.mark.slow) for n in (1, 3))],
)
def test_conformance(name: str, size: int, tmp_path: Path) -> None:
    """Of the whole group, and of a part of it."""
    passed = values(on_backend(name, size, lambda: conformance(dist.group.WORLD), tmp_path))
    assert passed == [len(BACKEND_SUITE)] * size
    if size == 3:
        passed = values(on_backend(name, size, _in_a_part, tmp_path))
        assert passed == [len(BACKEND_SUITE), None, len(BACKEND_SUITE)]


def _strided() -> list[list[float]]:
    """Tensors with gaps, which gloo does not take: in ours the gaps stay what they are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.stack([numbers(rank), torch.full((3, 4), 5.0)], dim=-1)
    dist.all_reduce(whole[..., 0])
    torch.testing.assert_close(whole[..., 0], all_numbers(dist.group.WORLD).sum(0))
    dist.all_reduce(whole[..., 0], dist.ReduceOp.AVG)
    dist.broadcast(whole[:, 1:3, 1], 1)
    assert bool((whole[..., 1] == 5).all())
    rows = [torch.zeros(4, 3).t() for _ in range(size)]
    dist.all_gather(rows, numbers(rank))
    assert torch.equal(torch.stack(rows), all_numbers(dist.group.WORLD))
    return [row.tolist() for row in rows]


def _whole_means() -> tuple[list[int], list[int]]:
    """Mean of -3 and -2, 5 and 6, 7 and 7; then the part of it that is this rank's, of two numbers each."""
    rank = dist.get_rank()
    whole = torch.tensor([-3 + rank, 5 + rank, 7])
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    part = torch.zeros(2, dtype=torch.int32)
    dist.reduce_scatter_tensor(part, torch.tensor([-3, 5, 6, 9], dtype=torch.int32) + rank, dist.ReduceOp.AVG)
    return whole.tolist(), part.tolist()


def _refused() -> list[str]:
    said = []
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        with pytest.raises(Exception, match="Invalid scalar type") as error:
            dist.all_reduce(torch.ones(3, dtype=dtype))
        said.append(type(error.value).__name__)
    return said


def test_what_gloo_cannot(tmp_path: Path) -> None:
    """Tensors with gaps are reduced where they lie. Means of whole numbers, for which Lightning asks every backend but gloo,
    are cut toward zero. What torch cannot add is refused on all ranks, and none waits for one that has raised already."""

    def program() -> list[Any]:
        return [_strided(), _whole_means(), _refused()]

    first, second = values(on_backend("manyhands", 2, program, tmp_path, deadline_s=30))
    assert first[0] == second[0]
    assert [first[1], second[1]] == [([-2, 5, 7], [-2, 5]), ([-2, 5, 7], [6, 9])]
    assert first[2] == second[2]


def _ended() -> list[str]:
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX)
    dist.destroy_process_group()
    left = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the harness to destroy
    return [name for name in left if "gloo" in name]


def test_a_destroyed_group_leaves_no_thread(tmp_path: Path) -> None:
    assert values(on_backend("manyhands", 2, _ended, tmp_path)) == [[], []]


# -- programs that were written for torch.distributed ------------------------------------------------------------------


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))


def batch(step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def flat(parameters: Any) -> Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def ddp() -> Tensor:
    model = nn.parallel.DistributedDataParallel(mlp())
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return flat(model.parameters())


def zero_redundancy() -> Tensor:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(mlp())
    trained(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))
    return flat(model.parameters())


def fully_sharded() -> Tensor:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    trained(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return flat(model.parameters())


def tensor_parallel() -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return flat(model.parameters())


def pipelined() -> Tensor:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(size)]
    stage = PipelineStage(parts[rank], rank, size, torch.device("cpu"))
    optimizer = torch.optim.SGD(parts[rank].parameters(), lr=0.1)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=x, losses=[])
        else:
            schedule.step()
        optimizer.step()
    return flat(parts[rank].parameters())


def checkpointed() -> Tensor:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    models = [fully_shard(mlp()), fully_shard(mlp())]
    trained(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1))
    where = os.environ["DCP"]
    dcp.save({"model": models[0].state_dict()}, checkpoint_id=where)
    state = {"model": models[1].state_dict()}
    dcp.load(state, checkpoint_id=where)
    models[1].load_state_dict(state["model"])
    assert torch.equal(flat(models[0].parameters()), flat(models[1].parameters()))
    return flat(models[1].parameters())


PROGRAMS = [ddp, zero_redundancy, fully_sharded, tensor_parallel, pipelined, checkpointed]


@pytest.mark.parametrize(("size", "programs"), [(2, [ddp]), pytest.param(3, PROGRAMS, marks=pytest.mark.slow)])
def test_programs_end_with_gloos_parameters(
    size: int, programs: list[Callable[[], Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit for two ranks. What programs import is imported before they fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("checkpoint", "fsdp", "optim", "pipelining", "tensor.parallel") if size == 3 else ():
            importlib.import_module(f"torch.distributed.{name}")
    found = {}
    for name in BACKENDS:
        monkeypatch.setenv("DCP", str(tmp_path / name))
        found[name] = values(on_backend(name, size, lambda: [program() for program in programs], tmp_path))
    limit = 0.0 if size == 2 else 1e-6
    for ours, theirs in zip(found["manyhands"], found["gloo"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)


# -- what goes through, and what is lost -------------------------------------------------------------------------------


def _through(calls: int) -> int:
    """Alternating with ours, and from two threads at once, as DDP's hooks and a script do."""
    ours, theirs = torch.ones(4), torch.ones(4, dtype=torch.complex64)
    for call in range(calls):
        dist.all_reduce(theirs)
        theirs.fill_(1)
        if call % 10 == 0:
            dist.all_reduce(ours, dist.ReduceOp.AVG)
    return int(ours.sum())


@pytest.mark.slow
def test_many_calls_that_go_through_do_not_hang(tmp_path: Path) -> None:
    assert values(on_backend("manyhands", 2, lambda: _through(4_000), tmp_path)) == [4, 4]


def _killed() -> PeerLost | None:
    tensor = torch.ones(1000)
    for _ in range(3):
        dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as error:
        dist.all_reduce(tensor)
    return error.value


def _killed_in_backward() -> PeerLost | None:
    model = nn.parallel.DistributedDataParallel(mlp())
    model(batch(0)).square().mean().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as error:
        model(batch(1)).square().mean().backward()
    return error.value


@pytest.mark.parametrize(("program", "size"), [(_killed, 3), (_killed_in_backward, 2)])
def test_a_killed_rank_is_named_by_all_others(
    program: Callable[[], PeerLost | None], size: int, tmp_path: Path
) -> None:
    for rank, outcome in enumerate(on_backend("manyhands", size, program, tmp_path)):
        if rank != 1:
            assert outcome.error is None, outcome.text
            assert outcome.value.rank == 1
