"""tasks/chars_task.py: the text, its windows, and a model that sees the past alone."""

import pickle

import numpy as np
import pytest
import torch

from manyhands.errors import BadInput
from manyhands.tasks.chars_task import ALPHABET, CONTEXT, CharsNet, chars, split, texts, warmup_then_cosine, windows


def test_the_text_is_ascii_and_split_by_whole_files():
    parts = split()
    total = sum(len(part) for part in parts)
    assert 500_000 < total <= 1_200_000
    assert all(part.max() < ALPHABET for part in parts)
    assert 0.8 < len(parts[0]) / total < 0.95
    assert all(0.02 < len(part) / total < 0.15 for part in parts[1:])


def test_files_come_in_the_order_of_their_names_up_to_a_limit(tmp_path):
    for name in "kjihgfedcba":
        (tmp_path / f"{name}.py").write_text(name * 1000 + "é")
    (tmp_path / "_private.py").write_text("x" * 1000)
    found = texts(tmp_path, limit=10_500)
    assert [chr(text[0]) for text in found] == list("abcdefghijk")
    assert [len(text) for text in found] == [1000] * 10 + [500]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadInput, match="too little for the task chars"):  # a Python without its source
        texts(empty)


def test_windows_are_views_and_shifted_by_one():
    text = np.arange(3 * CONTEXT + 1, dtype=np.uint8)
    before, after = windows(text)
    assert before.shape == after.shape == (3, CONTEXT)
    assert before.data_ptr() == text.ctypes.data
    assert after.data_ptr() == text.ctypes.data + 1
    assert torch.equal(after[:, :-1], before[:, 1:])
    assert torch.equal(after[:-1, -1], before[1:, 0])


def test_no_position_sees_what_follows():
    torch.manual_seed(0)
    model, text = CharsNet(layers=2), torch.randint(ALPHABET, (2, CONTEXT))
    changed = text.clone()
    changed[:, 50:] = (changed[:, 50:] + 1) % ALPHABET
    a, b = model(text), model(changed)
    assert torch.equal(a[:, :50], b[:, :50])
    assert not torch.allclose(a[:, 50:], b[:, 50:])


def test_it_has_the_size_it_says_and_a_few_steps_learn():
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


def test_the_rate_rises_and_falls():
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
