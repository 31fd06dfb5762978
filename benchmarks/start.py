"""How soon it starts: from the command to the import, the help and the first step, each in processes of their own.

    python benchmarks/start.py [--repeats 5] [--json FILE]

    import manyhands        the package alone, in an interpreter that runs already; torch must not be loaded
    manyhands --help        from the start of the process to its end
    first step              `manyhands train digits --workers 2`, from the start of the process until the first line of a
                            step is read from its standard output (`--log json`)
    import torch            beside them, for scale: `python -c "import torch"`, from the start of the process to its end

Prints the median of `--repeats` and the range. The four alternate, so that a busy moment meets all of them; one run of each goes
before, unmeasured, so that files are in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 120.0
COMMAND = [sys.executable, "-c", "import manyhands.cli.commands; manyhands.cli.commands.main()"]
IMPORT = """
import sys, time
start = time.perf_counter()
import manyhands
print(time.perf_counter() - start)
assert "torch" not in sys.modules and "numpy" not in sys.modules, "import manyhands loads torch or numpy"
"""
TRAIN = ["train", "digits", "--workers", "2", "--log", "json", "--run-dir"]


def whole(words: list[str]) -> float:
    """Seconds from the start of a process to its end."""
    start = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    return time.perf_counter() - start


def importing() -> float:
    """Seconds of `import manyhands`, as its interpreter sees them."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True, timeout=DEADLINE_S
    )
    return float(done.stdout)


def first_step() -> float:
    """Seconds from the start of the command to its first step."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen([*COMMAND, *TRAIN, str(Path(folder, "run"))], stdout=subprocess.PIPE)
        try:
            wait_for(process, b'"type":"step"')
            return time.perf_counter() - start
        finally:
            process.kill()
            process.communicate(timeout=DEADLINE_S)


def wait_for(process: subprocess.Popen[bytes], word: bytes) -> None:
    """Read its standard output until a line has the word; raises if it ends first, or is silent for too long."""
    assert process.stdout is not None
    seen = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while word not in seen:
            if not selector.select(DEADLINE_S):
                raise TimeoutError(f"the command printed nothing for {DEADLINE_S:.0f} s")
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                raise RuntimeError(f"the command ended with exit code {process.wait(DEADLINE_S)} before its first step")
            seen += read


MEASURES: dict[str, tuple[Callable[[], float], float | None]] = {
    "import manyhands": (importing, 0.1),
    "manyhands --help": (lambda: whole([*COMMAND, "--help"]), 0.5),
    "train digits --workers 2: first step": (first_step, 5.0),
    'python -c "import torch"': (lambda: whole([sys.executable, "-c", "import torch"]), None),
}  # what, and the seconds it may take


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds of each, alternating; the first round warms the file cache and does not count."""
    rounds = [{name: run() for name, (run, _) in MEASURES.items()} for _ in range(repeats + 1)]
    return {name: [one[name] for one in rounds[1:]] for name in MEASURES}


def report(seconds: dict[str, list[float]]) -> None:
    """Print the table."""
    print(f"{'':38}{'median':>9}{'least':>9}{'most':>9}{'goal':>9}")
    for name, values in seconds.items():
        goal = MEASURES[name][1]
        numbers = [statistics.median(values), min(values), max(values)]
        told = "" if goal is None else f"{goal:7.1f} s"
        print(f"{name:38}" + "".join(f"{number:7.3f} s" for number in numbers) + told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each")
    parser.add_argument("--json", type=Path, help="write all seconds here")
    arguments = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before, {arguments.repeats} runs of each, alternating"
    )
    seconds = measure(arguments.repeats)
    report(seconds)
    if arguments.json:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        arguments.json.write_text(json.dumps({"medians": medians, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
