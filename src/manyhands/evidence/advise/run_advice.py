"""Advice about one run: what heeding it would win orders it, so that the first line is the one that matters most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.evidence.advise import exchange_advice
from manyhands.evidence.advise.exchange_advice import share_won, speedup
from manyhands.evidence.advise.run_facts import NEAR_LIMIT, SHORT_STEP_S, Advice, RunMeasurements, ms, times
from manyhands.server.staleness import limit
from manyhands.units import count, percent, size

INPUT_SHARE = 0.20
WAIT_SHARE = 0.15
UNUSED_SHARE = 0.10
FEW_ROWS_STEP_S = 0.020
ENOUGH_STEPS = 10  # below, what a first step costs once (memory, caches, the first rows) is a tenth of the time or more


def advise(measured: RunMeasurements) -> Advice:
    """The line that matters most."""
    return all_advice(measured)[0]


def all_advice(m: RunMeasurements) -> list[Advice]:
    """All that applies, what wins most first; of equal ones, in the order of RULES. At least one."""
    if not m.steps or m.total_s <= 0:
        text = "no step was made, so nothing was measured."
        return [Advice(kind="unmeasured", text=text, numbers={"steps": m.steps})]
    if m.assumed:
        text = (
            "none: these seconds follow from costs that were assumed. Measure a machine (manyhands calibrate), and simulate it (--profile), "
            "to get advice."
        )
        return [Advice(kind="assumed", text=text)]
    few = m.steps < ENOUGH_STEPS and not m.simulated
    if found := [advice for rule in (NOT_TIMED if few else RULES) if (advice := rule(m)) is not None]:
        return sorted(found, key=lambda advice: -advice.wins)
    if few:
        text = f"too few steps to judge: {count(m.steps, 'step')}, and the first ones take longer. Train at least {ENOUGH_STEPS}."
        return [Advice(kind="too-few-steps", text=text, numbers={"steps": m.steps})]
    efficiency = m.share(m.compute_s)
    text = f"fine: workers compute {percent(efficiency)} of the time ({ms(m.compute_per_step_s)} ms a step)."
    return [Advice(kind="fine", text=text, numbers={"efficiency": efficiency})]


def _unstable(m: RunMeasurements) -> Advice | None:
    """Rate times curvature of a push is at 80 % or more of what its staleness bears: 2·sin(π / (2(2τ + 1))), see
    staleness.py.

    Beyond it a quadratic diverges, and all of the time is lost.
    """
    if not m.near_limit or m.push_gain is None:
        return None
    most = limit(m.late)
    numbers = {"late": m.late, "gain": m.push_gain, "limit": most}
    found = (
        f"9 of 10 updates are up to {count(m.late, 'version')} late, which bears rate x curvature up to {most:.3g}; "
        f"it is {m.push_gain:.3g}."
    )
    in_step = ", or set bound=0" if "bound" in m.options else ""
    if m.push_gain <= most:
        text = f"near its limit: {found} Raise neither the rate nor the workers{in_step}."
        return Advice(kind="near-limit", text=text, numbers=numbers)
    factor = NEAR_LIMIT * most / m.push_gain
    lower = f"to {m.rate * factor:.2g}" if m.rate else f"by {percent(1 - factor)}"
    text = f"unstable: {found} Lower the rate {lower}{in_step}."
    return Advice(kind="unstable", text=text, numbers=numbers, wins=1.0)


def _input_bound(m: RunMeasurements) -> Advice | None:
    """Input takes at least 20 % of the time: without it the run would be at least 1 / (1 - 0.20) = 1.25 times as fast.

    Validity of the single processor approach to achieving large scale computing capabilities, Amdahl, 1967.
    """
    share = m.share(m.input_s)
    if share < INPUT_SHARE:
        return None
    faster = speedup(m.total_s, m.input_s)
    text = (
        f"input-bound: {percent(share)} of the time waits for rows ({ms(m.input_s / m.steps)} ms a step). {_sooner(m)}: up to "
        f"{times(faster)} as fast."
    )
    numbers = {"input_share": share, "speedup": faster}
    return Advice(kind="input-bound", text=text, numbers=numbers, wins=share_won(faster))


def _sooner(m: RunMeasurements) -> str:
    """How rows would come sooner, by what loads them now: rows in memory need no loader processes, and start none."""
    if m.input:
        return _sooner_from_files(m)
    if m.loader_option and m.loader_processes:
        return f"Load them with {m.loader_option} {2 * m.loader_processes} instead of {m.loader_processes}, or prepare them once as arrays"
    if m.loader_option:
        return f"Load them beside the training with {m.loader_option} 2, or prepare them once as arrays"
    if m.loader_processes:
        return "A process loads them beside the training already: prepare them once as arrays"
    if m.own_pace:
        return "They are columns already, leased slice by slice: raise --batch-size, so that fewer leases are asked for"
    return "They are columns already: leave out those that are not used, or do once what collate does"


def _sooner_from_files(m: RunMeasurements) -> str:
    """Of rows that are read of files while the run trains."""
    blocks = m.input["hits"] + m.input["misses"]
    if not blocks:
        room = size(max(1e9, 4 * m.input["stored_bytes"])).replace(" ", "")
        return f'Keep decoded blocks on each host, shards(…, cache="{room}"), or read with more threads='
    if m.input["hits"] < blocks / 2:
        return "The cache had few of the blocks: later epochs are faster where it can hold them all (cache=)"
    return "The cache has the blocks already: read with more threads=, leave out columns, or do once what decode does"


def _too_short(m: RunMeasurements) -> Advice | None:
    """Several workers, each computing under 10 ms a step.

    What a step costs whatever its rows (calling the model's operators, the optimizer, one exchange) is 1 to 3 ms on
    CPUs: at 10 ms that is already a tenth to a third of the step, and it does not shrink with more workers. A step of
    2.9 ms took 35 % longer where two workers exchanged (benchmarks/step.py, MLP). It wins what is left where one
    process computes the shares of all, one after the other.
    """
    if not m.too_short:
        return None
    alone_s = m.input_s + m.workers * m.compute_s
    text = (
        f"too short to distribute: a step computes {ms(m.compute_per_step_s)} ms, under 10 ms, where costs that no worker takes "
        "off another prevail. Stay with one process (--workers 1), or raise --batch-size."
    )
    numbers = {"compute_ms_per_step": m.compute_per_step_s * 1000}
    return Advice(kind="too-short", text=text, numbers=numbers, wins=max(0.0, 1 - alone_s / m.total_s))


def _threads(m: RunMeasurements) -> Advice | None:
    """More threads than cores compute no faster, and wait for each other.

    On 2 cores a mean of 4 KB takes 2 workers 0.03 ms and 4 workers 0.11 (benchmarks/all_reduce.py). It wins what
    workers wait.
    """
    crowded = m.crowded
    if crowded is None or m.too_short:
        return None
    each = crowded.threads / crowded.workers
    ways = []
    if m.workers > 1:
        fewer = max(1, int(crowded.cores // each))
        ways.append(f"--workers {fewer}" if crowded.workers == m.workers else f"at most {count(fewer, 'worker')} there")
    if each > 1:
        ways.append(f"--threads-per-worker {max(1, crowded.cores // crowded.workers)}")
    where = f" of {crowded.host}" if crowded.workers < m.workers else ""
    text = (
        f"{count(crowded.threads, 'thread')} share {count(crowded.cores, 'core')}{where}, so that some wait while "
        f"others compute: use {' or '.join(ways)}."
    )
    wins = m.share(m.wait_s) if m.workers > 1 else 0.0
    return Advice(kind="threads", text=text, numbers={"threads": crowded.threads, "cores": crowded.cores}, wins=wins)


def _stragglers(m: RunMeasurements) -> Advice | None:
    """Workers wait for the slowest at least 15 % of the time: 1 / (1 - 0.15) = 1.18 times as fast if they were even.

    Equal workers wait 2 to 3 % of a step (benchmarks/step.py). One that computes 10 % longer than the mean is named;
    below that it is jitter. Where threads share cores, that rule applies.
    """
    share = m.share(m.wait_s)
    if not m.worth_sharing or share < WAIT_SHARE or _threads(m) is not None:
        return None
    numbers: dict[str, Any] = {"wait_share": share}
    text = f"waiting: {percent(share)} of the time workers wait for the slowest. {_why_uneven(m, numbers)}"
    return Advice(kind="stragglers", text=text, numbers=numbers, wins=share)


def _why_uneven(m: RunMeasurements, numbers: dict[str, Any]) -> str:
    rarer = _wait_less(m)
    if m.even:
        return f"They are equally slow on the whole, so it is jitter: {rarer}."
    known = m.compute_of_workers_s
    slowest = max(range(len(known)), key=known.__getitem__)
    more = known[slowest] * len(known) / sum(known) - 1
    numbers |= {"slowest": slowest, "slower_by": more}
    return f"Worker {slowest} computes {percent(more)} longer than the mean: free its core, or {rarer}."


def _wait_less(m: RunMeasurements) -> str:
    """By the strategy's options: without a bound nobody is held back, and workers wait only where all meet."""
    if m.near_limit:
        return "use fewer workers"
    if m.options.get("bound") is not None:
        return "raise bound"
    if "backups" in m.options:
        return "raise backups"
    if m.own_pace or not m.needs.one_model or m.options.get("period") == "end":
        return "validate and checkpoint less often, where all meet"
    option = m.traits.period
    return f"raise {option}" if option else "average less often (local-sgd)"


def _few_rows(m: RunMeasurements) -> Advice | None:
    """Workers compute 1 to 3 rows a step, in under 20 ms: a row then costs more than one of 32.

    benchmarks/rows.py has by how much for an MLP, a CNN and a transformer; of another model that is not known, so the
    line promises nothing. Large rows fill a step alone.
    """
    if not m.worth_sharing or m.simulated or not 0 < m.rows_per_step < 4 or m.compute_per_step_s >= FEW_ROWS_STEP_S:
        return None
    text = (
        f"few rows: {m.rows_per_step:.2g} a worker and step, where each tends to take longer than among many. Raise "
        f"--batch-size to {8 * m.workers}, or use fewer workers."
    )
    return Advice(kind="few-rows", text=text, numbers={"rows_per_step": m.rows_per_step})


def _unused_rows(m: RunMeasurements) -> Advice | None:
    """More than 10 % of the rows had no effect: the time that they took is lost.

    b backups of N workers cost b/N of the rows: Revisiting Distributed Synchronous SGD, Chen, Pan, Monga, Bengio,
    Jozefowicz, 2016.
    """
    if m.unused <= UNUSED_SHARE:
        return None
    why = "were computed and came too late. Use fewer backups, or free the late workers."
    if not m.traits.drops:
        clip = "clip to less" if m.clipped else "clip with --clip-norm 1"
        why = f"were skipped, because their gradient was not finite. Lower the rate, or {clip}."
    text = f"unused rows: {percent(m.unused)} of all {why}"
    return Advice(kind="unused-rows", text=text, numbers={"unused": m.unused}, wins=m.unused)


def _solo(m: RunMeasurements) -> Advice | None:
    """One worker: two can pay when a step computes 10 ms or more and cores are idle.

    Where its threads have all cores already, two workers of half the threads gain little or lose: a transformer's step
    took 75 ms on 2 workers and 89 ms in one process with 2 threads, an MLP's 3.9 and 2.8 (benchmarks/step.py).
    """
    if m.workers > 1:
        return None
    step, idle = f"{ms(m.compute_per_step_s)} ms", m.cores - m.threads_per_worker
    if m.compute_per_step_s < SHORT_STEP_S:
        text = f"one process is right: a step computes {step}, and under 10 ms sharing it rarely pays."
    elif m.device != "cpu":
        text = f"one worker on {m.device}, {step} a step: with another GPU, --workers 2 can pay."
    elif idle > 0:
        text = f"try --workers 2: a step computes {step}, and {idle} of {m.cores} cores {'is' if idle == 1 else 'are'} idle."
    elif m.cores > 1:
        text = (
            f"one process already has all {m.cores} cores ({step} a step): --workers 2 gains only where its threads wait for "
            "each other; try it and compare rows/s."
        )
    else:
        text = f"one process is right: there is one core, and a second worker would share it ({step} a step)."
    return Advice(
        kind="solo", text=text, numbers={"compute_ms_per_step": m.compute_per_step_s * 1000, "idle_cores": idle}
    )


RULES: tuple[Callable[[RunMeasurements], Advice | None], ...] = (
    _unstable,
    _input_bound,
    _too_short,
    _threads,
    _stragglers,
    exchange_advice.exchange_bound,
    exchange_advice.compress,
    exchange_advice.codec_costs,
    exchange_advice.server_costs,
    _few_rows,
    _unused_rows,
    _solo,
)
NOT_TIMED = (_unstable, _unused_rows)  # rules that look at no seconds
