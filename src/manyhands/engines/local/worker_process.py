"""What runs in a worker's process, right after the fork server forked it."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from contextlib import suppress
from typing import Any

import torch

from manyhands.comm.group import Group
from manyhands.comm.shared_memory.group import SharedMemoryGroup
from manyhands.comm.solo import SoloGroup
from manyhands.engines.driver.host_processes import name_of, shard_of
from manyhands.engines.local.child import (
    ProcessPlace,
    become_the_callers,
    flush,
    last_resort_s,
    open_driver_client,
    prepare_process,
    report,
)
from manyhands.engines.local.heartbeat import ProcessDriverClient
from manyhands.engines.local.serialization import deserialize, serialize
from manyhands.engines.single_process import pick_device
from manyhands.server.base import Server, ServerSpec
from manyhands.server.client import ServedServer
from manyhands.transport.channel import Channel
from manyhands.worker import Worker, set_current


def run(place: ProcessPlace) -> int:
    """Run the program; the exit code. Its value, or its error, went to the driver."""
    driver = open_driver_client(place)
    worker: Worker | None = None
    try:
        become_the_callers(place)
        prepare_process(place.stacks, place.threads)
        _reseed()
        worker = _worker(place, driver)
        program = deserialize(place.program, mapped=True)
        os.close(place.program)
        message, fds = _value(program, worker)
        if worker.server is not None:
            worker.server.close()  # a shard ends when all its workers have left
        atexit._run_exitfuncs()
        worker.group.close()  # goodbye: peers that go on with each other do not count this worker as lost
        flush()
        driver.last(message, fds)
    except BaseException as error:  # noqa: BLE001 - the end of the process: whatever it is, it is reported to the driver
        flush()
        driver.last(report(error, driver, below=__file__))
        if worker is not None:
            with suppress(Exception):  # the error is reported before its effects on the peers
                worker.group.close()
        return 1
    return 0


def _reseed() -> None:
    """Seed NumPy: all workers were forked from one process. (`random` does it by itself.)"""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _worker(place: ProcessPlace, driver: ProcessDriverClient) -> Worker:
    host, local_rank = socket.gethostname(), place.workers_here.index(place.process_index)
    device = pick_device(place.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what a script calls "cuda" is this worker's own
    worker = Worker(
        rank=place.process_index,
        size=place.size,
        host=host,
        device=device,
        group=_group(place, host, driver, device),
        server=_server(place, host, driver),
        driver=driver,
        threads=place.threads,
        local_rank=local_rank,
        **_reached(place),
    )
    set_current(worker)
    return worker


def _reached(place: ProcessPlace) -> dict[str, Any]:
    """The address at which workers of other hosts reach this one's ports; the defaults without other hosts."""
    if place.network is None:
        return {}
    ports = place.network["ports"]
    return {"address": place.network["listen"], "ports": None if ports is None else tuple(ports)}


def _group(place: ProcessPlace, host: str, driver: ProcessDriverClient, device: torch.device) -> Group:
    if place.size == 1:
        return SoloGroup()
    if place.network is not None:
        from manyhands.engines.hosts.connections import group_of  # loads TLS, which most runs do not need

        return group_of(place, driver)
    timeout_s = last_resort_s(place)
    group = SharedMemoryGroup(
        place.process_index,
        place.size,
        place.memory,
        lifelines=place.lifelines,
        hosts=[host] * place.size,
        timeout_s=timeout_s,
    )
    if device.type == "cuda":
        from manyhands.comm.device_group import has_own_gpu, nccl_group  # loads torch.distributed

        if has_own_gpu(place.device, place.size, torch.cuda.device_count()):
            return nccl_group(group, device, timeout_s)
    return group


def _server(place: ProcessPlace, host: str, driver: ProcessDriverClient) -> Server | None:
    if place.server is None:
        return None
    timeout_s, hosts, channels = last_resort_s(place), [host] * place.size, []
    if place.network is not None:
        from manyhands.engines.hosts.connections import host_names

        hosts = host_names(place)
    for shard in range(place.servers):
        if shard not in place.channels:
            from manyhands.engines.hosts.connections import shard_channel

            channels.append(shard_channel(place, driver, shard))
            continue
        sock = socket.socket(fileno=place.channels[shard])
        os.register_at_fork(after_in_child=sock.close)  # a loader's process must not keep the connection open
        channels.append(Channel(sock, peer=f"{name_of(shard_of(shard))} on {host}", timeout_s=timeout_s))
    return ServedServer(ServerSpec(**place.server), channels, hosts=hosts)


def _value(program: Any, worker: Worker) -> tuple[dict[str, Any], tuple[int, ...]]:
    try:
        value = program(worker)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        value = None
    return {"type": "value"}, (serialize(value, f"the value that worker {worker.rank} returned"),)
