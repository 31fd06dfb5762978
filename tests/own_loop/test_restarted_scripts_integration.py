"""Scripts that torchrun or `manyhands run` runs again after a lost worker: `train()` inside goes on from its newest
checkpoint, in one history."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import manyhands as mh
import plain
from manyhands.checkpoint import launch_lock
from manyhands.engines.torchrun.launchers import restart_count
from manyhands.own_loop.launch import run_script

SOURCE = Path(__file__).resolve().parents[2] / "src"
SCRIPT = f"""
    import os, signal, sys
    from pathlib import Path
    sys.path.append({str(Path(plain.__file__).parent)!r})
    import manyhands as mh
    import plain

    calls = 0

    def loss(model, batch):
        global calls
        calls += 1
        mark = Path("killed")
        if calls == 11 and int(mh.worker().rank) == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain.cross_entropy(model, batch)

    mh.train(plain.task(epochs=4, loss=loss), run_dir="run", survive="max_restarts=2")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["manyhands", "run", "-n", "2", "--max-restarts", "1"],
        pytest.param(
            ["torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--max-restarts", "1"],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_run_that_its_launcher_starts_again_is_resumed(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-m", *words, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert [one["step"] for one in result["restarts"]] == [8]
    assert "restart 1 of 2 from step 8" in result["restarts"][0]["message"]
    assert result["rows"]["total"] == 4 * 39
    assert [row["tick"] for row in mh.read_history(tmp_path / "run")] == list(range(16))
    claim = launch_lock.claim_in(tmp_path / "run")
    assert claim is not None
    assert claim.number == 2


def test_how_often_the_launcher_has_started_again() -> None:
    for environment, count in (
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "MANYHANDS_RESTART_COUNT": "1"}, 1),
        ({"TORCHELASTIC_RESTART_COUNT": "many"}, 0),
    ):
        assert restart_count(environment) == count, environment


def test_a_launchers_workers_cannot_go_on_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the whole run can start again: what else is asked for is refused, with that as the way."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for survive in ("max_losses=1", "max_losses=any,max_restarts=1", "min_workers=2"):
        with pytest.raises(mh.Unsupported, match="max_restarts alone") as caught:
            mh.train(plain.task(), engine="torchrun", survive=survive, run_dir=tmp_path / "run")
        assert caught.value.exit_code == 2
        assert not (tmp_path / "run").exists()
    (tmp_path / "script.py").write_text("")
    with pytest.raises(mh.Unsupported, match="several workers"):
        run_script(tmp_path / "script.py", workers=1, max_restarts=1)
