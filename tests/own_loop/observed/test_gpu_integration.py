"""Scripts on a GPU: observed ones, the Trainer of transformers, the backend with one rank. Without a GPU nothing is run."""

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS, SOURCE = Path(__file__).parent / "scripts", Path(__file__).resolve().parents[3] / "src"
TO_SCRIPT = ["-m", "manyhands", "run", "--auto", "-n", "2", "--share-gpu"]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def ran(folder: Path, *words: str) -> str:
    """What a Python command prints, which ends well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    how = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([sys.executable, *words], **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(textwrap.dedent(text))
    return str(folder / "script.py")


def dumps(folder: Path, path: str, *args: str) -> tuple[Any, Any, str]:
    """What one process and two workers on one GPU record, and what the latter say."""
    ran(folder, path, *args, "--dump", "alone.pt")
    said = ran(folder, *TO_SCRIPT, path, *args, "--dump", "workers.pt")
    return *(
        torch.load(folder / f"{name}.pt", weights_only=False, map_location="cpu") for name in ("alone", "workers")
    ), said


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_mnist(device: str, tmp_path: Path) -> None:
    args = ["--device", device, "--double", "--no-noise"]
    one, several, said = dumps(tmp_path, str(SCRIPTS / "mnist.py"), *args)
    assert "are shared by 2 workers" in said
    assert len(one["parameters"]) == 20
    for own, theirs in zip(several["parameters"], one["parameters"], strict=True):
        assert own.dtype == torch.float64
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-9)
    assert several["rates"] == one["rates"]
    assert several["printed"] == pytest.approx(one["printed"], abs=1e-6)
    assert several["evaluated"] == pytest.approx(one["evaluated"], abs=1e-6)


BFLOAT16 = """
    import argparse, torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    parser = argparse.ArgumentParser()
    parser.add_argument("--dump")
    torch.manual_seed(0)
    x = torch.randn(512, 20)
    data = TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(1))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(6):
        for rows, labels in DataLoader(data, 64, shuffle=True):
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(rows.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.save(losses, parser.parse_args().dump)
"""


def test_bfloat16(tmp_path: Path) -> None:
    one, several, said = dumps(tmp_path, script(tmp_path, BFLOAT16))
    assert "the loss is a mean over rows" in said
    assert several == pytest.approx(one, abs=0.05)
    assert several[-1] < several[0] - 0.3


BACKEND = """
    import os, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import manyhands_backend

    manyhands_backend.register()
    torch.cuda.set_device(0)
    dist.init_process_group("manyhands", init_method=f"file://{os.getcwd()}/meet", rank=0, world_size=1)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensor = torch.arange(5, device="cuda", dtype=dtype)
            dist.all_reduce(tensor, op)
            assert tensor.tolist() == [0, 1, 2, 3, 4]
    found = torch.zeros(1, 3, device="cuda")
    dist.all_gather_into_tensor(found, torch.ones(3, device="cuda"))
    assert found.tolist() == [[1, 1, 1]]
    torch.manual_seed(0)
    plain = nn.Linear(8, 3).cuda()
    model = nn.Linear(8, 3).cuda()
    model.load_state_dict(plain.state_dict())
    wrapped, x = DistributedDataParallel(model), torch.randn(16, 8, device="cuda")
    for one in (plain, wrapped):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
    assert torch.equal(model.weight, plain.weight)
    dist.barrier()
    dist.destroy_process_group()
    print("done")
"""


def test_the_backend_with_one_rank(tmp_path: Path) -> None:
    assert "done" in ran(tmp_path, script(tmp_path, BACKEND))


TRAINER = """
    import sys, torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    sizes = dict(hidden_size=16, intermediate_size=32, vocab_size=40, max_position_embeddings=16)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=2, num_attention_heads=2, **sizes))
    rows = [{"input_ids": torch.randint(0, 40, (8,)), "labels": torch.tensor(row % 2)} for row in range(44)]
    given = dict(max_steps=6, per_device_train_batch_size=4, learning_rate=0.01, save_strategy="no", report_to=[])
    trainer = Trainer(model=model, args=TrainingArguments(output_dir="out", disable_tqdm=True, bf16=True, **given), train_dataset=rows)
    trainer.train()
    assert next(model.parameters()).is_cuda
    if torch.distributed.is_initialized():
        print("backend", torch.distributed.get_backend())
    torch.save(model.state_dict(), sys.argv[1])
"""


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_trainer(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINER)
    ran(tmp_path, path, "alone.pt")
    print(ran(tmp_path, "-m", "manyhands", "run", "--as", "distributed", "-n", "1", path, "one.pt"))
    one, other = (torch.load(tmp_path / name, map_location="cpu") for name in ("alone.pt", "one.pt"))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)
