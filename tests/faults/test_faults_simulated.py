"""Workers are lost at every place of a run, on engine `sim`, whose bits are those of processes (test_faults_bits_integration).

The replaced and the not replaced, the first worker and another: each row and each step counts once.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import (
    GLOBAL_ROWS,
    OF_THE_FIRST,
    PLACES,
    STEPS,
    Recording,
    Strike,
    Trial,
    as_ever,
    at_place,
    counted_once,
    equal,
    lose_peer,
    lost,
    raises,
    recorded_once,
    reference,
    survive,
    task,
)
from numbered_rows import (
    ON_THEIR_WAY,
    PERIOD,
    ROUNDS,
    STREAMING,
    counted,
    each_at_the_server,
    each_in_a_round,
    each_in_a_round_of_its_fragment,
    in_fragments,
    in_order,
    trained_once,
)
from numbered_rows import task as numbered
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.recording.run import Run

Simulated = Callable[[], Trial]
slow = pytest.mark.slow
ODD = ValueError("these rows are odd")


def struck(
    simulated: Simulated, *befalls: str | Strike, losses: int | None = None, **options: Any
) -> tuple[Run, Trial]:
    """losses: how many of what befalls are losses, default: all."""
    trial = simulated()
    run = trial.struck(*befalls, **options)
    expected = sum(len(str(one).split(",")) for one in befalls) if losses is None else losses
    assert len(run.losses) == expected, (befalls, run.losses)
    return run, trial


def both(*befalls: str) -> list[tuple[str, bool]]:
    """Each of them for the first worker and for another, of whom one is replaced, in turn."""
    return [
        (one.format(worker_id), (number + worker_id) % 2 == 0)
        for number, one in enumerate(befalls)
        for worker_id in (1, 0)
    ]


def half(cases: list[Any], number: int) -> list[Any]:
    """Every second of them, of either worker: the others are for the next number."""
    return [case for i, case in enumerate(cases) if (i + i // 2 + number) % 2 == 0]


# -- steps that all make together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "worker_id"),
    [
        *((when, int(when not in OF_THE_FIRST)) for when in PLACES),
        *(pytest.param(when, 0, marks=slow) for when in PLACES if when not in OF_THE_FIRST),
    ],
)
def test_the_result_is_one_workers_wherever_one_is_lost(
    when: str, worker_id: int, simulated: Simulated, one_worker: Run
) -> None:
    number = list(PLACES).index(when)
    replaced = (worker_id + number) % 2 == 0
    run, trial = struck(simulated, at_place(when, worker_id), survive=survive(replaced))
    assert lost(run) == [(worker_id, "death")]
    as_ever(run, trial, one_worker)
    assert run.generations >= 2 or not replaced or number >= list(PLACES).index("last commit")


@slow
@pytest.mark.parametrize("strategy", ["allreduce", "downpour:bound=0", "quorum"])
def test_nothing_befalls_it(strategy: str, simulated: Simulated, one_worker: Run) -> None:
    """Bit for bit as without `survive`, in step at a server, too."""
    run, trial = struck(simulated, strategy=strategy)
    equal(run, simulated().train(strategy=strategy, survive=None), tolerance=0.0)
    assert (run.losses, run.generations) == ([], 1)
    if strategy == "allreduce":
        as_ever(run, trial, one_worker)


@slow
def test_several_are_lost(simulated: Simulated, one_worker: Run) -> None:
    together = [
        "kill=0@step:4:exchange,kill=1@step:4:exchange",
        "kill=0@step:4:commit,kill=1@step:4:exchange",
        "kill=0@step:4:commit,kill=2@step:4:commit",
        "kill=0@step:0:join,kill=2@step:0:join",
        "kill=0@step:3:save,kill=2@step:3:save",
    ]
    for faults in together:
        as_ever(*struck(simulated, faults), one_worker)
    run, trial = struck(simulated, "kill=1@step:2", "kill=0@step:5:exchange", survive=survive(False, 2))
    as_ever(run, trial, one_worker)
    assert [one["step"] for one in run.losses] == [2, 5]
    assert run.generations == 3
    # the last one may have had the mean of the step in which the other was lost
    assert run.rows["repeated"] in (22, 44)
    assert trial.seen.stepped_before_the_last_epoch_ended(7)
    run, trial = struck(simulated, "kill=1@step:0:join", survive=survive(False))
    assert trial.seen.stepped_before_the_last_epoch_ended(2)  # one that never came is not waited for in the history
    as_ever(run, trial, one_worker)
    strikes = [Strike(2, "model", process=number) for number in (1, 2, 3)]
    run, trial = struck(simulated, *strikes, survive="max_losses=any")
    as_ever(run, trial, one_worker)
    assert any("worker 2 was lost 3 times before its first step" in message for message in trial.seen.changes)
    run, trial = struck(simulated, "kill=0@step:0:join", workers=1)  # nothing is lost yet
    as_ever(run, trial, one_worker)


@slow
@pytest.mark.parametrize(
    ("place", "worker_id"),
    [*((one, 1) for one in ("model", "join", "bring", "ask sync", "input")), ("bring", 0), ("ask membership", 0)],
)
def test_a_replacement_or_its_source_is_lost(place: str, worker_id: int, simulated: Simulated, one_worker: Run) -> None:
    strike = Strike(worker_id, place, process=2 if worker_id else 1)
    run, trial = struck(simulated, "kill=1@step:2", strike)
    assert lost(run) == [(1, "death"), (worker_id, "death")]
    as_ever(run, trial, one_worker)


@slow
def test_different_exceptions_are_losses(simulated: Simulated, one_worker: Run) -> None:
    strikes = [
        Strike(1, "compute", act=raises(ODD), call=3),
        Strike(2, "compute", act=raises(KeyError()), call=5),
        Strike(0, "compute", act=raises(MemoryError()), call=8),
    ]
    run, trial = struck(simulated, *strikes)
    assert lost(run) == [(1, "error"), (2, "error"), (0, "memory")]
    as_ever(run, trial, one_worker)
    strikes = [Strike(one, "compute", act=raises(MemoryError()), call=one + 2) for one in (1, 2)]
    run, trial = struck(simulated, *strikes)
    assert [one["cause"] for one in run.losses] == ["memory", "memory"]


# -- what else a run remembers ---------------------------------------------------------------------------------------------


class Averaging(nn.Module):
    """A buffer that follows the parameters, by as much at each forward of training, whatever rows a worker has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain.mlp()
        self.register_buffer("average", torch.zeros(9, 5, dtype=torch.float64))
        self.average: Tensor

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.average.lerp_(self.net[0].weight.detach(), 0.1)
        return self.net(x)


