"""What the text of a script is, and which of its numbers are of one worker's rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from manyhands.cli.options import check_gpus
from manyhands.errors import BadInput
from manyhands.keras.fit import FitOnWorkers, backend_of
from manyhands.own_loop.observed.script import DISTRIBUTED, KERAS, LOOP, check_libraries, kind_of, notes_of
from manyhands.worker import Worker

LOOPS = {
    "a loop": "import torch\nfor x in loader:\n    loss.backward()",
    "no Python": "for x in:",
    "nccl without a GPU": "import torch.distributed as dist\nbackend = 'nccl'\ndist.init_process_group(backend=backend)",
    "a Trainer of its own": "class Trainer:\n    pass\nTrainer().train()",
    "a fit of its own": "model.fit(x)",
    "only a word in a text": "print('init_process_group, Accelerator, keras.Model.fit')",
}
GROUPS = {
    "torch": "import torch.distributed as dist\ndist.init_process_group('gloo')",
    "by name": "from torch.distributed import init_process_group\ninit_process_group()",
    "either backend": "dist.init_process_group('nccl' if cuda else 'gloo')",
    "accelerate": "from accelerate import Accelerator\nAccelerator()",
    "transformers": "from transformers import Trainer\nTrainer(model).train()",
    "lightning": "import lightning as L\nL.Trainer()",
    "pytorch lightning": "from pytorch_lightning import Trainer\nTrainer()",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop(name: str) -> None:
    assert kind_of(LOOPS[name], gpus=0) == LOOP


@pytest.mark.parametrize("name", GROUPS)
def test_a_program_that_makes_a_group(name: str) -> None:
    assert kind_of(GROUPS[name], gpus=0) == DISTRIBUTED


def test_nccl_with_gpus_makes_a_group() -> None:
    assert kind_of(LOOPS["nccl without a GPU"], gpus=2) == DISTRIBUTED


def test_keras() -> None:
    assert kind_of("import keras\nkeras.Sequential().fit(x, y)", gpus=0) == KERAS
    assert kind_of("from tensorflow import keras\nmodel.fit(x, y)", gpus=0) == KERAS
    assert kind_of("import keras\nfor x in loader:\n    loss.backward()", gpus=0) == LOOP


@pytest.mark.parametrize(
    ("text", "environment", "backend"),
    [
        ("import keras", {}, "torch"),
        ("import keras", {"KERAS_BACKEND": "jax"}, "jax"),
        ("import os\nos.environ['KERAS_BACKEND'] = 'torch'\nimport keras", {"KERAS_BACKEND": "jax"}, "torch"),
    ],
)
def test_the_backend_that_keras_will_have(text: str, environment: dict[str, str], backend: str) -> None:
    assert backend_of(text, environment) == backend


TRAINING = """
def train(loader):
    for data in loader:
        loss.backward()
        total += loss.item()
        print(100 * done / len(loader), loss.item() / len(data))
    return total / len(loader.dataset)

def test(loader):
    return total / len(loader.dataset)
"""


def test_numbers_of_one_worker_s_rows_are_named() -> None:
    note = notes_of(TRAINING, "/somewhere/train.py")
    assert "train.py:6, train.py:7" in note
    assert "train.py:10" not in note


def test_nothing_to_name() -> None:
    assert not notes_of("for data in loader:\n    loss.backward()\n    print(100 * done / len(loader))", "train.py")
    assert not notes_of("def test(loader):\n    return total / len(loader)", "train.py")
    assert not notes_of("for x in:", "train.py")


def test_a_loop_at_the_top_of_a_script() -> None:
    text = "for data in loader:\n    loss.backward()\nprint(total / len(loader.dataset))"
    assert "train.py:3" in notes_of(text, "train.py")


def test_a_library_below_its_bound() -> None:
    with pytest.raises(BadInput, match=r"accelerate 0.34.2, and manyhands runs it from 1.0 on: pip install"):
        check_libraries("from accelerate import Accelerator", lambda name: "0.34.2")
    check_libraries("from accelerate import Accelerator", lambda name: "1.10.0")
    check_libraries("import torch  # import accelerate", lambda name: "0.1")


def test_more_workers_than_gpus() -> None:
    with pytest.raises(BadInput, match="--workers 4 are more than the 2 GPUs.*--share-gpu"):
        check_gpus(4, 2, share_gpu=False)
    check_gpus(4, 2, share_gpu=True)
    check_gpus(2, 2, share_gpu=False)
    check_gpus(4, 0, share_gpu=False)


def test_keras_on_another_backend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.own_loop.prepare.session", lambda: SimpleNamespace(worker=Worker(size=2)))
    script = tmp_path / "fit.py"
    script.write_text("import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras\n")
    with pytest.raises(BadInput, match="fit.py runs on jax: set KERAS_BACKEND=torch"), FitOnWorkers()(str(script)):
        pass
