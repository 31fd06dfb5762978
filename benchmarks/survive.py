"""What surviving costs: from SIGKILL to the next committed step, to a replacement's first step, and each step meanwhile.

    python benchmarks/survive.py kill [--repeats 20] [--models small,large] [--variants stays,ring3,…] [--json FILE]
    python benchmarks/survive.py step [--repeats 20] [--models mlp,cnn,transformer] [--scale 1.0] [--json FILE]

**kill.** Three workers of this machine train with allreduce (small: 1 M float32 parameters, SGD; large: 25 M, Adam with
its two moments). Once all of them are under way, one gets SIGKILL from here, at a random moment of a step, each worker
in turn. One kill is one launch of the command, and the variants alternate:

    stays      manyhands train --survive max_losses=any,replace=false: two workers go on
    replaces   manyhands train --survive max_losses=any: besides, a process is started in the killed one's place
    ring3      stays, with three hosts of this machine, a worker each, in a ring over TLS on loopback; ring5: five
    torchrun   torchrun --max-restarts 3, DDP over gloo, the same model, rows and optimizer; rank 0 saves a checkpoint
               every so many steps, and after the restart all ranks load the newest
               (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: with torch 2.13's default its restarts on one host fail)

Each worker notes when its optimizer has stepped: that is a commit. Notes, kill and launch have times of one clock
(CLOCK_MONOTONIC, which `time.perf_counter` reads on Linux). A worker's event `step` comes a step later, because its
record is held back, and the recorder moves it to the driver's clock: the notes are exact.

    next commit        from the kill until the last survivor has committed a step of the next generation. What is still
                       committed of the generation before does not count. With torchrun: until all ranks, which are new
                       processes, have committed one. The steps since its checkpoint are lost besides; they are counted.
    first step         from the kill until the process in the killed one's place has committed
    fresh              from the start of the command until all workers have committed, as `benchmarks/start.py`
    replaced / fresh   the ratio of the two, in the same launch
    bytes copied       what a survivor sent besides means while the group was formed (its ledger), and whether its
                       parameters are where they were (address in memory)

torchft and Horovod Elastic are the nearer peers. They are not installed here, and do not go by `pip install` alone
(torchft needs its lighthouse, Horovod is built against the installed torch), so that they are left out.

**step.** Two workers, one thread each, train a model with and without `survive`, in turns, in launches of their own. The
table shows the median step of each and the ratio: the median over pairs of launches, with its interval (95 %, by the
order of the pairs). A step's duration is the distance of two rows of `Run.history`; the first tenth is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import machine

WORKERS = {"ring5": 5}
"""Of a variant; of the others 3."""
DEADLINE_S = 120.0
POLL_S = 0.01
EPOCH = 50  # steps of one, where steps are compared
STARTED = 12  # commits of each worker before one is killed
GOALS = {
    "small": "≤ 0.25 s, none above 1 s",
    "large": "≤ 1 s",
    "replaced / fresh": "≤ 1.5",
    "ring3": "≤ 0.5 s",
    "ring5": "≤ 1.2 s",
    "step": "≤ 1.02",
}
VARIANTS = ("stays", "replaces", "ring3", "ring5", "torchrun")

SHARED = '''
"""What both sides train, and how they note their commits."""
import json, os, time
import torch
from torch import nn

LARGE = os.environ["BENCH_MODEL"] == "large"
WIDTH, BATCH = (5000, 24) if LARGE else (1000, 24)  # 25 M or 1 M parameters; rows
SAVE_EVERY = 10 if LARGE else 50

def model():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)

def optimizer(model):
    if LARGE:
        return torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)  # seven times as fast on a CPU as the default
    return torch.optim.SGD(model.parameters(), lr=1e-4)

def rows():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH * 100, WIDTH, generator=generator) for _ in range(2)]

def noted(optimizer, describe):
    """The optimizer, whose every step appends a line to the notes."""
    notes = os.open(os.environ["BENCH_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    first = optimizer.param_groups[0]["params"][0]
    def committed(*_):
        note = {"time": time.perf_counter(), "pid": os.getpid(), "address": first.data_ptr(), **describe()}
        os.write(notes, (json.dumps(note) + "\\n").encode())
    optimizer.register_step_post_hook(committed)
    return optimizer
'''
OURS = """
import manyhands as mh
import shared

