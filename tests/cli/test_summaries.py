"""`manyhands summary`: a finished run, one that is not, a comparison, and what is none."""

import re
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, refused

import manyhands as mh
import plain
from manyhands.cli import summaries
from manyhands.evidence.compare.report import save


def task(**fields: Any) -> mh.Task:
    given: dict[str, Any] = {
        "train_data": plain.rows(64),
        "validation_data": plain.rows(64),
        "batch_size": 8,
        "epochs": 3,
    }
    return plain.task(**(given | fields))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, mh.Run]:
    folder = tmp_path_factory.mktemp("runs") / "mine"
    return folder, mh.train(task(), workers=1, run_dir=folder)


def test_a_finished_run_is_told_again_with_its_curves(finished: tuple[Path, mh.Run]) -> None:
    folder, run = finished
    done = invoke("summary", str(folder))
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(run.summary())
    curves = done.stdout[len(run.summary()) :].strip("\n").splitlines()
    assert [line.split()[0] for line in curves] == ["loss", "validation_loss"]
    first, last = run.history[0]["loss"], run.history[-1]["loss"]
    assert re.fullmatch(rf"  loss +{first:.4g} [▁-█]{{24}} {last:.4g}", curves[0])
    assert len(re.findall(r"[▁-█]", curves[1])) == 3
    _, found = summaries.read(folder)
    assert found["loss"] == [(row["step"], row["loss"]) for row in run.history]
    assert [step for step, _ in found["validation_loss"]] == [8, 16, 24]
    assert found["validation_loss"][-1][1] == run.metrics["validation_loss"]
    for width in (60, 80):
        assert max(map(len, summaries.text_of_directory(folder, width).splitlines()[-2:])) <= width


def test_a_run_that_is_not_finished_is_told_as_far_as_it_came(tmp_path: Path) -> None:
    class Fails(mh.Callback):
        def on_step(self, event: mh.Event) -> None:
            if event.step == 12:
                raise KeyError("12")

    with pytest.raises(KeyError):
        mh.train(task(), workers=1, run_dir=tmp_path / "run", callbacks=Fails())
    done = invoke("summary", str(tmp_path / "run"))
    assert done.exit_code == 0
    assert "not finished, at step 12 of 24 on 1 worker" in done.stdout
    assert "the newest checkpoint is of step 8; " in done.stdout
    assert "--resume" in done.stdout


def test_a_comparison_is_told_again_its_page_made_and_what_is_no_run_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "sim:compute='row=1e-3'", "repeats": 1, "validations": 1}
    found = mh.compare(task(epochs=1), strategies=["allreduce"], workers=[2], **options)
    page = save(found, tmp_path)
    page.unlink()
    done = invoke("summary", str(tmp_path))
    assert done.exit_code == 0
    assert found.verdict.split(":")[0] in done.stdout
    assert page.exists()
    (tmp_path / "report.json").write_text("{}")
    refused("", "summary", str(tmp_path))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for place in ("nothing", "file", "folder"):
        refused("give the directory of a run (events.jsonl is in it)", "summary", str(tmp_path / place))
