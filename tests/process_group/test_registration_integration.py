"""How programs come by the backend: by its name, in gloo's place, with `manyhands run`, over several hosts."""

import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import forked, values

import manyhands_backend
from manyhands.errors import BadInput
from manyhands.process_group import group as group_module
from manyhands.transport.credentials import Credentials

SOURCE = Path(__file__).resolve().parents[2] / "src"


def run(folder: Path, text: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program that knows nothing of this library."""
    (folder / "program.py").write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, *words, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done


PROGRAM = """
    import torch, torch.distributed as dist
    for arguments, options in {asked}:
        dist.init_process_group(*arguments, **options, store=dist.HashStore(), rank=0, world_size=1)
        part, named = dist.new_group(), dist.new_group(backend="gloo")
        print(dist.get_backend(), dist.get_backend(part), dist.get_backend(named), type(dist.group.WORLD).__name__)
        dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torch_finds_it_without_an_import_and_it_takes_the_place_of_gloo_where_the_variable_says_so(
    tmp_path: Path,
) -> None:
    (found,) = entry_points(group="torch.backends", name="manyhands")
    assert found.value == "manyhands_backend:register"
    asked = [(["manyhands"], {}), (["gloo"], {}), ([], {"backend": "gloo"}), ([], {}), (["cpu:gloo,cuda:nccl"], {})]
    done = run(tmp_path, PROGRAM.format(asked=asked), MANYHANDS_BACKEND="replace")
    assert done.stdout.split() == ["manyhands", "manyhands", "manyhands", "ManyhandsProcessGroup"] * 5, done.stderr


def test_it_never_keeps_torch_from_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise TypeError("another version's argument")

    monkeypatch.delattr(dist.Backend, "MANYHANDS", raising=False)
    monkeypatch.setattr(dist.Backend, "register_backend", broken)
    with pytest.warns(UserWarning, match="is not there: another version's argument"):
        manyhands_backend.register()


DDP = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    print(dist.get_rank(), dist.get_backend(), model.module.weight.grad.tolist())
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_for_torchrun_runs_with_manyhands_run(tmp_path: Path) -> None:
    done = run(tmp_path, DDP, "-m", "manyhands", "run", "--auto", "-n", "2")
    assert "program.py is run as distributed" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 manyhands [[0.5, 0.5]]", "1 manyhands [[0.5, 0.5]]"]


# -- several hosts -----------------------------------------------------------------------------------------------------


def _on_hosts(size: int, program: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each rank takes itself for a host of its own."""
    manyhands_backend.register()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int) -> Any:
        group_module.host_identity = lambda: f"host {rank}"  # type: ignore[assignment]
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        dist.init_process_group("manyhands", store=own, rank=rank, world_size=size)
        try:
            return program()
        finally:
            dist.destroy_process_group()

    return forked(size, start, 60)


def _reduced() -> list[float]:
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    with pytest.raises(BadInput, match="neither authenticated nor encrypted.*MANYHANDS_PLAIN_NETWORK=on"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX)
    return tensor.tolist()


def test_hosts_are_linked_with_the_runs_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Credentials.create().save(tmp_path / "run.pem")
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    assert values(_on_hosts(2, _reduced, monkeypatch)) == [[1.0] * 3] * 2


def test_hosts_without_credentials_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    for outcome in _on_hosts(2, _reduced, monkeypatch):
        assert isinstance(outcome.error, BadInput), outcome.text
        assert "MANYHANDS_CREDENTIALS is not set there" in str(outcome.error)
