"""Whole scripts, written for one process, on real workers: the folder holds one process's files in the end.

Under torchrun: tests/own_loop/test_prepare_integration.py.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from driver_script import wait_until

from manyhands.engines.local.engine import Local
from manyhands.errors import WorkerFailed
from manyhands.own_loop.launch import run_script

PROLOGUE = """
import logging, os, pathlib, shutil, signal, sqlite3, tarfile, tempfile, zipfile
import numpy as np, torch
import manyhands as mh
from safetensors.torch import load_file, save_file
worker = mh.worker()
model = torch.nn.Linear(3, 3)
model, optimizer = mh.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
def step():
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
def later(rank):  # this rank comes after the others to what follows
    if worker.rank == rank:
        import time
        time.sleep(0.1)
"""


def run(local: Local, folder: Path, script: str, workers: int = 2) -> int:
    path = folder.parent / "script.py"
    path.write_text(PROLOGUE + textwrap.dedent(script))
    return run_script(path, workers=workers, engine=local, threads_per_worker=1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the scripts, empty."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def files(folder: Path) -> dict[str, str]:
    """All files, by name; a text is that, anything else its length."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.txt")) if path.is_file()}


def scratch(words: str) -> list[str]:
    """The folders that workers said they write to."""
    return re.findall(r"writes its files to (\S+)\. ", words)


def wait_gone(path: str) -> None:
    wait_until(lambda: not os.path.exists(path))


def holds(path: str, text: str) -> bool:
    return os.path.exists(path) and Path(path).read_text() == text


