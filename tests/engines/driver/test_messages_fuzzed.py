"""What a host that joined, or wants to, may say to a driver: a message that makes no sense ends that host's part, and nothing else."""

import json
import socket
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from scripted_hosts import Scripted

from fuzzing import Damage, bounded, json_bytes, survive
from manyhands.engines.base import LaunchSpec
from manyhands.engines.driver.driver import Driver
from manyhands.engines.hosts import join, roster
from manyhands.engines.hosts.join import Agent, Join
from manyhands.engines.hosts.join_listener import JoinedHosts, JoinListener
from manyhands.engines.hosts.message_channel import HostMessage, MessageChannel
from manyhands.engines.hosts.plain_values import decode, encode
from manyhands.engines.hosts.processes import RemoteProcesses
from manyhands.engines.hosts.roster import Offer, Roster
from manyhands.engines.hosts.secret import Secret
from manyhands.errors import ManyhandsError
from manyhands.events import Event
from manyhands.recording.history import PARTS
from manyhands.recording.recorder import Recorder
from manyhands.transport.channel import Channel
from manyhands.transport.frame import Frame, FrameError, pack

VALUE = {"loss": 0.5, "rows": [1, 2, (3, None)], "parameters": {"w": torch.arange(4.0), "steps": torch.tensor(3)}}
TENSORS = [torch.arange(4.0), torch.tensor(3)]
SEGMENT = {"epoch": 0, "first": 0, "until": 4, "parts": 4, "size": 4, "rank0_warmup_ticks": 0, "left": None}
FAILURE = {
    "phase": "compute",
    "step": 1,
    "message": "no",
    "detail": "",
    "error": "ValueError",
    "family": "",
    "exit_code": 1,
}


def event(type: str, /, **values: Any) -> dict[str, Any]:
    return vars(Event(type=type, time_s=1.5, rank=2, tick=3, step=3, values=values))


STEP = {"epoch": 0, "loss": 1.1, "weight": 6.0, "rows": 6, "unused": 0, "round": True, "rate": 0.01, "lease": [0, 1, 0]}
STEP |= {"input_s": 0.1, "compute_s": 0.1, "exchange_s": 0.1, "wait_s": 0.0, "bytes": 3584, "gain": 0.5, "parts": 4}
STEP |= {"pulls": [[0], [2]], "pushes": [[1], [4]], "staleness": [0, 1]}
EVENTS = [event("step", **STEP), event("start", total_steps=4), event("warning", message="no", kind="a")]
EVENTS += [event("validation", metrics={"validation_loss": 0.5}), event("epoch", epoch=1, rows=19)]
EVENTS += [event("closing", epoch=0, bytes=3, **{f"{part}_s": 0.1 for part in PARTS})]
BODIES: list[dict[str, Any]] = [
    {"type": "started"},
    {"type": "beat", "phase": "compute", "step": 3, "idle_s": 0.0, "events": EVENTS},
    {"type": "ask", "event": event("validation", metrics={"validation_loss": 0.5})},
    {"type": "lease", "segment": SEGMENT, "replica": 0},
    {"type": "arrive", "name": "ring", "process_indices": [2, 3], "value": ["10.0.0.1", 7000]},
    {"type": "value", "value": encode(VALUE, "it")[0]},
    {"type": "error", "rank": 2, "secondary": True, "lost": 3, **FAILURE},
    {"type": "exited", "status": 0, "phase": "end", "step": 3, "detail": ""},
]
MESSAGES = [
    *({"type": "from_process", "process_index": 2, "body": body} for body in BODIES),
    {"type": "preempted"},
    {"type": "idle"},
    {"type": "stacks", "stacks": {"2": "here", "3": ""}, "where": {"2": ["compute", 3]}},
    {"type": "failed", "message": "its fork server died"},
]


