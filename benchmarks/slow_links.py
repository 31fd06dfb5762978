"""Strategies where links are slow, beside torch's DDP: rows/s over links of 100 Mbit/s, and the loss after equal rows.

    python benchmarks/slow_links.py [--part rates|predictions|losses|all] [--blocks 3] [--rate 100mbit] [--quick] [--json FILE]

Four workers of one thread on four hosts: network namespaces joined by a switch, each host's card limited by `tc tbf` in
both directions. They train `chars` with a transformer of 3.2 M parameters. `ddp` is DistributedDataParallel on gloo, in
the same processes: same rows in the same order, same optimizer, clipping and schedule. Neither side encrypts (gloo cannot).

rates   In every block each strategy and DDP in turn, in an order that rotates; start-up and the first steps left out.
        Windows of `local-sgd` and `diloco` are whole periods. `limit` is what compute and link allow by arithmetic: batch /
        (seconds of a step when all four compute and nobody exchanges + bytes a worker sends in a step / rate of the link).
        Bytes are the ledger's, DDP's those of a ring. Headers (4.5 % of a packet) and acknowledgements are not counted.
predictions  Engine `sim` with this machine's compute, as `manyhands calibrate` measures it with four workers, and cards of
        that rate; of DDP there is none. What codecs compute is in it, and what headers take of a card.
losses  As many steps of each, without limits on the cards: a synchronous strategy computes the same bits at any speed,
        and all of these are synchronous. That is checked on the steps that both parts make.

It needs root, and `ip`, `tc`, `nsenter`, `unshare` and `hostname`. Namespaces and processes end with this one, however it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import slow_links_tables as tables
from machine import facts
from slow_links_network import CARD, Network, network
from slow_links_predicted import predictions
from slow_links_tables import AFTER, ALONE, WARM_UP, Row
from slow_links_workers import DDP, Job, Model

WORKERS = 4
ALONE_SPEC = "local-sgd:period=end"
DILOCO = "diloco:period=50"
STEPS = {  # measured in a block: whole periods
    ALONE: 20,
    DDP: 6,
    "allreduce": 6,
    "allreduce:compress=topk:0.01": 12,
    "allreduce:compress=onebit": 12,
    "allreduce:compress=threshold:1e-3": 6,
    "allreduce:compress=powersgd:2": 12,
    "allreduce:compress=qsgd:4": 12,
    "allreduce:compress=bf16": 6,
    "allreduce:compress=int8": 6,
    "local-sgd:period=8": 24,
    DILOCO: 100,
    "gossip": 6,
}
RATES = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}  # bits a second
BEGINNING_S, STEP_S = 300.0, 5.0  # longer on the average, and the part is given up
ENDING_S = 20.0
_WHERE = {
    "rates": ", on cards of {rate}",
    "predictions": ", for cards of {rate}",
    "losses": ", on cards without limits",
}

PARTS = ("rates", "predictions", "losses")


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    machine = facts()
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for part in PARTS if options.part == "all" else (options.part,):
            begun = time.monotonic()
            print(f"\n{part}{_WHERE[part].format(rate=options.rate)}", flush=True)
            found[part] = measured(part, options)
            print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        if found:
            report(found, options, machine)


def report(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace, machine: dict[str, int | str]) -> None:
    """Of the parts that came to their end."""
    table: dict[str, Row] = {name: {} for name in options.steps}
    batch_size, loss_steps = options.model.batch_size, options.model.total_steps
    numbers = {"machine": machine, "model": asdict(options.model), "rate": options.rate, "rows": table, "parts": found}
    if "rates" in found:
        tables.add_rates(table, found["rates"], batch_size, bits_of(options.rate))
    if "predictions" in found:
        tables.add_predictions(table, found["predictions"], batch_size)
    if "losses" in found:
        tables.add_losses(table, found["losses"])
    tables.show(table, batch_size, loss_steps)
    if "rates" in found and "losses" in found:
        numbers["same_bits"] = tables.show_same_bits(found["rates"], found["losses"])
    numbers["goals"] = tables.show_goals(table)
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


def measured(part: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What came of each job of a part."""
    jobs = jobs_of(part, options)
    if part == "predictions":
        return predictions(options.model, jobs, WORKERS, bits_of(options.rate))
    limit_s = BEGINNING_S + STEP_S * sum(job.steps for job in jobs)
    return launched(options, jobs, options.rate if part == "rates" else "", limit_s)


