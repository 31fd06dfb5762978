"""What users of other libraries reported, as it is here."""

from collections.abc import Callable

import numbered_rows
import pytest
import torch
from fault_harness import Patient, Strike, Trial

import manyhands as mh

BATCH, TICKS, EPOCHS = 6, 8, 2
ROWS = BATCH * TICKS
TIMEOUT_S = 60.0


@pytest.mark.slow
def test_a_worker_is_killed_and_another_process_takes_its_place(trial: Trial) -> None:
    """torchft#186: the batch changes at a loss. torchft#309: a rejoiner is a batch behind. horovod#3143: rows are lost at a
    reset. pytorch#76287: survivors hang."""
    fault, told = "kill=1@step:5:exchange", trial.folder / "told"

    class Told(mh.Callback):
        def on_notice(self, event: mh.Event) -> None:
            if event.type == "change" and event.values["kind"] == "back":
                told.touch()

    def until(worker: mh.Worker) -> bool:
        """The replacement has asked for its place; and once it has it, the driver has told so."""
        return worker.interrupted or worker.broken or (worker.size >= 3 and told.exists())

    patient = Patient(loss=numbered_rows.minus_mean, call=8, until=until)
    of = numbered_rows.task(ROWS, BATCH, epochs=EPOCHS, loss=patient)
    callbacks = [trial.seen, Told()]
    run = trial.struck(fault, of=of, timeout_s=TIMEOUT_S, callbacks=callbacks)
    assert run.generations == 3  # three, two, three workers
    assert any("worker 1 is back: 3 of 3 workers from step" in message for message in trial.seen.changes)
    assert run.rows["repeated"] == BATCH  # of the step that was under way; the replacement came between two
    left, joined = trial.events("membership")
    assert [event.values["workers"] for event in (left, joined)] == [2, 3]
    # each step is of as many rows, whoever trains them, at the same rate
    assert [row["rows"] for row in run.history] == [BATCH] * (EPOCHS * TICKS)
    assert {row["rate"] for row in run.history} == {1.0}
    # the first step of who comes back is the members' first step with it
    steps = {(event.generation, event.rank): event for event in reversed(trial.events("step"))}  # the first of each
    assert {steps[joined.generation, rank].tick for rank in range(3)} == {joined.tick}
    assert {steps[joined.generation, rank].step for rank in range(3)} == {joined.tick + 1}
    # the answer shows each row once an epoch
    times = run.model.of.detach() * BATCH
    assert torch.allclose(times, torch.full((ROWS,), float(EPOCHS), dtype=torch.float64), atol=1e-12)
    assert run.rows["total"] == EPOCHS * ROWS
    # survivors notice by the lost one's pipe, long before anything times out
    [lost] = [event for event in trial.events("change") if event.values["kind"] == "lost"]
    assert left.time_s - lost.time_s < TIMEOUT_S / 4


def test_the_epoch_is_the_members(simulated: Callable[[], Trial]) -> None:
    """horovod#2844: the wrong epoch after a reset. Here one is lost as an epoch ends, and the next has its own order."""
    for strike in (Strike(0, "told epoch"), Strike(1, "collect")):
        trial = simulated()
        of = numbered_rows.task(ROWS, BATCH, epochs=3, order=lambda epoch: [epoch] * ROWS)
        run = trial.struck(strike, of=of)
        assert trial.seen.epochs == [1, 2, 3]
        assert [row["epoch"] for row in run.history] == [tick // TICKS for tick in range(3 * TICKS)]
        assert run.model.of.detach()[:4].tolist() == pytest.approx([TICKS] * 3 + [0])