def describe():
    worker = mh.worker()
    sent = worker.group.ledger.as_dict()
    other = {name: counts["bytes"] for name, counts in sent.items() if not name.startswith("mean")}
    return {"worker": worker.worker_id, "generation": worker.generation, "size": worker.size, "other": other}

def task():
    return mh.Task(
        model=shared.model,
        loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean(),
        optimizer=lambda model: shared.noted(shared.optimizer(model), describe),
        train_data=tuple(shared.rows()), batch_size=shared.BATCH, epochs=1_000_000,
    )
"""
PEER = """
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import shared

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
restarts, saved = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["BENCH_NOTES"] + ".checkpoint"
model = shared.model()
step = 0
optimizer = shared.noted(
    shared.optimizer(model), lambda: {"worker": rank, "generation": restarts, "size": size, "step": step}
)
if os.path.exists(saved):
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
ddp = DistributedDataParallel(model)
x, y = shared.rows()
own = shared.BATCH // size
while True:
    begin = step * shared.BATCH % len(x) + rank * own
    optimizer.zero_grad()
    loss = ((ddp(x[begin : begin + own]) - y[begin : begin + own]) ** 2).mean()
    loss.backward()
    optimizer.step()
    loss.item()
    step += 1
    if step % shared.SAVE_EVERY == 0 and rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, saved + ".new")
        os.replace(saved + ".new", saved)
"""
COMMAND = [sys.executable, "-c", "import manyhands.cli.commands; manyhands.cli.commands.main()"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
RINGS = ("ring3", "ring5")
SURVIVE = {"replaces": "max_losses=any", **dict.fromkeys(("stays", *RINGS), "max_losses=any,replace=false")}


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was launched is ended, too
    facts = machine.facts()
    print(f"load {os.getloadavg()[0]:.1f} before")
    rows = (kill if options.what == "kill" else step)(options)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "what": options.what, "rows": rows}, indent=1) + "\n")


# -- kill: one launch, one kill ----------------------------------------------------------------------------------------


def kill(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """{model: what each launch measured}, printed."""
    found: dict[str, list[dict[str, Any]]] = {}
    moments = random.Random(0)
    for model in options.models:
        found[model] = []
        for repeat in range(options.repeats):
            for variant in options.variants:
                found[model].append({"variant": variant, **one_kill(model, variant, repeat, moments)})
        _print_kills(model, found[model])
    return found


def one_kill(model: str, variant: str, repeat: int, moments: random.Random) -> dict[str, Any]:
    """Seconds from the launch to all first commits, and from the kill to what follows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        with launched(model, variant, folder) as notes:
            workers = WORKERS.get(variant, 3)
            notes.wait(lambda: len(notes.first) == workers)
            fresh = max(first["time"] for first in notes.first.values()) - began
            notes.wait(lambda: notes.fewest >= _before_kill(model, variant))
            victim = next(pid for pid, first in notes.first.items() if first["worker"] == repeat % workers)
            time.sleep(moments.uniform(0, notes.step_s))
            notes.read()
            killed, generation = time.perf_counter(), notes.newest[victim]["generation"]
            os.kill(victim, signal.SIGKILL)
            after = notes.wait(lambda: _after(notes, variant, victim, generation))
            row = {"fresh_s": fresh, "step_s": notes.step_s, "next_commit_s": after[-1]["time"] - killed}
            if variant == "torchrun":
                return row | {"lost_steps": notes.newest[victim]["step"] + 1 - min(note["step"] for note in after)}
            last = {note["pid"]: notes.newest_of(note["pid"], generation) for note in after}
            row["bytes_copied"] = max(
                sum(note["other"].values()) - sum(last[note["pid"]]["other"].values()) for note in after
            )
            row["moved"] = any(note["address"] != last[note["pid"]]["address"] for note in after)
            if variant == "replaces":
                replaced = notes.wait(lambda: _replacement(notes, victim))
                row["replaced_s"] = replaced["time"] - killed
                row["replaced_over_fresh"] = row["replaced_s"] / fresh
            return row


