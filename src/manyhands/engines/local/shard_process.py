"""What runs in the process of a server shard, right after the fork server forked it."""

from __future__ import annotations

import socket

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
from manyhands.server.base import ServerSpec
from manyhands.server.host import serve
from manyhands.transport.channel import Channel
from manyhands.transport.listener import Listener


def run(place: ProcessPlace) -> int:
    """Serve until every worker has left, or is gone; the exit code. An error went to the driver."""
    driver = open_driver_client(place)
    try:
        become_the_callers(place)
        prepare_process(place.stacks, threads=1)  # a push is one pass over memory: the cores are the workers'
        assert place.server is not None
        serve(
            ServerSpec(**place.server),
            shard=shard_of(place.process_index),
            shards=place.servers,
            workers=place.size,
            channels=_channels(place),
            listener=_listener(place, driver),
            timeout_s=last_resort_s(place),
            progress=driver.progress,
        )
        flush()
        driver.last({"type": "value"})
    except BaseException as error:  # noqa: BLE001 - the end of the process: whatever it is, it is reported to the driver
        flush()
        driver.last(report(error, driver, below=__file__))
        return 1
    return 0


def _listener(place: ProcessPlace, driver: ProcessDriverClient) -> Listener | None:
    """For workers on other hosts."""
    if place.network is None:
        return None
    from manyhands.engines.hosts.connections import shard_listener

    return shard_listener(place, driver)


def _channels(place: ProcessPlace) -> dict[int, Channel]:
    """By rank: the workers' ends of these are inherited by nobody but them."""
    host = socket.gethostname()
    return {
        rank: Channel(socket.socket(fileno=fd), peer=f"{name_of(rank)} on {host}", timeout_s=last_resort_s(place))
        for rank, fd in place.channels.items()
    }
