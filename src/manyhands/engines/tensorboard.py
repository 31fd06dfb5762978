"""TensorBoard beside the chief of another framework's cluster, for as long as its function runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO

from manyhands.errors import BadInput, ManyhandsError

_START_S = 60.0
_POLL_S = 0.05
_END_S = 5.0
_URL = re.compile(r"TensorBoard \S+ at (http\S+)")


@contextmanager
def shown(logdir: str, host: str, report: Callable[[str], None]) -> Iterator[None]:
    """Within, TensorBoard shows `logdir` at any free port of this address of this host; `report` gets its URL before.

    Whoever reaches the address can look. BadInput where tensorboard is not installed; ManyhandsError, with its own
    words, where it does not start.
    """
    if find_spec("tensorboard") is None:
        raise BadInput("tensorboard= needs the package tensorboard where the chief runs: pip install tensorboard there")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--port", "0", "--host", host]
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=words)
        try:
            report(_url(process, words))
            yield
        finally:
            _end(process)


def _url(process: subprocess.Popen[bytes], words: IO[bytes]) -> str:
    """Its output once it listens."""
    deadline = time.monotonic() + _START_S
    while True:
        ended = process.poll() is not None
        output = os.pread(words.fileno(), 1 << 16, 0).decode(errors="replace")
        if found := _URL.search(output):
            return found[1]
        if ended or time.monotonic() >= deadline:
            how = f"ended with exit code {process.returncode}" if ended else f"did not listen within {_START_S:.0f} s"
            raise ManyhandsError(f"TensorBoard {how}; its output:\n{output.strip() or '(nothing)'}")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