class Normalized(nn.Module):
    """Batch norm of inputs, whose first column is always 2, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()
        self.drop, self.net = nn.Dropout(dropout), plain.mlp()

    def forward(self, x: Tensor) -> Any:
        return self.net(self.drop(self.norm(x)))


@slow
def test_buffers_of_a_repeated_step_are_those_of_before(simulated: Simulated) -> None:
    """Of the last step, of 22 rows: two workers' slices are no larger than three workers' of a whole batch, and so they are
    not computed in pieces, each of which would move the buffers."""
    averaged = reference(task(model=Averaging))
    for fault, _ in both("kill={}@step:8:exchange", "kill={}@step:8:commit"):
        run, _ = struck(simulated, fault, of=task(model=Averaging), survive=survive(False))
        equal(run, averaged)
    x, y = plain.rows(100)
    x[:, 0] = 2.0
    given = task(model=Normalized, train_data=(x, y))
    other = reference(given).model.norm
    for phase in ("", ":exchange", ":commit"):
        run, _ = struck(simulated, f"kill=1@step:8{phase}", of=given, survive=survive(False))
        norm = run.model.norm
        assert int(norm.num_batches_tracked) == int(other.num_batches_tracked) == STEPS
        assert torch.allclose(norm.running_mean[0], other.running_mean[0], rtol=0, atol=1e-12)
        assert torch.allclose(norm.running_var[0], other.running_var[0], rtol=0, atol=1e-12)
    for worker_id in (0, 1):
        run, trial = struck(simulated, f"kill={worker_id}@step:2:exchange", of=task(model=lambda: Normalized(0.5)))
        recorded_once(run, trial)
        assert int(run.model.norm.num_batches_tracked) >= STEPS


@slow
def test_every_way_to_compute_a_step(simulated: Simulated, one_worker: Run) -> None:
    overlap = "allreduce:overlap=true"
    for fault, replaced in both("kill={}@step:4", "kill={}@step:4:exchange", "kill={}@step:4:commit"):
        as_ever(*struck(simulated, fault, strategy=overlap, survive=survive(replaced)), one_worker)
    for replaced in (True, False):
        of = task(micro_batch_size=5)
        as_ever(*struck(simulated, "kill=1@step:4:exchange", of=of, survive=survive(replaced)), one_worker)
    for number, compress in enumerate(("topk:0.2", "onebit", "powersgd:2")):  # what a lost worker left out is lost
        for fault, replaced in half(both("kill={}@step:4:exchange", "kill={}@step:4:commit"), number):
            strategy = f"allreduce:compress={compress}"
            run, trial = struck(simulated, fault, strategy=strategy, survive=survive(replaced))
            recorded_once(run, trial)
            assert all(torch.isfinite(tensor).all() for tensor in run.model.state_dict().values())
    for fault in ("kill=1@step:3:exchange", "kill=0@step:4:exchange"):
        run, trial = struck(simulated, fault, of=task(max_steps=5))  # it ends in the middle of an epoch
        equal(run, reference(task(max_steps=5)))
        recorded_once(run, trial, GLOBAL_ROWS[:5])
        assert [step for _, step in trial.seen.validations] == [3, 5]


def on_plateau(optimizer: torch.optim.Optimizer, total: int) -> Any:
    """Nothing is good enough after the first validation: each counts, and two of them halve the rate."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, threshold=0.9)