@pytest.mark.slow
def test_models_are_saved_and_read_back(local: Local, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """word_language_model's `open` and torch.save, imagenet's copy of the best, NumPy, safetensors; whoever is behind."""
    script = """
    for epoch in range(4):
        later(epoch % 2)
        with open("model.pt", "wb") as f:
            torch.save([epoch, model], f)
        torch.save([epoch, model.state_dict()], "checkpoint.pt")
        shutil.copyfile("checkpoint.pt", "best.pt")
        np.save("rows.npy", np.arange(4) + epoch)
        save_file({"x": torch.arange(3) + epoch}, "x.safetensors")
        with open("model.pt", "rb") as f:
            assert torch.load(f, weights_only=False)[0] == epoch
        assert torch.load("best.pt")[0] == epoch
        assert np.load("rows.npy")[0] == epoch and np.load("rows.npy", mmap_mode="r")[0] == epoch
        assert load_file("x.safetensors")["x"][0] == epoch
        step()
    torch.save(model.weight, pathlib.Path("last.pt"))
    """
    assert run(local, folder, script) == 0
    assert sorted(os.listdir()) == ["best.pt", "checkpoint.pt", "last.pt", "model.pt", "rows.npy", "x.safetensors"]
    assert torch.load("model.pt", weights_only=False)[0] == torch.load("best.pt")[0] == 3
    output = capfd.readouterr().err
    assert output.count("worker 1 of 2 writes its files to") == 1
    assert "worker 0 of 2 writes" not in output
    wait_gone(os.path.dirname(scratch(output)[0]))


def test_each_rank_keeps_what_it_alone_writes(local: Local, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank-named files are there for the others after the next collective; all are there in the end."""
    script = """
    open(f"out-{worker.rank}.txt", "w").write(f"rank {worker.rank}")
    assert open(f"out-{worker.rank}.txt").read() == f"rank {worker.rank}"
    os.makedirs(f"folder-{worker.rank}")
    pathlib.Path(f"folder-{worker.rank}", "in.txt").write_text("in")
    worker.group.barrier()
    for rank in range(worker.size):
        assert pathlib.Path(f"out-{rank}.txt").read_text() == f"rank {rank}", rank
        assert sorted(os.listdir(f"folder-{rank}")) == ["in.txt"]
    late = open(f"late-{worker.rank}.txt", "w")
    late.write("never closed")
    """
    assert run(local, folder, script, workers=3) == 0
    expected = {f"out-{rank}.txt": f"rank {rank}" for rank in range(3)}
    expected |= {f"folder-{rank}/in.txt": "in" for rank in range(3)}
    assert files(folder) == expected | {f"late-{rank}.txt": "never closed" for rank in range(3)}
    output = capfd.readouterr().err
    assert len(set(scratch(output))) == 2
    for place in scratch(output):
        wait_gone(os.path.dirname(place))


def test_logs_folders_and_names_for_a_moment(local: Local, folder: Path) -> None:
    """Append mode, `r+`, exclusive creation, tempfile with os.replace, rotation, archives, a file's own descriptor."""
    (folder / "old.txt").write_text("old\n")
    script = """
    log = logging.getLogger("script")
    log.addHandler(logging.FileHandler("log.txt"))
    os.makedirs("out")
    for epoch in range(3):
        later(epoch % 2)
        log.warning("epoch %d", epoch)
        with open("appended.txt", "a") as file:
            file.write(f"{epoch}\\n")
        with open("old.txt", "a") as file:
            file.write(f"{epoch}\\n")
        assert open("old.txt").read().splitlines() == ["old", *map(str, range(epoch + 1))]
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
            file.write(f"whole {epoch}")
        os.replace(file.name, "whole.txt")
        assert pathlib.Path("whole.txt").read_text() == f"whole {epoch}"
        pathlib.Path("out", f"{epoch}.txt").write_text(str(epoch))
        if epoch:
            os.remove(f"out/{epoch - 1}.txt")
        assert os.listdir("out") == [f"{epoch}.txt"] and not os.path.exists("out/0.txt") == (epoch > 0)
        step()
    with open("changed.txt", "x") as file:
        file.write("0123")
    with open("changed.txt", "r+") as file:
        file.seek(2)
        file.write("xx")
    with open("changed.txt", "w+") as file:
        file.write("wplus")
        file.seek(0)
        assert file.read() == "wplus"
    fd = os.open("by_number.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, b"by ")
    with open(fd, "w") as file:
        file.write("number")
    assert open("by_number.txt").read() == "by number"
    with zipfile.ZipFile("all.zip", "w") as archive:
        archive.write("by_number.txt")
    with tarfile.open("all.tar", "w") as archive:
        archive.add("by_number.txt", "unpacked.txt")
    with tarfile.open("all.tar") as archive:
        archive.extractall(".", filter="data")
    shutil.rmtree("out")
    os.makedirs("out")
    array = np.memmap("mapped.bin", dtype="int64", mode="w+", shape=(2,))
    array[:] = 7
    array.flush()
    """
    assert run(local, folder, script) == 0
    assert files(folder) == {
        "appended.txt": "0\n1\n2\n",
        "by_number.txt": "by number",
        "changed.txt": "wplus",
        "log.txt": "epoch 0\nepoch 1\nepoch 2\n",
        "old.txt": "old\n0\n1\n2\n",
        "unpacked.txt": "by number",
        "whole.txt": "whole 2",
    }
    assert sorted(os.listdir()) == sorted([*files(folder), "all.tar", "all.zip", "mapped.bin", "out"])
    assert not list((folder / "out").iterdir())


def test_loader_processes_write_with_their_rank_and_who_writes_in_c_is_named_once(
    local: Local, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, i):
            open("cache.txt", "w").write("cached")
            open(f"of-{worker.rank}.txt", "w").write("own")
            return torch.ones(3)
    for _ in torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1):
        pass
    assert open("cache.txt").read() == "cached" and open(f"of-{worker.rank}.txt").read() == "own"
    for _ in range(2):
        sqlite3.connect(":memory:").close()
        sqlite3.connect(f"{worker.rank}.db").close()
    """
    assert run(local, folder, script) == 0
    assert files(folder) == {"cache.txt": "cached", "of-0.txt": "own", "of-1.txt": "own"}
    output = capfd.readouterr().err
    assert output.count("with sqlite3, so") == 1
    assert "workers 0 and 1 both write" in output


def test_a_worker_that_is_killed_leaves_no_folder_and_loses_no_file(
    local: Local, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it alone wrote goes to its place; what stood there before, is not replaced by who may not have been the only one."""
    (folder / "kept.txt").write_text("before")
    script = """
    if worker.rank == 1:
        open("own.txt", "w").write("own")
        open("kept.txt", "w").write("other")
        os.kill(os.getpid(), signal.SIGKILL)
    worker.group.barrier()
    """
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        run(local, folder, script)
    (place,) = scratch(capfd.readouterr().err)
    wait_gone(os.path.dirname(place))
    assert files(folder) == {"kept.txt": "before", "own.txt": "own"}
    assert (folder / "kept.txt.rank-1").read_text() == "other"


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_folder(folder: Path) -> None:
    script = folder.parent / "script.py"
    script.write_text(
        "import time\nimport manyhands as mh\nopen(f'own-{mh.worker().rank}.txt', 'w').write('own')\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", "from manyhands.cli.commands import main; main()", "run", "-n", "2", str(script)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        output = next(line for line in process.stderr if "writes its files to" in line)
        for written in (f"{folder}/own-0.txt", f"{scratch(output)[0]}{folder}/own-1.txt"):
            wait_until(partial(holds, written, "own"))
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        wait_gone(os.path.dirname(scratch(output)[0]))
    assert files(folder) == {"own-0.txt": "own", "own-1.txt": "own"}
