"""docs/migrate.md: what each row names is there, and does what the row says."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import manyhands as mh
import plain
import tables
from manyhands.comm.codecs import codec_of
from manyhands.engines.cluster import Cluster
from manyhands.engines.sim.engine import Sim
from manyhands.strategies import strategy_of
from pages import ROOT

ROWS = tables.rows(ROOT / "docs" / "migrate.md")


def test_what_a_row_names_is_there() -> None:
    """A row that names nothing of ours says so, and what it is about is no option here."""
    for row in ROWS:
        for code in row.named:
            tables.resolve(code)
        assert row.named or tables.is_nothing(row), f"nothing here can be checked: {row}"
        if tables.is_nothing(row):
            assert [word for word in tables.codes(row.there) if tables.is_option(word)] == [], row


def test_every_system_has_rows() -> None:
    page = (ROOT / "docs" / "migrate.md").read_text()
    assert {row.section for row in ROWS} == {line[3:] for line in page.splitlines() if line.startswith("## ")}


def here(section: str, there: str) -> str:
    """The first thing that the row of this option names."""
    (row,) = [row for row in ROWS if row.section == section and there in row.there]
    return tables.filled_in(row.named[0]) if ":" in row.named[0] else row.named[0]


def steps_of(strategy: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The events of what three workers did in two epochs, the first of them three times slower."""
    task = plain.task(train_data=plain.rows(120), optimizer=plain.OPTIMIZERS["sgd"])
    mh.train(task, strategy=strategy, engine=Sim(compute="0=3x"), workers=3, run_dir=folder / "run", **options)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["type"] in ("step", "closing")]


def counted(events: list[dict[str, Any]], what: str) -> Counter[tuple[int, int]]:
    """{(worker, epoch): how many}"""
    found: Counter[tuple[int, int]] = Counter()
    for event in events:
        found[event["rank"], event["values"]["epoch"]] += len(event["values"].get(what, []))
    return found


# -- Elephas -----------------------------------------------------------------------------------------------------------

EVERYONE = {(rank, epoch) for rank in range(3) for epoch in range(2)}


def test_elephas_frequency_is_how_often_a_worker_pulls_and_pushes(tmp_path: Path) -> None:
    """Once an epoch, also where a fast worker trains more batches than a slow one; or at each batch."""
    for frequency in ("epoch", "batch"):
        events = steps_of(here("Elephas", f'frequency="{frequency}"'), tmp_path / frequency)
        batches = Counter((event["rank"], event["values"]["epoch"]) for event in events)
        assert batches[0, 0] < batches[1, 0]
        assert batches.keys() == EVERYONE
        wanted = dict.fromkeys(EVERYONE, 1) if frequency == "epoch" else batches
        assert counted(events, "pushes") == counted(events, "pulls") == wanted, frequency
    page = (ROOT / "docs" / "migrate.md").read_text()
    block = page[page.index('frequency="epoch", mode="asynchronous"') :].partition("```")[0]
    spec = here("Elephas", 'frequency="epoch"')
    assert f'strategy="{spec}"' in block


def test_elephas_synchronous_is_one_average_at_the_end(tmp_path: Path) -> None:
    events = steps_of(here("Elephas", 'mode="synchronous"'), tmp_path)
    rounds = [event for event in events if event["values"].get("round")]
    assert {event["rank"] for event in rounds} == {0, 1, 2}
    assert {event["values"]["epoch"] for event in rounds} == {1}
    assert len(rounds) == 3


# -- Deeplearning4j ----------------------------------------------------------------------------------------------------


def test_gradient_sharing_of_deeplearning4j_is_asynchronous_and_keeps_residuals_that_are_clipped() -> None:
    strategy = strategy_of(here("Deeplearning4j", "SharedTrainingMaster"))
    assert isinstance(strategy, mh.UpdateSharing)
    assert strategy.leasing() is not None
    assert strategy.server() is None
    assert strategy.density is None
    clipped = strategy_of(here("Deeplearning4j", "ResidualClipping"))
    assert isinstance(clipped, mh.Downpour)
    assert codec_of(clipped.compress) == codec_of("threshold:0.001")


# -- Horovod -----------------------------------------------------------------------------------------------------------


def test_horovods_compression() -> None:
    """Its sum, `mh.weight("sum")`, is in own_loop/test_loss_graph.py."""
    strategy = strategy_of(here("Horovod", "Compression.fp16"))
    assert isinstance(strategy, mh.AllReduce)
    assert strategy.compress == "bf16"


# -- TensorFlowOnSpark, TorchDistributor -------------------------------------------------------------------------------


def test_inference_answers_every_row_once() -> None:
    """Whichever process computes it. The page's own program of it runs with its other blocks."""
    assert here("TensorFlowOnSpark", "cluster.inference(rdd)") == "cluster.rows(batch_size, shuffle=False)"
    addresses = {"worker": ("a:1", "b:2", "c:3")}
    data = np.arange(41.0), np.arange(41)
    answers = []
    for index in range(3):
        process = Cluster(role="worker", index=index, addresses=addresses, data=data)
        for x, numbers in process.rows(16, shuffle=False):
            answers += zip(numbers.tolist(), (2 * x).tolist(), strict=True)
    assert sorted(answers) == [(i, 2.0 * i) for i in range(41)]
    assert mh.launch(lambda: mh.worker().rank, workers=3, engine="sim") == [0, 1, 2]
