"""tasks/word2vec_task.py: word vectors by name, from the command line too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import manyhands as mh
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput
from manyhands.kernels.skip_gram import SkipGram
from manyhands.kernels.word_vectors import WordVectors
from manyhands.tasks.finding import task_of
from manyhands.tasks.word2vec_task import SLICE_WORDS


@pytest.fixture
def text(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(f"w{i}" for i in random.zipf(1.5, 9) % 50) for _ in range(9000)))
    return path


def test_options_are_those_of_the_kernel_and_of_tasks(text: Path) -> None:
    task = task_of(f"word2vec:path={text},dim=7,window=2,negative=3,min_count=20,sample=0.1,epochs=2,seed=3")
    kernel = task.kernel
    assert isinstance(kernel, SkipGram)
    assert (kernel.dim, kernel.window, kernel.negative, kernel.sample) == (7, 2, 3, 0.1)
    assert min(kernel.vocabulary.counts) >= 20
    assert (task.epochs, task.seed, task.rate, task.last_rate) == (2, 3, 0.025, 0.0001)
    assert task.batch_size_per_worker == pytest.approx(SLICE_WORDS / 9, rel=0.1)
    assert task_of(f"word2vec:path={text},cbow=true").rate == 0.05
    assert task_of(f"word2vec:path={text},cbow=true,rate=0.1").rate == 0.1


def test_what_was_left_out_is_shown_and_what_is_missing_named(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        task = task_of(f"word2vec:path={text},min_count=1000")
    assert task.train_data.counted.rare > 0
    assert f"{task.train_data.counted.rare:,} rare words" in caplog.text
    with pytest.raises(BadInput, match="word2vec needs path"):
        task_of("word2vec")
    with pytest.raises(BadInput, match="no file or folder"):
        task_of(f"word2vec:path={tmp_path / 'none'}")


def test_two_workers_learn_together(text: Path, local: Local) -> None:
    run = mh.train(f"word2vec:path={text},dim=8,batch_size_per_worker=200", strategy="hogwild", engine=local, workers=2)
    assert isinstance(run.model, WordVectors)
    untrained = 6 * np.log(2)  # of a word beside another and five drawn ones, where all products are 0
    assert run.history[-1]["loss"] < 0.8 * untrained
    assert run.model.outputs.abs().max() > 0.1


@pytest.mark.slow
def test_the_command_trains_on_two_workers(text: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)}
    words = [
        sys.executable,
        "-m",
        "manyhands",
        "train",
        f"word2vec:path={text},dim=8,epochs=1",
        "-s",
        "hogwild",
        "-n",
        "2",
    ]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "word2vec: hogwild on 2 workers" in done.stdout
    assert "9,000 rows" in done.stdout
