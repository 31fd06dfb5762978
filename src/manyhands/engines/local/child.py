"""What runs in the process of a worker or of a server shard, right after the fork server forked it."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from manyhands.comm.group import Group
from manyhands.comm.shared_memory.memory import Arena
from manyhands.comm.solo import SoloGroup
from manyhands.engines.driver.host_processes import name_of, shard_of
from manyhands.engines.driver.membership import RECONNECT_S
from manyhands.engines.driver.run_monitor import Failure
from manyhands.engines.fault_injector import FaultInjector, install
from manyhands.engines.faults import OF_A_STEP, Fault, Faults
from manyhands.engines.local.heartbeat import BrokenOff, PlaceInGroup, ProcessDriverClient
from manyhands.engines.local.messages import ControlSocket, ProcessPlace, Status, connect_s, last_resort_s
from manyhands.engines.local.serialization import deserialize, serialize
from manyhands.engines.make_group import Topology, make_group
from manyhands.engines.own_rules import from_fields
from manyhands.engines.shared_memory import KeptMemory, close_memory
from manyhands.engines.single_process import pick_device
from manyhands.errors import ManyhandsError, PeerLost, Unsupported, traceback_of
from manyhands.events import Event
from manyhands.process_memory import keep_freed_memory
from manyhands.server.base import Server
from manyhands.server.client import ServedServer
from manyhands.server.replication.copy_host import Orders, serve_copy
from manyhands.server.shard_host import serve
from manyhands.signals import note_sigterm
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.worker import FormedGroup, Mesh, Worker, set_current

if TYPE_CHECKING:  # it loads TLS, which most runs do not need
    from manyhands.engines.hosts.network import Network

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def run(place: ProcessPlace) -> int:
    """Run the program, or serve a shard; the exit code. The program's value, or the error, went to the driver."""
    driver = open_driver_client(place)
    worker: Worker | None = None
    try:
        become_the_callers(place)
        value: tuple[int, ...] = ()
        if place.process_index < 0:
            _serve(place, driver)
        else:
            prepare_process(place.stacks, place.threads)
            worker = _worker(place, driver)
            value = (_value(place.program, worker),)
            if worker.server is not None:
                worker.server.close()  # a shard ends when all its workers have left
            atexit._run_exitfuncs()
            worker.group.close()  # goodbye: peers that go on with each other do not count this worker as lost
        flush()
        driver.last({"type": "value"}, value)
    except BaseException as error:  # noqa: BLE001 - the end of the process: whatever it is, it is reported to the driver
        flush()
        driver.last(report(error, driver))
        if worker is not None:
            with suppress(Exception):  # the error is reported before its effects on the peers
                worker.group.close()
        return 1
    return 0


def _value(fd: int, worker: Worker) -> int:
    """The descriptor of what the program returned; None where it ended itself well."""
    program = deserialize(fd, mapped=True)
    os.close(fd)
    try:
        value = program(worker)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        value = None
    return serialize(value, f"the value that worker {worker.rank} returned")


# -- a worker ----------------------------------------------------------------------------------------------------------