def test_letters(inputs: int) -> None:
    """Frames of a message with tensors, damaged: what comes is messages, then the reason of the end."""
    damage = Damage(1)
    body = {**MESSAGES[1], "tensors": [["float32", [4]], ["int64", []]]}

    def stream() -> bytes:
        text = json_bytes(damage.of_json(body) if damage.random() < 0.5 else body)
        parts = [pack(Frame(kind=1, blob=text)), text]
        for tensor in TENSORS:
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            parts += [pack(Frame(kind=3, elements=len(data))), data]
        whole = b"".join(parts)
        return damage.of_bytes(whole) if damage.random() < 0.6 else whole

    def take(data: bytes) -> None:
        here, there = socket.socketpair()
        post = MessageChannel(Channel(here, peer="the other", timeout_s=5.0))
        try:
            with there:
                there.sendall(data)
            came: list[HostMessage] = []
            while not post.lost:
                came += post.wait(5.0)
            assert all(isinstance(one, HostMessage) and isinstance(one.body["type"], str) for one in came)
        finally:
            post.close()

    with bounded(512):
        taken, _ = survive(take, (stream() for _ in range(inputs // 20)), ())
    assert taken


def test_values(inputs: int) -> None:
    damage = Damage(2)
    encoded, tensors = encode(VALUE, "it")
    deep: Any = 1
    for _ in range(400):
        deep = {"tuple": [deep]}
    drawn = (deep if i == 0 else damage.of_json(encoded) for i in range(inputs))
    survives(lambda value: decode(value, tensors), drawn, ManyhandsError)


class Silent:
    """A channel whose messages the test gives."""

    lost = ""
    local_address = ""

    def __init__(self) -> None:
        self.messages: list[HostMessage] = []

    def set_silence(self, silence_s: float) -> None:
        assert silence_s > 0

    def receive(self) -> list[HostMessage]:
        messages, self.messages = self.messages, []
        return messages

    def wait(self, timeout_s: float) -> list[HostMessage]:
        return self.receive()

    def send(self, body: dict[str, Any], tensors: list[Any]) -> None: ...

    def silent_s(self) -> float:
        return 0.0


def beta() -> tuple[Silent, RemoteProcesses]:
    """Workers 2 and 3 on another host, and its channel."""
    post = Silent()
    processes = RemoteProcesses(post, "beta")  # type: ignore[arg-type]
    processes.assign([2, 3], "beta", {})
    return post, processes


def is_message(body: Any) -> bool:
    """The post lets no other pass."""
    return isinstance(body, dict) and isinstance(body.get("type"), str)


def survives(*arguments: Any) -> None:
    """Some inputs are taken, some refused."""
    taken, refused = survive(*arguments)
    assert taken
    assert refused


def test_what_a_joined_host_says(inputs: int) -> None:
    """Only its own processes send, and the driver reads their messages as text and numbers, or names the host."""
    damage = Damage(3)

    def take(body: dict[str, Any]) -> None:
        post, host_processes = beta()
        post.messages = [HostMessage(body, list(TENSORS))]
        for process_index, output in host_processes.receive():
            assert process_index in (2, 3)
            assert isinstance(output["type"], str)
        assert set(host_processes.where()) <= {2, 3}

    damaged = (damage.of_json(damage.choice(MESSAGES)) for _ in range(inputs))
    survives(take, filter(is_message, damaged), ManyhandsError)


def test_who_may_join(inputs: int) -> None:
    """A hello that is not one of a host of this version is refused with a reason, and its workers stay free for the next."""
    damage, hello = Damage(4), roster.hello(1)
    hello = json.loads(json.dumps(hello))
    door = JoinListener(None, Roster(3, [Offer("alpha", 1)]), JoinedHosts(), lambda text: None)  # type: ignore[arg-type]

    def take(output: Any) -> None:
        if isinstance(output, dict):  # from_json lets no other pass
            named = door._name(output)
            assert isinstance(named, str)
            assert isinstance(output["host"], str)
            assert 1 <= output["workers"] <= 2

    survives(take, (damage.of_json(hello) for _ in range(inputs // 4)), FrameError)
    assert door.roster.missing == 2


def test_what_the_driver_makes_of_it(inputs: int) -> None:
    """Events, leases, meetings, values, failures of workers 2 and 3 on another host: none ends the driver with an error of its own."""
    damage = Damage(5)

    def messages() -> list[HostMessage]:
        bodies = [damage.choice(BODIES) for _ in range(damage.randint(1, 5))]
        at = damage.randrange(len(bodies))
        if damage.random() < 0.5:  # what goes furthest: to the history
            bodies[at] = {**BODIES[1], "events": [damage.of_json(damage.choice(EVENTS))]}
        else:
            bodies[at] = damage.of_json(bodies[at])
        return [
            HostMessage({"type": "from_process", "process_index": damage.choice((2, 3)), "body": body}, list(TENSORS))
            for body in bodies
        ]

    def take(output: list[HostMessage]) -> None:
        (post, host_processes), recorder = beta(), Recorder(workers=4)
        hosts, spec = [Scripted("alpha", [0, 1]), host_processes], LaunchSpec(workers=4, observer=recorder)
        driver = Driver(hosts, spec, clock=lambda: 0.0)
        for message in output:
            post.messages = [message]
            driver._hear(host_processes)
            driver._tell_observer()
            driver._finished()
        assert all(row["tick"] >= 0 for row in recorder.history)

    for body in BODIES[:-2]:
        take([HostMessage({"type": "from_process", "process_index": 2, "body": body}, list(TENSORS))])
    with bounded(256):
        survives(take, (messages() for _ in range(inputs // 10)), ManyhandsError)


NETWORK = {"hosts": [[0, 1], [2, 3]], "names": ["alpha", "beta"]}
SHARED = {
    "process_indices": [2, 3],
    "size": 4,
    "threads": None,
    "timeout_s": 5.0,
    "network": NETWORK,
    "device": "cpu",
    "servers": 0,
}
LAUNCH = {"host": "beta", "shared": SHARED, "variables": {"MANYHANDS_STRATEGY": "solo"}, "silence_s": 10.0}
ORDERS: list[dict[str, Any]] = [
    {"type": "launch", **LAUNCH},
    {"type": "to_process", "process_index": 2, "body": {"type": "stop", "reason": "max_seconds"}},
    {"type": "signal", "number": 15},
    {"type": "signal_to", "number": 19, "process_indices": [2]},
    {"type": "start_worker", "worker_id": 3, "faults": "kill=3@step:5"},
    {"type": "form", "generation": 2, "hosts": [[0, 1], [2, 3]], "names": ["alpha", "beta"]},
    {"type": "stacks"},
    {"type": "end", "grace_s": 0.5},
    {"type": "over", "error": "", "preempted": False},
]


class Obeying:
    """Instead of LocalProcesses: checks that whatever is sent to it is a message that they take."""

    TAKES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "start": (dict, int),
        "send": (int, dict),
        "signal": (int, Sequence | None),
        "start_worker": (int, str),
        "form": (int, Sequence, Sequence),
        "end": (int | float,),
    }

    def __init__(self, spawner: Any, process_indices: list[int], timeout_s: float, host: str, network: Any) -> None:
        assert all(isinstance(process_index, int) for process_index in process_indices)
        assert timeout_s > 0
        assert isinstance(host, str)
        self.process_indices = process_indices

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            kinds = self.TAKES.get(name, ())[: len(arguments)]
            assert all(isinstance(one, kind) for one, kind in zip(arguments, kinds, strict=True)), (name, arguments)
            assert name != "send" or arguments[0] in self.process_indices
            return {"stacks": {2: "here"}, "where": {2: ("compute", 3)}}.get(name)

        return call


def test_what_a_driver_says(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that joined obeys what a driver of its version says, and ends with the driver's name at anything else."""
    damage = Damage(6)
    monkeypatch.setattr(join, "LocalProcesses", Obeying)

    def orders() -> list[dict[str, Any]]:
        bodies = [ORDERS[0], *(damage.choice(ORDERS[1:]) for _ in range(damage.randint(0, 3)))]
        at = damage.randrange(len(bodies))
        bodies[at] = damage.of_json(bodies[at])
        return [*filter(is_message, bodies)]

    def take(bodies: list[dict[str, Any]]) -> None:
        offer = Join(address="127.0.0.1:1", workers=2, listen="127.0.0.1")
        agent = Agent(offer, Secret(token=b"t" * 32), None, lambda text: None)  # type: ignore[arg-type]
        agent._post, agent._program = Silent(), 0  # type: ignore[assignment]
        for body in bodies:
            agent._obey(HostMessage(body, []))

    take(ORDERS)
    survives(take, (orders() for _ in range(inputs)), ManyhandsError)