def leaping(optimizer: torch.optim.Optimizer, total: int) -> Any:
    """The last epochs spoil the model."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 6 else 50.0)


@slow
@pytest.mark.parametrize(
    ("schedule", "keep", "places"),
    [
        (
            on_plateau,
            "last",
            [(1, "validation", 2), (1, "collect", 4), (0, "ask validation", 2), (0, "told validation", 2)],
        ),
        (
            leaping,
            "best:validation_loss",
            [
                *((1, "validation", 1), (1, "collect", 1), (0, "ask validation", 2), (0, "ask validation", 3)),
                *((0, "told validation", 2), (0, "end", 1)),
            ],
        ),
    ],
)
def test_each_validation_counts_once(
    schedule: Any, keep: str, places: list[tuple[int, str, int]], simulated: Simulated
) -> None:
    """For a schedule that is stepped on it, and for the best model."""
    alone, given = Recording(), task(schedule=schedule, epochs=5)
    held = reference(given, callbacks=[alone], keep=keep)
    for number, (worker_id, place, call) in enumerate(places):
        strike = Strike(worker_id, place, call=call)
        run, trial = struck(simulated, strike, of=given, keep=keep, survive=survive(number % 2 == 0))
        equal(run, held)
        assert (trial.seen.rates, trial.seen.best) == (alone.rates, alone.best)
        assert run.info.get("kept") == held.info.get("kept")
        recorded_once(run, trial, [39, 39, 22] * 5)


@slow
def test_what_is_due_after_so_many_steps_is_done_once(simulated: Simulated) -> None:
    every, alone = {"validate_every": 7, "checkpoint_every": 5}, Recording()
    held = reference(callbacks=[alone], **every)
    assert [step for _, step in alone.validations] == [7, 9]
    befalls: list[str | Strike] = [one for one, _ in both("kill={}@step:5:save", "kill={}@step:6:exchange")]
    places = [(1, "ask sync"), (0, "ask sync"), (0, "told sync"), (1, "validation"), (0, "validation")]
    places += [(1, "collect"), (0, "collect"), (0, "ask validation"), (0, "told validation")]
    for befall in [*befalls, *(Strike(*place) for place in places)]:
        run, trial = struck(simulated, befall, **every)
        equal(run, held)
        recorded_once(run, trial)
        assert trial.seen.validations == alone.validations, befall
        saved = [event.tick for event in trial.events("checkpoint")]
        assert saved == [5, 9], befall


# -- rounds ----------------------------------------------------------------------------------------------------------------

WITH_ANOTHERS_ROWS = [Strike(1, "compute", call=6), Strike(0, "extra", call=2)]
AS_A_ROUND_CLOSES = [
    [Strike(1, "complete", call=2)],
    [Strike(1, "commit", call=2)],
    [Strike(0, "commit", call=2)],
    [Strike(1, "complete", call=3)],
    WITH_ANOTHERS_ROWS,
    [Strike(1, "compute", call=6), Strike(0, "complete", call=2)],
]


def rows_of_a_stream() -> Any:
    """What may be needed again is kept."""
    yield from torch.arange(66)


@slow
@pytest.mark.parametrize(
    ("number", "strategy", "fields"),
    [
        *((number, strategy, {}) for number, strategy in enumerate([*ROUNDS, ROUNDS[1] + ",compress=topk:1"])),
        *(
            (number, strategy, {"train_data": rows_of_a_stream, "order": None})
            for number, strategy in enumerate(ROUNDS)
        ),
    ],
)
def test_a_lost_workers_rows_are_in_the_same_round(
    number: int, strategy: str, fields: dict[str, Any], simulated: Simulated
) -> None:
    given = {"of": in_order(6, 11, **fields), "strategy": strategy}
    steps = "kill={}@step:5", "kill={}@step:7:exchange", "kill={}@step:0", "kill={}@step:4", "kill={}@step:10"
    for fault, replaced in half(both(*steps), number):
        run, trial = struck(simulated, fault, survive=survive(replaced), **given)
        assert lost(run) == [(int(fault[5]), "death")]
        # torchft#192: good gradients are thrown away; here the lost one's are
        assert run.rows["repeated"] <= PERIOD * 2
        each_in_a_round(run, trial.run_dir)
    for strikes in half(AS_A_ROUND_CLOSES, number):
        run, trial = struck(simulated, *strikes, **given)
        each_in_a_round(run, trial.run_dir)
    for workers, place in half([([1], "commit"), ([0], "commit"), ([1, 2], "commit"), ([1], "complete")], number):
        strikes = [Strike(worker_id, place, lose_peer, call=2) for worker_id in workers]
        run, trial = struck(simulated, *strikes, losses=0, **given)  # completed by all, or made again
        assert run.generations > 1
        assert run.rows["repeated"] == 0
        each_in_a_round(run, trial.run_dir)


@slow
def test_a_worker_is_lost_in_a_warmup_or_after_it(simulated: Simulated) -> None:
    """A step that all have made together is in no window: its rows are not dealt again."""
    given = {"of": in_order(6, 11), "strategy": f"local-sgd:period={PERIOD},warmup=5"}
    steps = "kill={}@step:0", "kill={}@step:2:commit", "kill={}@step:3:exchange", "kill={}@step:4", "kill={}@step:5"
    for fault, replaced in both(*steps, "kill={}@step:6"):
        run, trial = struck(simulated, fault, survive=survive(replaced), **given)
        each_in_a_round(run, trial.run_dir)
    for place in ("complete", "commit"):
        run, trial = struck(simulated, Strike(1, place, lose_peer, call=3), losses=0, **given)
        each_in_a_round(run, trial.run_dir)


@slow
def test_fragments_have_rounds_of_their_own(simulated: Simulated) -> None:
    given = {"of": in_fragments(), "strategy": STREAMING}
    steps = "kill={}@step:5", "kill={}@step:5:exchange", "kill={}@step:0", "kill={}@step:3", "kill={}@step:7:exchange"
    for fault, replaced in both(*steps):
        run, trial = struck(simulated, fault, survive=survive(replaced), **given)
        each_in_a_round_of_its_fragment(run, trial.run_dir)
    closing = [[Strike(1, "complete", call=2)], [Strike(0, "commit", call=2)], [Strike(1, "complete", call=5)]]
    closing += [[Strike(1, "commit", call=5)], WITH_ANOTHERS_ROWS]
    closing += [[Strike(1, "compute", call=6), Strike(0, "complete", call=3)]]
    for strikes in closing:
        run, trial = struck(simulated, *strikes, **given)
        each_in_a_round_of_its_fragment(run, trial.run_dir)
    for workers, call in (([1], 2), ([0, 2], 2), ([1], 5), ([0, 2], 5)):  # one has synced a fragment: all do
        strikes = [Strike(worker_id, "commit", lose_peer, call=call) for worker_id in workers]
        run, trial = struck(simulated, *strikes, losses=0, **given)
        assert run.rows["repeated"] == 0
        each_in_a_round_of_its_fragment(run, trial.run_dir)
    strategy = STREAMING.replace("period=4", "period=3")  # of three slices dealt to two: who trained more counts more
    run, trial = struck(
        simulated, "kill=1@step:3:exchange", of=in_fragments(), strategy=strategy, survive=survive(False)
    )
    each_in_a_round_of_its_fragment(run, trial.run_dir, period=3)


@slow
def test_fragments_on_their_way_are_sent_again(simulated: Simulated) -> None:
    """The mean under way is gone, what each worker had put into it is not: all rows are in the answer."""
    befalls: list[tuple[str | Strike, bool]] = [*both("kill={}@step:1:exchange", "kill={}@step:4", "kill={}@step:7")]
    befalls += [(Strike(0, "complete"), True), (Strike(0, "commit", call=2), False)]
    given: dict[str, Any] = {"of": in_fragments(), "strategy": ON_THEIR_WAY, "check_replicas_every": 1}
    for befall, replaced in befalls:
        run, _ = struck(simulated, befall, survive=survive(replaced), **given)
        counted(run, 12)
        assert float(run.model.of.detach().min()) > 0


@slow
@pytest.mark.parametrize("how", ["allreduce:compress={}", "diloco:period=3,compress={}"])
def test_an_exchange_is_remembered_once_all_have_it(how: str, simulated: Simulated) -> None:
    """Nobody is lost, but a connection breaks with the mean at hand. What each has yet to send is what it would be, and so are
    all later bits."""
    for codec in ("topk:0.2", "powersgd:1", "qsgd:4" if how.startswith("all") else "onebit"):
        strategy = how.format(codec)
        whole, _ = struck(simulated, strategy=strategy)
        for place in ("complete", "commit"):
            run, _ = struck(simulated, Strike(1, place, lose_peer, call=2), losses=0, strategy=strategy)
            assert run.generations > 1
            assert torch.equal(run.parameters, whole.parameters), (codec, place)


# -- at a server -----------------------------------------------------------------------------------------------------------

SLICES = {  # rows of a slice, or of all slices of a step, with three workers, two and one, and of the lost worker's alone
    "downpour:bound=0": (4, 6, 12),
    "downpour:bound=0,push_every=3,pull_every=3": (4, 6, 12),
    "quorum": (12, 8, 6, 4),
}


@slow
@pytest.mark.parametrize(("number", "strategy"), [*enumerate(SLICES)])
def test_in_step_at_a_server_each_row_is_in_one_step(
    number: int, strategy: str, simulated: Simulated, one_worker: Run
) -> None:
    given = {"of": in_order(12, 13), "strategy": strategy}
    steps = "kill={}@step:4", "kill={}@step:5:exchange", "kill={}@step:0", "kill={}@step:12"
    for fault, replaced in half(both(*steps), number):
        run, _ = struck(simulated, fault, survive=survive(replaced), **given)
        trained_once(run, 12, SLICES[strategy])
        assert run.rows["repeated"] >= 4 * ("exchange" not in fault)
    two = Strike(2, "compute", call=3)
    places = [[Strike(1, "exchange", call=3)], [Strike(0, "exchange", call=6)], [Strike(1, "end")]]
    places += [[two, Strike(0, place)] for place in ("extra", "ask membership")]
    places += [[two, Strike(0, "join", call=2)]]
    for strikes in half(places, number):
        run, _ = struck(simulated, *strikes, validate_every=6, **given)
        trained_once(run, 12, SLICES[strategy])
    if strategy == "quorum":  # of an epoch's last step: the gradient counts, nothing is repeated
        run, _ = struck(simulated, "kill=1@step:5:exchange", strategy="quorum")
        assert run.rows["repeated"] == 0
        equal(run, one_worker)
    given["of"] = in_order(12, 13, validation_data=torch.arange(12 * 13))
    run, _ = struck(simulated, Strike(0, "validation"), validate_every=6, **given)
    trained_once(run, 12, SLICES[strategy])


@slow
def test_every_strategy_at_a_server_goes_on(simulated: Simulated) -> None:
    in_step = ["easgd:bound=0,period=2", "eamsgd:bound=0,period=2", "dynsgd:bound=0", "agn:bound=0,window=2"]
    in_step += ["distance:bound=0", "diloco:period=3,via=server,bound=0", "downpour:bound=0,rule=adam"]
    for strategy in [*in_step, "downpour:bound=0,compress=topk:0.5", "quorum:backups=1"]:
        run, _ = struck(simulated, "kill=1@step:5", of=in_order(12, 13), strategy=strategy)
        assert run.rows["total"] == 12 * 13
        assert [row["tick"] for row in run.history] == list(range(13))
        if not any(one in strategy for one in ("topk", "backups", "easgd", "eamsgd")):  # they may leave some out
            assert run.model.of.detach().min() > 0, strategy
    own_pace = ["easgd:period=2", "eamsgd:period=2", "dynsgd", "agn:window=2", "distance", "diloco:period=3,via=server"]
    for strategy in own_pace:
        run, _ = struck(simulated, "kill=1@step:3", of=numbered(72, 6, epochs=2), strategy=strategy)
        assert run.rows["total"] == 2 * 72
        assert sorted(row["tick"] for row in run.history) == list(range(24))
        assert run.model.of.detach().min() > 0, strategy


OWN_PACE = ["downpour", "downpour:push_every=3,pull_every=3", "downpour:bound=2", "downpour:bound=1,warmup=8"]
PAIRS = ["gossip:graph=pairs", "gossip:graph=pairs,period=3", "gossip:graph=pairs,bound=2"]


@slow
@pytest.mark.parametrize(("number", "strategy"), [*enumerate([*OWN_PACE, *PAIRS])])
def test_at_their_own_pace_each_row_is_at_the_server_once(number: int, strategy: str, simulated: Simulated) -> None:
    given = {"of": numbered(72, 6, epochs=2), "strategy": strategy}
    faults = both("kill={}@step:3", "kill={}@step:5:exchange", "kill={}@step:0")
    befalls: list[tuple[list[str | Strike], bool]] = [([fault], replaced) for fault, replaced in faults]
    befalls += [(["kill=0@step:4", "kill=1@step:5"], replaced) for replaced in (True, False)]
    places = [(1, "exchange", 2), (0, "exchange", 3), (1, "wait", 1), (0, "wait", 1), (1, "collect", 1)]
    befalls += [([Strike(worker_id, place, call=call)], True) for worker_id, place, call in places]
    befalls += [([Strike(0, "compute", call=3), Strike(0, "join", process=2)], True)]
    for befall, replaced in half(befalls, number):
        run, _ = struck(simulated, *befall, survive=survive(replaced), **given)
        each_at_the_server(run, 6, epochs=2, share=3 if strategy in PAIRS else 1)
    if strategy in OWN_PACE:
        run, _ = struck(simulated, "leave=1@step:2", losses=0, **given)  # with an open window
        each_at_the_server(run, 6, epochs=2)


# -- starting again --------------------------------------------------------------------------------------------------------


@slow
def test_a_run_starts_again(simulated: Simulated, one_worker: Run) -> None:
    cases: list[tuple[list[str | Strike], str, int, int]] = [
        (["kill=1@step:5"], "max_restarts=1", 3, 3),
        (["kill=1@step:1"], "max_restarts=1", 3, 0),
        (["kill=1@step:7"], "max_restarts=1,replace=false", 3, 6),
        (["kill=0@step:4"], "max_losses=any,max_restarts=1", 1, 3),
        (["kill=1@step:4"], "max_losses=any,min_workers=3,replace=false,wait_s=0.3,max_restarts=1", 3, 3),
        ([Strike(1, "compute", act=raises(MemoryError()), call=5)], "max_restarts=3", 3, 3),
        (["kill=2@step:4", "kill=1@step:7:exchange"], "max_losses=1,max_restarts=1,replace=false", 3, 6),
    ]
    for befalls, survives, workers, start in cases:
        trial = simulated()
        run = trial.train(*befalls, survive=survives, workers=workers, run_dir=trial.run_dir)
        assert [one["step"] for one in run.restarts] == [start], survives
        assert ("none joined within 0.3 s" in run.restarts[0]["message"]) == ("wait_s" in survives)
        equal(run, one_worker)
        counted_once(run)
    assert lost(run) == [(2, "death")]
    assert run.generations == 3  # the run goes on in the one after the last, with the same budget
    assert max(event.generation for event in trial.events("step", "membership")) == 2
    trial = simulated()
    given: dict[str, Any] = {"run_dir": trial.run_dir}
    with pytest.raises(mh.WorkerFailed, match="max_restarts is 1"):
        trial.train("kill=1@step:4,kill=2@step:5", survive="max_restarts=1", **given)
    equal(trial.train(resume=True, survive=None, **given), one_worker)
    # `-n 1:2`, which torchrun's elastic agent did not survive (pytorch#182221)
    survives = "min_workers=1,max_workers=2,max_losses=any,replace=false"
    run, _ = struck(simulated, "kill=0@step:4:exchange", survive=survives, workers=2)
    assert (run.generations, run.restarts) == (2, [])
    equal(run, one_worker)


@slow
@pytest.mark.parametrize(
    ("strategy", "workers"), [("solo", 1), ("ensemble", 2), ("local-sgd:period=end", 2), ("downpour", 2)]
)
def test_a_strategy_that_cannot_lose_a_worker_starts_again(strategy: str, workers: int, simulated: Simulated) -> None:
    given: dict[str, Any] = {"of": task(epochs=4, batch_size=20), "strategy": strategy, "workers": workers}
    run, _ = struck(simulated, f"kill={workers - 1}@step:4", losses=0, survive="max_restarts=1", **given)
    assert len(run.restarts) == 1
    assert run.rows["total"] == 4 * 100
    if strategy != "downpour":  # it follows the order of what happens
        equal(run, simulated().train(survive=None, **given))


# -- gradients that are not finite -----------------------------------------------------------------------------------------


@slow
def test_the_error_names_the_worker_whose_own_gradient_is_not_finite(simulated: Simulated) -> None:
    for survives, strategy in (
        ("max_losses=2", "allreduce"),
        ("max_losses=2", "allreduce:overlap=true"),
        (None, "allreduce:overlap=true"),
        (None, "local-sgd:period=2,warmup=9"),
        (None, "local-sgd:period=3"),
    ):
        trial, alone = simulated(), strategy.endswith("=3")  # who moves by its own gradient asks nobody
        with pytest.raises(mh.ManyhandsError, match="gradient of step 4 is not finite") as caught:
            trial.train("nan=1@step:4", survive=survives, strategy=strategy)
        assert ("own gradient of worker 1 alone is not finite" in str(caught.value)) != alone
        assert (trial.seen.faults, trial.seen.changes, trial.seen.ends) == (["nan=1@step:4"], [], ["failed"])
    with pytest.raises(mh.ManyhandsError, match="own gradients of workers 0 and 2 are not finite"):
        simulated().train("nan=0@step:4,nan=2@step:4", of=task(micro_batch_size=5))
    for survives in ("max_losses=2", None):
        run, _ = struck(simulated, "nan=1@step:4", losses=0, survive=survives, nonfinite="skip")
        assert run.rows["unused"] == GLOBAL_ROWS[4]
        assert [row["tick"] for row in run.history if row["unused"]] == [4]
        assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())