def jobs_of(part: str, options: argparse.Namespace) -> list[Job]:
    names = list(options.steps)
    if part == "losses":
        steps = options.model.total_steps
        return [Job(name=name, spec=name, steps=steps, test=True) for name in names if name != ALONE]
    if part == "predictions":
        names = [name for name in names if name != DDP]
    jobs = []
    for block in range(1 if part == "predictions" else options.blocks):
        shift = block * len(names) // options.blocks
        for name in names[shift:] + names[:shift]:
            spec = ALONE_SPEC if name == ALONE else name
            jobs.append(Job(name=name, spec=spec, steps=WARM_UP + options.steps[name] + AFTER, block=block))
    return jobs


def steps_of(name: str) -> int:
    """That count in a block; two whole periods where it has one."""
    period = re.search(r"period=(\d+)", name)
    return STEPS.get(name, 2 * int(period[1]) if period else 8)


# -- the run ---------------------------------------------------------------------------------------------------------


def launched(options: argparse.Namespace, jobs: list[Job], rate: str, limit_s: float) -> list[dict[str, Any]]:
    """What the workers say of each job. Raises SystemExit where a host fails, or where it takes longer than `limit_s`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slow-links-")))
        hosts = stack.enter_context(network(WORKERS, rate))
        asked = {"model": asdict(options.model), "jobs": [asdict(job) for job in jobs], "workers": WORKERS}
        asked |= {"listen": hosts.address(0), "ports": "7000-7009", "store": str(folder / "store")}
        (folder / "asked.json").write_text(json.dumps(asked))
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end, processes)
        code = f"import slow_links_workers; slow_links_workers.main({str(folder / 'asked.json')!r}, {str(folder / 'found.json')!r})"
        environment = _environment(folder)
        processes.append(hosts.start(0, sys.executable, "-c", code, env=environment))
        _await(folder / "run.pem", processes, limit_s)
        for host in range(1, WORKERS):
            processes.append(_joined(hosts, host, folder, environment))
        _watch(processes, folder, limit_s)
        found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return found


def _environment(folder: Path) -> dict[str, str]:
    """Of all hosts: one card, one file of credentials, modules from here, temporary files that vanish with `folder`."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MANYHANDS_CREDENTIALS": str(folder / "run.pem"),
        "GLOO_SOCKET_IFNAME": CARD,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }


def _joined(hosts: Network, host: int, folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    code = "from manyhands.cli.commands import main; main()"
    more = ["join", f"{hosts.address(0)}:7000", "--workers", "1", "--no-tls", "--plain-network"]
    with (folder / f"host{host}.log").open("w") as log:
        return hosts.start(host, sys.executable, "-c", code, *more, env=environment, stdout=log, stderr=log)


def _await(path: Path, processes: list[subprocess.Popen[str]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not path.exists() and processes[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)


def _watch(processes: list[subprocess.Popen[str]], folder: Path, limit_s: float) -> None:
    """Until the driver is done."""
    try:
        code = processes[0].wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    if code != 0:
        for log in sorted(folder.glob("host*.log")):
            print(f"-- {log.stem}: {log.read_text().strip() or 'said nothing'}", file=sys.stderr)
        sys.exit(f"not done after {limit_s:.0f} s: given up" if code is None else f"the driver ended with {code}")


def _end(processes: list[subprocess.Popen[str]]) -> None:
    """The driver first: the others end with it. Who does not within seconds is killed."""
    if processes and processes[0].poll() is None:
        processes[0].terminate()
    for process in processes:
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# -- options ---------------------------------------------------------------------------------------------------------


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rate", default="100mbit", help="of each card, both ways, as tc has it")
    parser.add_argument("--loss-steps", type=int, default=Model.total_steps, help="of the losses, and of the schedule")
    parser.add_argument("--batch-size", type=int, default=Model.batch_size, help="rows a step of all workers")
    parser.add_argument("--learning-rate", type=float, default=Model.rate, help="at its peak")
    parser.add_argument("--only", nargs="+", default=None, help="these strategies; DDP and the floor always")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: whether it runs at all")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    options.model = Model(batch_size=options.batch_size, rate=options.learning_rate, total_steps=options.loss_steps)
    options.steps = dict(STEPS)
    if options.only:
        options.steps = {name: steps_of(name) for name in (ALONE, DDP, *options.only)}
    if options.quick:
        options.model, options.blocks = replace(options.model, width=64, layers=1, total_steps=12), 1
        options.steps = {name.replace("period=50", "period=4"): 4 for name in options.steps}
        options.steps.pop("local-sgd:period=8", None)
    bits_of(options.rate)
    return options


def bits_of(rate: str) -> float:
    """100mbit -> 1e8."""
    for unit, factor in RATES.items():
        if rate.endswith(unit):
            return float(rate[: -len(unit)]) * factor
    sys.exit(f"--rate {rate}: a number with one of {', '.join(RATES)} is expected, such as 100mbit")


if __name__ == "__main__":
    main()
