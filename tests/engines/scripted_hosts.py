"""For tests of drivers without a process: hosts that send what the test gives them."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from manyhands.engines.driver.host_processes import HostProcesses
from manyhands.errors import WorkerFailed


class Scripted(HostProcesses):
    """Processes of a host; what is sent to them is kept. It is abandoned, too, where it is not the driver's own."""

    def __init__(self, host: str, process_indices: list[int]) -> None:
        self.host, self.process_indices = host, process_indices
        self.output: list[tuple[int, dict[str, Any]]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.did: list[Any] = []
        self.pages: dict[int, tuple[str, int]] = {}
        self.silence_s, self.own = 0.0, False
        self.shared: dict[str, Any] = {}
        self.error: WorkerFailed | None = None

    def says(self, process_index: int, type: str, **body: Any) -> None:
        self.output.append((process_index, {"type": type, **body}))

    def exits(self, process_index: int, status: int = 0, phase: str | None = None, step: int | None = None) -> None:
        self.says(process_index, "exited", status=status, phase=phase, step=step, detail="")

    @override
    def start(self, shared: dict[str, Any], program: int) -> None:
        self.shared = shared
        self.did.append("start")

    @override
    def filenos(self) -> list[int]:
        return []

    @override
    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        error, self.error = self.error, None
        if error is not None:
            raise error
        output, self.output = self.output, []
        return output

    @override
    def send(self, process_index: int, body: dict[str, Any]) -> None:
        self.sent.append((process_index, body))

    @override
    def signal(self, number: int, process_indices: Sequence[int] | None = None) -> None:
        self.did.append(number if process_indices is None else (number, *process_indices))

    @override
    def where(self) -> dict[int, tuple[str, int]]:
        return self.pages

    @override
    def silent_s(self) -> float:
        return self.silence_s

    @override
    def stacks(self) -> dict[int, str]:
        self.did.append("stacks")
        return {process_index: f"stack of {process_index}" for process_index in self.process_indices}

    @override
    def end(self, grace_s: float) -> None:
        self.did.append(("end", grace_s))

    @override
    def start_worker(self, worker_id: int, faults: str) -> None:
        self.did.append(("start_worker", worker_id))

    @override
    def form(self, generation: int, hosts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        self.did.append(("form", generation, list(hosts), list(names)))

    @override
    def connect(self, first: tuple[int, dict[str, Any]], second: tuple[int, dict[str, Any]]) -> None:
        self.sent += [first, second]

    @override
    def abandon(self, why: str) -> bool:
        for process_index in self.process_indices:
            self.says(process_index, "lost", why=why, phase="x", step=0)
        return not self.own
