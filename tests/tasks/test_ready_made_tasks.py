"""Tasks by name, loaded when they are asked for; chars and digits: their data is what they say, and they learn it."""

import hashlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import manyhands as mh
from manyhands import spec, tasks
from manyhands.errors import UnknownName
from manyhands.task import Task
from manyhands.tasks import digits_task
from manyhands.tasks.chars_task import ALPHABET, CONTEXT, CharsNet, chars, split, texts, warmup_then_cosine, windows
from manyhands.tasks.digits_task import DigitsNet, digits, load, smoothed_cross_entropy
from refusals import refused


def test_the_text_is_ascii_split_by_whole_files_in_the_order_of_their_names(tmp_path):
    parts = split()
    total = sum(len(part) for part in parts)
    assert 500_000 < total <= 1_200_000
    assert all(part.max() < ALPHABET for part in parts)
    assert 0.8 < len(parts[0]) / total < 0.95
    assert all(0.02 < len(part) / total < 0.15 for part in parts[1:])
    for name in "kjihgfedcba":
        (tmp_path / f"{name}.py").write_text(name * 1000 + "é")
    (tmp_path / "_private.py").write_text("x" * 1000)
    found = texts(tmp_path, limit=10_500)
    assert [chr(text[0]) for text in found] == list("abcdefghijk")
    assert [len(text) for text in found] == [1000] * 10 + [500]
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("too little for the task chars", texts, empty)


def test_windows_are_views_shifted_by_one_and_no_position_sees_what_follows():
    text = np.arange(3 * CONTEXT + 1, dtype=np.uint8)
    before, after = windows(text)
    assert before.shape == after.shape == (3, CONTEXT)
    assert before.data_ptr() == text.ctypes.data
    assert after.data_ptr() == text.ctypes.data + 1
    assert torch.equal(after[:, :-1], before[:, 1:])
    assert torch.equal(after[:-1, -1], before[1:, 0])
    torch.manual_seed(0)
    model, text = CharsNet(layers=2), torch.randint(ALPHABET, (2, CONTEXT))
    changed = text.clone()
    changed[:, 50:] = (changed[:, 50:] + 1) % ALPHABET
    a, b = model(text), model(changed)
    assert torch.equal(a[:, :50], b[:, :50])
    assert not torch.allclose(a[:, 50:], b[:, 50:])


def test_it_has_the_size_it_says_a_few_steps_learn_and_the_rate_rises_and_falls():
    task = pickle.loads(pickle.dumps(chars(epochs=2)))
    torch.manual_seed(0)
    model = task.model()
    assert task.epochs == 2
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.9e6
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batch, losses = [part[:8] for part in task.train_data], []
    for _ in range(8):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    with torch.no_grad():
        metrics = task.metrics(model, [part[:4] for part in task.validation_data])
    assert float(metrics["bits_per_character"]) == pytest.approx(7.0, abs=1e-5)  # log2 of 128: it knows nothing
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, rates = warmup_then_cosine(optimizer, 100), []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.05 <= rates[-1] < 0.06


def test_the_scans_are_those_of_uci_and_the_split_is_fixed_and_disjoint():
    scans, targets = load()
    assert scans.shape == (1797, 1, 8, 8)
    assert scans.dtype == torch.float32
    assert (float(scans.min()), float(scans.max())) == (0.0, 1.0)
    assert targets.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert targets[:10].tolist() == list(range(10))
    scans, _ = load()
    parts = digits_task.split()
    assert [len(targets) for _, targets in parts] == [1297, 200, 300]
    rows = torch.cat([x for x, _ in parts]).flatten(1)
    assert torch.equal(rows.sum(1).sort().values, scans.flatten(1).sum(1).sort().values)
    fingerprint = hashlib.sha256(parts[2][1].numpy().tobytes()).hexdigest()
    assert fingerprint[:16] == "9d5e78bd2cc76e5d"


def test_fields_can_be_changed_a_worker_can_rebuild_it_and_validation_counts_the_plain_loss():
    task = digits(batch_size=16, epochs=5)
    assert (task.name, task.batch_size, task.epochs) == ("digits", 16, 5)
    refused("epoch", lambda: digits(epoch=5), kind=UnknownName)
    task = pickle.loads(pickle.dumps(digits()))
    torch.manual_seed(3)
    first = task.model()
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), DigitsNet().parameters(), strict=True))
    model, (x, y) = DigitsNet(), digits().validation_data
    metrics = digits().metrics(model, (x, y))
    assert torch.equal(metrics["loss"][0], F.cross_entropy(model(x), y))
    assert not torch.equal(metrics["loss"][0], smoothed_cross_entropy(model(x), y))


@pytest.mark.slow
def test_it_reads_97_percent_of_the_test_scans():
    assert mh.train(digits(epochs=8)).metrics["test_accuracy"] >= 0.97


FILES = {
    "linear": "1 1:1\n0 2:1\n",
    "fm": "1 1:1\n0 2:1\n",
    "ffm": "1 0:1:1\n0 0:2:1\n",
    "factors": "users,items,ratings\n0,0,1\n",
    "glove": "word " * 9,
    "kmeans": "x,y\n1,2\n3,4\n",
    "cuts": "nodes,others,weights\n0,1,1\n1,2,1\n",
    "word2vec": "word " * 9,
}
"""What tasks that need a path read."""


def test_each_name_makes_a_task_of_that_name_with_options_from_text(tmp_path):
    (tmp_path / "known.csv").write_text("nodes,classes\n0,0\n2,1\n")
    needed = {"kmeans": {"clusters": "1"}, "cuts": {"known_path": str(tmp_path / "known.csv")}}
    for name in tasks.CATALOGUE:
        options = {"batch_size": "32", "epochs": "5", **needed.get(name, {})}
        if name in FILES:
            (tmp_path / f"{name}.csv").write_text(FILES[name])
            options["path"] = str(tmp_path / f"{name}.csv")
        maker = spec.find(name, tasks.CATALOGUE, "task")
        task = spec.make(maker, options, f"task {name}")
        assert isinstance(task, Task)
        assert (task.name, task.batch_size, task.epochs) == (name, 32, 5)
        assert getattr(tasks, name) is maker
        assert getattr(tasks, name) is maker  # a second time: no submodule has taken its place
        assert tasks.SUMMARIES[name]


def test_an_unknown_task_is_named_and_listing_tasks_loads_no_torch():
    with pytest.raises(AttributeError, match="digits, chars"):
        _ = tasks.mnist
    code = "import sys; from manyhands import tasks; assert set(tasks.CATALOGUE) <= set(dir(tasks)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
