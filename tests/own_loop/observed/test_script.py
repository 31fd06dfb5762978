"""What the text of a script is."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from manyhands.cli.options import check_gpus
from manyhands.errors import BadInput
from manyhands.keras.fit import FitOnWorkers, backend_of
from manyhands.own_loop.observed.script import DISTRIBUTED, KERAS, LOOP, check_libraries, kind_of
from manyhands.worker import Worker

LOOPS = {
    "a loop": "import torch\nfor x in loader:\n    loss.backward()",
    "no Python": "for x in:",
    "nccl without a GPU": "import torch.distributed as dist\nbackend = 'nccl'\ndist.init_process_group(backend=backend)",
    "a Trainer of its own": "class Trainer:\n    pass\nTrainer().train()",
    "a fit of its own": "model.fit(x)",
    "keras beside a loop": "import keras\nfor x in loader:\n    loss.backward()",
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
FITS = {
    "keras": "import keras\nkeras.Sequential().fit(x, y)",
    "of tensorflow": "from tensorflow import keras\nmodel.fit(x, y)",
}


def test_what_a_script_is() -> None:
    for kind, texts in ((LOOP, LOOPS), (DISTRIBUTED, GROUPS), (KERAS, FITS)):
        for name, text in texts.items():
            assert kind_of(text, gpus=0) == kind, name
    assert kind_of(LOOPS["nccl without a GPU"], gpus=2) == DISTRIBUTED


def test_the_backend_that_keras_will_have() -> None:
    for text, environment, backend in (
        ("import keras", {}, "torch"),
        ("import keras", {"KERAS_BACKEND": "jax"}, "jax"),
        ("import os\nos.environ['KERAS_BACKEND'] = 'torch'\nimport keras", {"KERAS_BACKEND": "jax"}, "torch"),
    ):
        assert backend_of(text, environment) == backend, text


def test_a_library_below_its_bound() -> None:
    with pytest.raises(BadInput, match=r"accelerate 0.34.2, and manyhands runs it from 1.0 on: pip install"):
        check_libraries("from accelerate import Accelerator", lambda name: "0.34.2")
    check_libraries("from accelerate import Accelerator", lambda name: "1.10.0")
    check_libraries("import torch  # import accelerate", lambda name: "0.1")


def test_more_workers_than_gpus() -> None:
    with pytest.raises(BadInput, match="--workers 4 are more than the 2 GPUs.*--share-gpu"):
        check_gpus(4, 2, share_gpu=False)
    for workers, gpus, share in ((4, 2, True), (2, 2, False), (4, 0, False)):
        check_gpus(workers, gpus, share_gpu=share)


def test_keras_on_another_backend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.own_loop.prepare.session", lambda: SimpleNamespace(worker=Worker(size=2)))
    script = tmp_path / "fit.py"
    script.write_text("import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras\n")
    with pytest.raises(BadInput, match="fit.py runs on jax: set KERAS_BACKEND=torch"), FitOnWorkers()(str(script)):
        pass