def _before_kill(model: str, variant: str) -> int:
    """Commits of each worker: with torchrun, some more than are in its first checkpoint."""
    every = 10 if model == "large" else 50
    return every + 4 if variant == "torchrun" else STARTED


def _after(notes: Notes, variant: str, victim: int, generation: int) -> list[dict[str, Any]] | None:
    """The first commit in the next generation of each survivor (with torchrun of all ranks), in the order of time."""
    if variant == "torchrun":
        first = [note for note in notes.first.values() if note["generation"] > generation]
        expected = WORKERS.get(variant, 3)
    else:
        survivors = [pid for pid, note in notes.first.items() if pid != victim and note["generation"] <= generation]
        first = [note for pid in survivors if (note := notes.first_after(pid, generation)) is not None]
        expected = WORKERS.get(variant, 3) - 1
    return sorted(first, key=lambda note: note["time"]) if len(first) == expected else None


def _replacement(notes: Notes, victim: int) -> dict[str, Any] | None:
    """The first commit of the process that has the killed one's worker id."""
    worker = notes.first[victim]["worker"]
    return next((note for pid, note in notes.first.items() if pid != victim and note["worker"] == worker), None)


@contextmanager
def launched(model: str, variant: str, folder: Path) -> Iterator[Notes]:
    """The command of a variant, in a session of its own, which is ended with all its processes."""
    for name, text in (("shared.py", SHARED), ("ours.py", OURS), ("peer.py", PEER)):
        (folder / name).write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "BENCH_MODEL": model,
        "BENCH_NOTES": str(folder / "notes"),
    }
    if variant == "torchrun":
        words = [*TORCHRUN, "--nproc-per-node", "3", str(folder / "peer.py")]
        environment |= {"OMP_NUM_THREADS": "1"}  # as torchrun sets it, and says so at length
        # torch 2.13's restarted workers find the addresses of the dead ones in the agent's store, and fail three times
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    else:
        workers = WORKERS.get(variant, 3)
        words = [*COMMAND, "train", f"{folder / 'ours.py'}:task", "--workers", str(workers), "--survive"]
        words += [SURVIVE[variant], "--log", "json"]
        environment |= {"MANYHANDS_CREDENTIALS": str(folder / "run.pem")}
    if variant in RINGS:
        words += ["--local-workers", "1", "--listen", "127.0.0.1"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
    notes, processes = Notes(folder / "notes", process, folder / "log"), [process]
    try:
        if variant in RINGS:
            address = notes.wait(lambda: re.search(r"manyhands join (\S+)", notes.log.read_text()))[1]
            for host in range(1, workers):
                with open(folder / f"log of host {host}", "wb") as log:
                    join = [*COMMAND, "join", address, "--workers", "1"]
                    joined = subprocess.Popen(join, env=environment, stdout=log, stderr=log, start_new_session=True)
                processes.append(joined)
        yield notes
    finally:
        for process in processes:
            process.terminate()  # torchrun's workers are in sessions of their own: it ends them
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(DEADLINE_S)
        notes.read()
        while any(Path(f"/proc/{pid}").exists() for pid in notes.first):
            for pid in notes.first:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


@dataclass
class Notes:
    """What the workers of one launch noted so far: their commits."""

    path: Path
    process: subprocess.Popen[bytes]
    log: Path
    all: list[dict[str, Any]] = field(default_factory=list)
    first: dict[int, dict[str, Any]] = field(default_factory=dict)  # by pid
    newest: dict[int, dict[str, Any]] = field(default_factory=dict)  # by pid
    _offset: int = 0

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            note = json.loads(line)
            self.all.append(note)
            self.first.setdefault(note["pid"], note)
            self.newest[note["pid"]] = note

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Read until the condition holds; its value."""
        until = time.monotonic() + DEADLINE_S
        while True:
            self.read()
            if value := condition():
                return value
            if self.process.poll() is not None or time.monotonic() > until:
                sys.exit(f"the launch {self.process.args} did not get there:\n{self.log.read_text()[-4000:]}")
            time.sleep(POLL_S)

    @property
    def fewest(self) -> int:
        """Commits of the worker that has made the fewest."""
        return min(sum(note["pid"] == pid for note in self.all) for pid in self.first)

    @property
    def step_s(self) -> float:
        """The median distance of two commits of one worker."""
        own = [note["time"] for note in self.all if note["pid"] == self.all[0]["pid"]]
        return statistics.median(later - earlier for earlier, later in pairwise(own))

    def first_after(self, pid: int, generation: int) -> dict[str, Any] | None:
        return next((note for note in self.all if note["pid"] == pid and note["generation"] > generation), None)

    def newest_of(self, pid: int, generation: int) -> dict[str, Any]:
        return [note for note in self.all if note["pid"] == pid and note["generation"] == generation][-1]


def _print_kills(model: str, rows: list[dict[str, Any]]) -> None:
    told = "25 M float32, Adam with two moments" if model == "large" else "1 M float32, SGD"
    print(f"\n{told}{'':35}{'median':>9}{'least':>9}{'most':>9}{'kills':>7}  goal")
    of = {variant: [row for row in rows if row["variant"] == variant] for variant in VARIANTS}

    def line(name: str, values: list[float], goal: str = "", unit: str = " s") -> None:
        if values:
            numbers = (statistics.median(values), min(values), max(values))
            print(f"  {name:54}" + "".join(f"{n:7.3f}{unit}" for n in numbers) + f"{len(values):7}  {goal}", flush=True)

    line("a step, before the kill", [row["step_s"] for row in of["stays"]])
    line("stays: next commit", [row["next_commit_s"] for row in of["stays"]], GOALS[model])
    line("stays: next commit, less a step", [row["next_commit_s"] - row["step_s"] for row in of["stays"]])
    line("replaces: next commit, a process starting beside it", [row["next_commit_s"] for row in of["replaces"]])
    line("replaces: the replacement's first step", [row["replaced_s"] for row in of["replaces"]])
    line("fresh: the command's first step", [row["fresh_s"] for row in of["replaces"]])
    ratios = [row["replaced_over_fresh"] for row in of["replaces"]]
    line("replaced / fresh", ratios, GOALS["replaced / fresh"], "  ")
    for variant, hosts in (("ring3", 3), ("ring5", 5)):
        values = [row["next_commit_s"] for row in of[variant]]
        line(f"{hosts} hosts of this machine, a ring over TLS: next commit", values, GOALS[variant])
    line("torchrun: next commit", [row["next_commit_s"] for row in of["torchrun"]])
    line("torchrun: steps lost besides", [float(row["lost_steps"]) for row in of["torchrun"]], unit="  ")
    if both := [statistics.median(row["next_commit_s"] for row in of[v]) for v in ("torchrun", "stays") if of[v]][:2]:
        print(f"  torchrun / stays: {both[0] / both[-1]:.1f}" if len(both) == 2 else "", flush=True)
    if ours := of["stays"]:
        copied, moved = max(row["bytes_copied"] for row in ours), sum(row["moved"] for row in ours)
        print(
            f"  bytes copied when the group was formed: {copied}; parameters elsewhere in memory: {moved} of {len(ours)}"
        )


# -- step: with and without --------------------------------------------------------------------------------------------


def step(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """{model: seconds a step of each pair of launches}, printed."""
    from manyhands.engines.local.engine import Local

    found: dict[str, list[dict[str, float]]] = {}
    print(f"\n{'':14}{'without':>11}{'with':>11}{'with / without':>17}{'95 % of the median':>22}{'pairs':>7}  goal")
    with Local() as engine:
        for model in options.models:
            makes = _step_tasks()[model]
            _seconds_a_step(engine, makes, 0.1, None)
            found[model] = []
            for pair in range(options.repeats):
                order = (None, "max_losses=any") if pair % 2 == 0 else ("max_losses=any", None)
                seconds = {survive: _seconds_a_step(engine, makes, options.scale, survive) for survive in order}
                found[model].append({"without_s": seconds[None], "with_s": seconds["max_losses=any"]})
            _print_steps(model, found[model])
    return found


def _step_tasks() -> dict[str, tuple[Callable[[], Any], Callable[[int], Any], int, int]]:
    """{name: model, rows, rows a worker, steps}."""
    from step import MODELS, images
    from torch import nn

    def cnn() -> nn.Module:
        """0.4 M parameters, with buffers that a repeated step must restore."""
        widths, layers = (3, 64, 128, 256), []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))

    mlp, transformer = MODELS["MLP 0.67 M"], MODELS["transformer 0.8 M"]
    return {
        "mlp": (*mlp, 1500),
        "cnn": (cnn, lambda rows: images(rows, 3, 16, 16), 16, 400),
        "transformer": (*transformer, 150),
    }


def _seconds_a_step(engine: Any, makes: tuple[Any, ...], scale: float, survive: str | None) -> float:
    """The median of one launch."""
    import step as plain
    import torch

    import manyhands as mh

    model, data, rows, steps = makes
    torch.manual_seed(0)
    steps = max(EPOCH, int(steps * scale))
    run = mh.train(
        model=model,
        loss=plain.loss_of,
        optimizer=plain.optimizer_of,
        train_data=data(2 * rows * EPOCH),
        batch_size=2 * rows,
        epochs=-(-steps // EPOCH),
        workers=2,
        threads_per_worker=1,
        engine=engine,
        survive=survive,
    )
    at = [row["seconds"] for row in run.history][steps // 10 :]
    return statistics.median(later - earlier for earlier, later in pairwise(at))


def _print_steps(model: str, pairs: list[dict[str, float]]) -> None:
    ratios = sorted(pair["with_s"] / pair["without_s"] for pair in pairs)
    reach = int(0.98 * len(ratios) ** 0.5)  # of the sign test, about
    middle = (len(ratios) - 1) / 2
    low, high = ratios[max(0, int(middle - reach))], ratios[min(len(ratios) - 1, round(middle + reach))]
    without, with_ = (1000 * statistics.median(pair[name] for pair in pairs) for name in ("without_s", "with_s"))
    print(
        f"{model:14}{without:8.3f} ms{with_:8.3f} ms{statistics.median(ratios):17.4f}{f'{low:.4f} to {high:.4f}':>22}"
        f"{len(pairs):7}  {GOALS['step']}",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("kill", help="SIGKILL to the next committed step, beside torchrun's restart")
    one.add_argument("--models", type=_names("small", "large"), default=["small", "large"], help="small,large")
    one.add_argument("--variants", type=_names(*VARIANTS), default=list(VARIANTS), help=",".join(VARIANTS))
    two = what.add_parser("step", help="a step with survive beside one without")
    names = ("mlp", "cnn", "transformer")
    two.add_argument("--models", type=_names(*names), default=list(names), help=",".join(names))
    two.add_argument("--scale", type=float, default=1.0, help="of the number of steps a launch")
    for each in (one, two):
        each.add_argument("--repeats", type=int, default=20, help="kills of each variant, or pairs of launches")
        each.add_argument("--json", type=Path, help="also write all numbers here")
    return parser.parse_args()


def _names(*valid: str) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in valid]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(valid)}")
        return names

    return read


if __name__ == "__main__":
    main()
