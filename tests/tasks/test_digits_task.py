"""tasks/digits_task.py: the data is what it says, and the task learns it."""

import hashlib
import pickle

import pytest
import torch
from torch.nn import functional as F

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.errors import UnknownName
from manyhands.tasks.digits_task import DigitsNet, digits, load, smoothed_cross_entropy, split


def test_the_scans_are_those_of_uci_and_the_split_is_fixed_and_disjoint():
    scans, targets = load()
    assert scans.shape == (1797, 1, 8, 8)
    assert scans.dtype == torch.float32
    assert (float(scans.min()), float(scans.max())) == (0.0, 1.0)
    assert targets.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert targets[:10].tolist() == list(range(10))
    scans, _ = load()
    parts = split()
    assert [len(targets) for _, targets in parts] == [1297, 200, 300]
    rows = torch.cat([x for x, _ in parts]).flatten(1)
    assert torch.equal(rows.sum(1).sort().values, scans.flatten(1).sum(1).sort().values)
    fingerprint = hashlib.sha256(parts[2][1].numpy().tobytes()).hexdigest()
    assert fingerprint[:16] == "9d5e78bd2cc76e5d"


def test_fields_can_be_changed_and_a_worker_can_rebuild_it():
    task = digits(batch_size=16, epochs=5)
    assert (task.name, task.batch_size, task.epochs) == ("digits", 16, 5)
    with pytest.raises(UnknownName, match="epoch"):
        digits(epoch=5)
    task = pickle.loads(pickle.dumps(digits()))
    torch.manual_seed(3)
    first = task.model()
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), DigitsNet().parameters(), strict=True))


def test_validation_counts_the_plain_loss():
    model, (x, y) = DigitsNet(), digits().validation_data
    metrics = digits().metrics(model, (x, y))
    assert torch.equal(metrics["loss"][0], F.cross_entropy(model(x), y))
    assert not torch.equal(metrics["loss"][0], smoothed_cross_entropy(model(x), y))


@pytest.mark.slow
def test_it_reads_97_percent_of_the_test_scans():
    task = digits(epochs=8)
    torch.manual_seed(0)
    model, feed = task.model(), Feed(open_source(task.train_data), batch_size=task.batch_size)
    optimizer = task.optimizer(model)
    schedule = task.schedule(optimizer, feed.ticks * task.epochs)
    for epoch in range(task.epochs):
        for part in feed.epoch(epoch):
            optimizer.zero_grad()
            loss = task.loss(model, part.batch)
            loss.backward()
            optimizer.step()
            schedule.step()
    accuracy, _ = task.metrics(model, task.test_data)["accuracy"]
    assert float(accuracy) >= 0.97
