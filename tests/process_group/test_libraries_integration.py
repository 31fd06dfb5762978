"""Libraries that train on torch.distributed (accelerate, which Hugging Face's Trainer is on, and Lightning) end with gloo's
parameters."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import MARK, MarkedProcess

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(480)]

SOURCE = Path(__file__).resolve().parents[2] / "src"
DEADLINE_S = 100.0
LAUNCHERS = {  # `{n}`: the ranks. Each takes a port that is free
    "torchrun": "torch.distributed.run --standalone --nproc-per-node {n}",
    "manyhands": "manyhands run --auto --threads-per-worker 1 -n {n}",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes {n} --main_process_port 0",
}

SAVED = """
    import os, sys
    import torch, torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_group

    def save(model, **found):
        group = type(_get_default_group()).__name__
        found |= dict(group=group, backend=dist.get_backend(), size=dist.get_world_size(), state=model.state_dict())
        torch.save(found, f"{sys.argv[1]}.{dist.get_rank()}")
        dist.destroy_process_group()
        if found["backend"] == "gloo":  # its threads may outlive the group, and abort the process where Python ends
            sys.stdout.flush()
            os._exit(0)
"""

ACCELERATE = """
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    if len(sys.argv) > 2:
        dist.init_process_group(sys.argv[2])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    x = torch.randn(46, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader, held_out = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=5)
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    numbers = []
    for epoch in range(2):
        model.train()
        for rows, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(rows), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            numbers.append(float(accelerator.reduce(loss.detach(), "mean")))
        model.eval()
        right = []
        for rows, labels in held_out:
            with torch.no_grad():
                guesses, labels = accelerator.gather_for_metrics((model(rows).argmax(1), labels))
            right.append(guesses == labels)
        numbers.append(float(torch.cat(right).float().mean()))
    save(accelerator.unwrap_model(model), numbers=numbers, rows=len(torch.cat(right)))
"""

# The layer before the batch norm has no bias: its gradient would be rounding errors only, and AdamW takes their signs.
LIGHTNING = """
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))

        def training_step(self, batch, number):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch, number):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("mean", loss, sync_dist=True)
            self.log("most", loss, sync_dist=True, reduce_fx="max")
            self.rows = self.all_gather(batch[1]).numel()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    L.seed_everything(0)
    x = torch.randn(48, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = Net()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(sys.argv[2]),
        strategy=DDPStrategy(process_group_backend=sys.argv[3] if len(sys.argv) > 3 else None),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4))
    save(model, numbers=[float(one) for _, one in sorted(trainer.callback_metrics.items())], rows=model.rows)
"""

PROGRAMS = {"accelerate": ACCELERATE, "lightning": LIGHTNING}


def started(folder: Path, words: Sequence[str], **environment: str) -> None:
    """A program's ranks, and whoever starts them, until they end. Nothing of it lives on behind its end or its deadline."""
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    made, said = MarkedProcess(), folder / f"said-{uuid.uuid4().hex}"
    made.mark = uuid.uuid4().hex
    with said.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", MARK: made.mark, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        status: object = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        status = f"nothing within {DEADLINE_S:.0f} s"
    finally:
        for pid in made.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
    assert status == 0, f"it ended with {status}:\n{said.read_text()[-12000:]}"


@dataclass
class Runs:
    """What a library's program leaves, by how it was started."""

    folder: Path
    library: str

    def __post_init__(self) -> None:
        if find_spec(self.library) is None:
            pytest.skip(f"needs {self.library}")
        text = textwrap.dedent(SAVED) + textwrap.dedent(PROGRAMS[self.library])
        (self.folder / "program.py").write_text(text)

    def by(self, launcher: str, size: int, *arguments: str, **environment: str) -> list[dict[str, Any]]:
        """Started by one of LAUNCHERS, or `alone`: with python, and it starts the other ranks itself."""
        where = self.folder / f"{launcher}-{uuid.uuid4().hex}"
        start = [] if launcher == "alone" else ["-m", *LAUNCHERS[launcher].format(n=size).split()]
        own = [str(size), *arguments] if self.library == "lightning" else list(arguments)
        started(self.folder, [*start, "program.py", str(where), *own], **environment)
        return [torch.load(f"{where}.{rank}", weights_only=True) for rank in range(size)]


def agree(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, exact: bool) -> None:
    """Ours ran on manyhands and theirs on gloo, and each rank ended with the same model and the same numbers."""
    size = len(ours)
    for group, backend, ranks in (("ManyhandsProcessGroup", "manyhands", ours), ("ProcessGroup", "gloo", theirs)):
        assert [(one["group"], one["backend"], one["size"]) for one in ranks] == [(group, backend, size)] * size
    limit = 0.0 if exact else 1e-6
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one["state"], other["state"], rtol=limit, atol=limit)
        assert one["numbers"] == pytest.approx(other["numbers"], rel=limit, abs=limit)
        assert one["rows"] == other["rows"]


@pytest.mark.parametrize(
    ("library", "size"), [("accelerate", 2), ("accelerate", 3), ("lightning", 2), ("lightning", 4)]
)
def test_a_program_ends_with_gloos_parameters(library: str, size: int, tmp_path: Path) -> None:
    """Unchanged: torchrun gives it gloo, `manyhands run --auto` gives it ours."""
    runs = Runs(tmp_path, library)
    agree(runs.by("manyhands", size), runs.by("torchrun", size), exact=size == 2)


def test_other_ways_to_ask_for_ours(tmp_path: Path) -> None:
    """By the variable, by a group that is there, and by Lightning's strategy, which also starts the ranks itself."""
    for library in PROGRAMS:
        (tmp_path / library).mkdir()
    runs = Runs(tmp_path / "accelerate", "accelerate")
    agree(runs.by("accelerate", 2, MANYHANDS_BACKEND="replace"), runs.by("accelerate", 2), exact=True)
    agree(runs.by("torchrun", 2, "manyhands"), runs.by("torchrun", 2, "gloo"), exact=True)
    runs = Runs(tmp_path / "lightning", "lightning")
    for launcher in ("alone", "torchrun"):
        agree(runs.by(launcher, 2, "manyhands"), runs.by(launcher, 2, "gloo"), exact=True)
