"""What a restart costs: from SIGKILL to the next step, beside the time that the command takes to its first one.

    python benchmarks/restart.py [--repeats 20] [--json FILE]

    first step              `manyhands train digits --workers 2`, from the start of the process until the first line of a
                            step is read from its standard output (`--log json`), as benchmarks/start.py measures it
    driver killed           the same with `--max-restarts 1`: from SIGKILL of the driver to the first step of the next one,
                            which goes on from the newest checkpoint
    worker killed           from SIGKILL of a worker to the first step of the launch after, in the same driver

The three alternate. Goal: driver killed at most 3 times the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from start import COMMAND, DEADLINE_S, TRAIN, first_step, wait_for

MOST_TIMES = 3.0
RESTARTED = ["--max-restarts", "1", "--checkpoint-every", "10", "--epochs", "20"]


def killed(find: Callable[[int], int]) -> float:
    """Seconds from SIGKILL of the process that `find` gives, of the supervisor's, to the next launch's first step."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*COMMAND, *TRAIN, str(Path(folder, "run")), *RESTARTED]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            wait_for(process, b'"type":"checkpoint"')
            victim = find(process.pid)
            start = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            wait_for_next_launch(process)
            return time.perf_counter() - start
        finally:
            process.kill()
            process.communicate(timeout=DEADLINE_S)


def wait_for_next_launch(process: subprocess.Popen[bytes]) -> None:
    """Until a step is read behind the words that stand between two launches."""
    wait_for(process, b'"kind":"restart"')
    wait_for(process, b'"type":"step"')


def driver(supervisor: int) -> int:
    return children(supervisor)[0]


def worker(supervisor: int) -> int:
    """One of the fork server's processes: the driver's child's child."""
    return children(children(driver(supervisor))[0])[0]


def children(pid: int) -> list[int]:
    return [
        int(text) for task in Path(f"/proc/{pid}/task").iterdir() for text in (task / "children").read_text().split()
    ]


MEASURES: dict[str, Callable[[], float]] = {
    "first step": first_step,
    "driver killed": lambda: killed(driver),
    "worker killed": lambda: killed(worker),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="measured runs of each")
    parser.add_argument("--json", type=Path, help="write all seconds here")
    arguments = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before, {arguments.repeats} runs of each, alternating"
    )
    rounds = [{name: run() for name, run in MEASURES.items()} for _ in range(arguments.repeats)]
    seconds = {name: [one[name] for one in rounds] for name in MEASURES}
    least = statistics.median(seconds["first step"])
    print(f"{'':16}{'median':>9}{'least':>9}{'most':>9}{'of first':>10}")
    for name, values in seconds.items():
        numbers = [statistics.median(values), min(values), max(values)]
        print(f"{name:16}" + "".join(f"{n:7.2f} s" for n in numbers) + f"{numbers[0] / least:9.2f}x")
    print(f"goal: driver killed at most {MOST_TIMES:g} times the first step")
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": os.getloadavg(), "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