def _worker(place: ProcessPlace, driver: ProcessDriverClient) -> Worker:
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # all workers were forked from one process; `random` does it by itself
    local_rank, reached = place.workers_here.index(place.process_index), dict[str, Any]()
    gpus = torch.cuda.device_count()  # which touches none
    if place.device == "own" and gpus > 1:  # before CUDA starts: "cuda:0" is this worker's own, too
        os.environ[_VISIBLE] = visible_gpu(os.environ.get(_VISIBLE), gpus, local_rank)
    device = pick_device(place.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what a script calls "cuda" is this worker's own
    if place.network is not None:  # where workers of other hosts reach this one's ports
        listen, ports = place.network["listen"], place.network["ports"]
        address = place.network["advertise"] or listen
        reached = {"address": address, "listen": listen, "ports": None if ports is None else tuple(ports)}
    topology, network = _topology(place, device, gpus), None
    if place.network is not None:
        from manyhands.engines.hosts.network import network_of  # loads TLS, which most runs do not need

        network = network_of(place)
    members: dict[str, Any]
    if place.survive:
        members = _joining(place, driver, topology, network)
        if place.fixed_members:
            members = _joined(members["form"])
    else:
        members = {
            "group": make_group(topology, driver.rendezvous, memory=(place.memory, place.lifelines), network=network),
            "subgroup": lambda some: _watched(
                driver, make_group(topology.of(some), driver.rendezvous, network=network)
            ),
        }
    worker = Worker(
        rank=place.process_index,
        size=place.size,
        host=socket.gethostname(),
        device=device,
        **members,
        server=_server(place, driver),
        driver=driver,
        threads=place.threads,
        local_rank=local_rank,
        **reached,
    )
    set_current(worker)
    own = [fault for fault in Faults.parse(place.faults).planned if fault.node == worker.rank]
    if own:
        driver.injector = FaultInjector(own, partial(_strike, driver))
        driver.injector.watch(worker.group, worker.server)
        install(own, lambda: driver.injector)
    return worker


def _watched(driver: ProcessDriverClient, group: Group) -> Group:
    """Its operations are places of faults."""
    if driver.injector is not None:
        driver.injector.watch(group)
    return group


def _strike(driver: ProcessDriverClient, fault: Fault, step: int) -> None:
    """The driver knows before this process ends. A stopped process goes on where it is when the driver sends SIGCONT."""
    values = {"fault": str(fault)}
    driver.report(Event(type="fault", time_s=time.perf_counter(), rank=fault.node, step=step, values=values))
    if fault.what not in OF_A_STEP:
        os.kill(os.getpid(), signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)


def visible_gpu(visible: str | None, gpus: int, local_rank: int) -> str:
    """Of a host's GPUs the one of a worker, as CUDA_VISIBLE_DEVICES names it. visible: the variable so far."""
    names = [str(number) for number in range(gpus)] if visible is None else visible.split(",")[:gpus]
    return names[local_rank % len(names)].strip()


def _joining(
    place: ProcessPlace, driver: ProcessDriverClient, alone: Topology, network: Network | None
) -> dict[str, Any]:
    """The fields of a Worker that begins alone and joins groups: its vectors lie in memory that all of them map."""
    arena, generation = Arena(place.arena), -1
    os.close(place.arena)
    ends = ExitStack()  # of the newest generation: what groups of some of its members are made of

    def form(blank: bool, lost: int | None) -> FormedGroup | None:
        """A peer that dies meanwhile, or cannot be reached, is the driver's to judge: this worker asks again, as a member
        of what was not formed."""
        nonlocal generation
        ends.close()
        while (found := driver.wait_for_place(generation, blank, lost)) is not None:
            generation, lost = found.generation, None
            connect_s = min(alone.connect_s, RECONNECT_S)
            topology = replace(alone, hosts=found.hosts, names=found.names, generation=generation, connect_s=connect_s)
            try:
                return made(topology, found)
            except PeerLost as error:
                lost = error.rank
            except BrokenOff:
                pass
        return None

    def made(topology: Topology, found: PlaceInGroup) -> FormedGroup:
        def meet(name: str, ranks: Sequence[int], value: Any) -> list[Any]:
            return driver.rendezvous(f"{name} {topology.generation}", ranks, value)

        def check() -> None:
            driver.check(topology.generation)

        here = next(host for host in found.hosts if place.process_index in host)
        parts = place.replica > 1  # groups of some members will be made
        shared = KeptMemory(found.memory, here, ends) if parts and found.memory is not None else None

        def of_some(some: Sequence[int]) -> Group:
            part, memory = topology.of(some), None
            beside = [one for one in here if one in some]
            try:
                if shared is not None and len(beside) > 1:
                    exchange, number = partial(meet, "table", beside), beside.index(place.process_index)
                    memory = shared.of(beside, number, exchange, part.connect_s, part.scratch)
                return _watched(
                    driver, make_group(part, meet, memory=memory, network=network, arena=arena, check=check)
                )
            except (BrokenOff, ManyhandsError) as error:
                if memory is not None:
                    close_memory(memory)
                if isinstance(error, PeerLost):
                    raise
                raise PeerLost(-1, "", "make_group", 0, 0.0, str(error)) from error

        try:
            group = make_group(topology, meet, memory=found.memory, network=network, arena=arena, check=check)
        except (PeerLost, BrokenOff):
            found.close()
            raise
        try:
            driver.formed(topology.generation, group)
        except BrokenOff:
            group.close()
            raise
        _watched(driver, group)
        return FormedGroup(
            generation=topology.generation,
            worker_ids=topology.members,
            group=group,
            subgroup=of_some if parts else None,
        )

    # until it has joined, rows are dealt as if it were one of those with whom the run began
    own = SoloGroup(arena)
    mesh = Mesh(world=own, data=own, rows=(place.process_index % place.size, place.size))
    return {"group": own, "mesh": mesh, "form": form, "generation": generation, "worker_id": place.process_index}


def _joined(form: Callable[[bool, int | None], FormedGroup | None]) -> dict[str, Any]:
    """The fields of a Worker whose group of all lasts as long as the run: it need not know that others can change."""
    formed = form(True, None)
    if formed is None:
        raise ManyhandsError("the run was over before this worker had begun")
    return {"group": formed.group, "generation": formed.generation}


def _topology(place: ProcessPlace, device: torch.device, gpus: int) -> Topology:
    """gpus: of this host."""
    hosts, names = [list(place.workers_here)], [socket.gethostname()]
    if place.network is not None:
        hosts, names = place.network["hosts"], place.network["names"]
    own_gpus = False
    if device.type == "cuda" and len(hosts) == 1:
        from manyhands.comm.device_group import has_own_gpu  # loads torch.distributed

        own_gpus = has_own_gpu(place.device, place.size, gpus)
    return Topology(
        rank=place.process_index,
        hosts=hosts,
        names=names,
        device=device,
        own_gpus=own_gpus,
        timeout_s=last_resort_s(place),
        connect_s=connect_s(place),
        scratch=place.scratch,
    )


def _server(place: ProcessPlace, driver: ProcessDriverClient) -> Server | None:
    if place.server is None:
        return None
    hosts, channels = [socket.gethostname()] * place.size, []
    if place.network is not None:
        from manyhands.engines.hosts.network import network_of

        hosts = network_of(place).host_names
    if place.survive:
        hosts = [*hosts, *["its host"] * (place.survive - len(hosts))]  # further ones may join
        return _server_of_views(place, driver, hosts)
    for shard in range(place.servers):
        if shard not in place.channels:
            from manyhands.engines.hosts.network import shard_channel

            channels.append(shard_channel(place, driver, shard))
        else:
            channels.append(_channel(place, place.channels[shard], shard_of(shard)))
    return ServedServer(from_fields(place.server), channels, hosts=hosts)


def _server_of_views(place: ProcessPlace, driver: ProcessDriverClient, hosts: Sequence[str]) -> Server:
    """Where members may change the driver makes the connections, a new one where a shard's primary is another process."""
    assert place.server is not None

    def connect(shard: int) -> Channel:
        while True:
            answer, fd = driver.connect_shard(shard)
            if fd >= 0:
                channel = _channel(place, fd, shard_of(shard))
                channel.generation = answer["process"]
                return channel
            from manyhands.engines.hosts.network import reach_shard

            with suppress(ChannelClosed, ChannelTimeout):  # the driver hears of its end, and names another one
                return reach_shard(place, shard, answer)

    return ServedServer(from_fields(place.server), connect=connect, shards=place.servers, hosts=hosts)


def _channel(place: ProcessPlace, fd: int, peer: int) -> Channel:
    """Over a socket that this process has inherited, to another of this host."""
    sock = socket.socket(fileno=fd)
    os.register_at_fork(after_in_child=sock.close)  # a loader's process must not keep the connection open
    return Channel(sock, peer=f"{name_of(peer)} on {socket.gethostname()}", timeout_s=last_resort_s(place))


# -- a shard -----------------------------------------------------------------------------------------------------------


def _serve(place: ProcessPlace, driver: ProcessDriverClient) -> None:
    """Until every worker has left, or is gone."""
    prepare_process(place.stacks, threads=1)  # a push is one pass over memory: the cores are the workers'
    assert place.server is not None
    if place.survive:
        assert driver.orders is not None
        listener = None
        if place.network is not None:
            from manyhands.engines.hosts.network import copy_listener

            listener = copy_listener(place, driver)
        serve_copy(
            from_fields(place.server),
            shard=shard_of(place.process_index) % place.servers,
            workers=place.survive,
            process_index=place.process_index,
            orders=driver.orders,
            channel=lambda fd, peer: _channel(place, fd, peer),
            listener=listener,
            report=driver.say,
            timeout_s=last_resort_s(place),
            progress=driver.progress,
        )
        return
    listener = None
    if place.network is not None:
        from manyhands.engines.hosts.network import shard_listener

        listener = shard_listener(place, driver)
    serve(
        from_fields(place.server),
        shard=shard_of(place.process_index),
        shards=place.servers,
        workers=place.size,
        channels={rank: _channel(place, fd, rank) for rank, fd in place.channels.items()},
        listener=listener,
        timeout_s=last_resort_s(place),
        progress=driver.progress,
    )


# -- both --------------------------------------------------------------------------------------------------------------


def open_driver_client(place: ProcessPlace) -> ProcessDriverClient:
    """The connection to the driver, with its heartbeats."""
    driver = ProcessDriverClient(
        ControlSocket(place.wire),
        ControlSocket(place.questions),
        2 * place.timeout_s,
        Status(place.status),
        process_index=place.process_index,
    )
    os.close(place.status)
    if place.survive and place.process_index < 0:
        driver.orders = Orders()
    driver.start()
    return driver


def become_the_callers(place: ProcessPlace) -> None:
    for number, fd in enumerate(place.streams, start=1):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(place.environment)
    sys.path[:] = place.path
    sys.argv[:] = place.argv
    os.chdir(place.folder)
    if place.scratch:
        multiprocessing.current_process()._config["tempdir"] = place.scratch  # type: ignore[attr-defined]


def refuse_breakpoint(*_: Any, **__: Any) -> None:
    """In the place of a debugger, which would find no terminal; PYTHONBREAKPOINT may name one that needs none."""
    raise Unsupported(
        "breakpoint() needs a terminal, which the workers of a run do not have: use workers=1 (manyhands run -n 1)"
    )


def prepare_process(stacks: int, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    note_sigterm()  # a scheduler sends it to every process: the driver answers it, and the others live on to save
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))  # a loader's obeys it
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = refuse_breakpoint
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def report(error: BaseException, driver: ProcessDriverClient) -> dict[str, Any]:
    """An error as JSON: exceptions of any class can be reported, whether or not they can be pickled."""
    phase, step = driver.where()
    failure = Failure(
        rank=driver.process_index,
        phase=phase,
        step=step,
        message=_text(error),
        detail=traceback_of(error),
        error=type(error).__name__,
        family=next((c.__name__ for c in type(error).__mro__ if c.__module__ == ManyhandsError.__module__), ""),
        exit_code=error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1,
        secondary=isinstance(error, PeerLost),
        lost=error.rank if isinstance(error, PeerLost) else None,
    )
    return {"type": "error", **vars(failure)}


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    if isinstance(error, BdbQuit) or (isinstance(error, EOFError) and "reading a line" in str(error)):
        return "workers of a run have no standard input. Run one worker to type something or to debug (workers=1, manyhands run -n 1)"
    if isinstance(error, ValueError) and "using env:// rendezvous" in str(error):
        return (
            f"{error}. Leave init_process_group out: manyhands connects the workers (or start the script with torchrun)"
        )
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's own __str__ may be broken; the traceback still goes along
        return "(its message cannot be shown)"


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
