"""What codecs compute takes virtual time: on workers before and after an exchange, at shards before a push is merged. Closed forms."""

from functools import partial
from typing import Any

import pytest
import torch
from sim_world import run as run_programs
from sim_world import servers_of

import manyhands as mh
from manyhands.comm.codecs import codec_of
from manyhands.engines.sim.timeline import Timeline
from manyhands.replica.layout import layouts_of
from manyhands.server.base import Encoded, ServerSpec
from manyhands.server.shard_ranges import parts_of
from plain import mlp, rows, task

N = layouts_of(mlp())[0].padded  # [D'] in float64
STEPS = 8  # of two epochs, all with rows on two workers
ENCODE, DECODE, ENCODE_BYTE, DECODE_BYTE = 1e-3, 1e-2, 1e-5, 1e-4
SLOW = f"{ENCODE}/{DECODE}/{ENCODE_BYTE}/{DECODE_BYTE}"


def train(strategy: str, compute: str, workers: int = 2, more: str = "", **fields: Any) -> mh.Run:
    given = {"task": task(), "workers": workers, "threads_per_worker": 1, **fields}
    return mh.train(strategy=strategy, engine=f"sim:compute='row=0,step=1,{compute}'{more}", **given)


def seconds_of(nbytes: int, payloads: int) -> tuple[float, float]:
    """Seconds of encoding, and of decoding."""
    return ENCODE * N + ENCODE_BYTE * nbytes, payloads * (DECODE * N + DECODE_BYTE * nbytes)


FACTORS = 8 * (N - 45 + (9 + 5) - 27 + (3 + 9))
"""Bytes of powersgd:1: two matrices, 9 x 5 and 3 x 9, as factors, and the rest as it is."""
CODECS = {  # bytes, and how many payloads are decoded: linear codecs decode the mean alone
    "onebit": (8 + N // 8, 2),
    "topk:0.25": (N // 4 * 12, 2),
    "int8": (8 + N, 2),
    "qsgd:4": (8 + N // 2, 2),
    "bf16": (2 * N, 1),
    "powersgd:1": (FACTORS, 1),
}


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_is_compute_encoding_and_the_decoding_of_each_payload(codec: str) -> None:
    """On a free network; counted as exchange, as real engines count it. The values are those of a codec that takes no time."""
    encode, decode = seconds_of(*CODECS[codec])
    run = train(f"allreduce:compress={codec}", f"{codec.partition(':')[0]}={SLOW}")
    assert run.seconds == pytest.approx(STEPS * (1 + encode + decode))
    assert [row["compute_s"] for row in run.history] == pytest.approx([1.0] * STEPS)
    assert [row["exchange_s"] for row in run.history] == pytest.approx([encode + decode] * STEPS)
    assert run.timing["wait"] == pytest.approx(0.0, abs=1e-9)
    free = train(f"allreduce:compress={codec}", "lease=0")
    assert torch.equal(run.parameters, free.parameters)
    assert run.ledger == free.ledger


def test_whose_payload_takes_what() -> None:
    """One of no fixed length what it has; who is slow is waited for; one without weight is encoded, and not decoded."""
    for tau, entries in (
        ("1e-30", 84),
        ("1e30", 0),
    ):  # 84 parameters, the rest is padding: everything is sent, then nothing
        run = train(f"allreduce:compress=threshold:{tau}", "threshold=0/0/1ms/10ms", max_steps=1)
        assert run.seconds == pytest.approx(1 + 4 * entries * (1e-3 + 2 * 1e-2))
    # a factor slows encoding and decoding too: the others wait for what it sends, not for what it decodes
    encode, decode = ENCODE * N, 2 * DECODE * N
    run = train("allreduce:compress=onebit", f"onebit={ENCODE}/{DECODE},1=3x", max_steps=1)
    assert run.seconds == pytest.approx(3 * (1 + encode + decode))
    (row,) = run.history
    assert row["wait_s"] == pytest.approx(2 * (1 + encode) / 2)  # the mean of both
    assert row["exchange_s"] == pytest.approx((1 + 3) / 2 * (encode + decode))
    encode, decode = ENCODE * N, DECODE * N  # the second batch has one row, for one of three workers
    run = train("allreduce:compress=onebit", f"onebit={ENCODE}/{DECODE}", 3, task=task(train_data=rows(13), epochs=1))
    assert [row["exchange_s"] for row in run.history] == pytest.approx([encode + 3 * decode, encode + decode])


def test_a_push_is_encoded_by_its_worker_and_decoded_by_the_shards_at_the_same_time() -> None:
    """Two workers push at the same time; each shard decodes its part of both."""
    for servers in (1, 2):
        encode, decode = ENCODE * N, DECODE * N / servers
        run = train("downpour:bound=0,compress=onebit", f"onebit={ENCODE}/{DECODE}", servers=servers)
        assert [row["exchange_s"] for row in run.history] == pytest.approx([encode + decode] * STEPS)
        assert [row["compute_s"] for row in run.history] == pytest.approx([1.0] * STEPS)
        assert run.timing["wait"] == pytest.approx(0.0, abs=1e-9)


# -- shards ----------------------------------------------------------------------------------------------------------

ONES = torch.ones(1000)
MILLISECOND = "onebit=0/1ms,merge=1ms"  # a push is decoded in 1 s, and merged in 4 s


def pushed(workers: int = 1, faults: str = "", at: float = 0.0, befall: Any = None) -> tuple[Any, Any]:
    """When each worker's push of [1000], all begun at 100 s, is answered; `befall`, given the servers, at so many seconds after that."""
    timeline, spec = Timeline(), ServerSpec(rule="add", compress="onebit")
    servers = servers_of(timeline, spec, workers, faults=faults, compute=MILLISECOND)
    payloads = tuple(codec_of("onebit").encode(part) for part in parts_of(ONES, 1))

    def program(rank: int) -> float:
        client = servers.clients[rank]
        client.initialize(torch.zeros(1000))
        client.activate()
        timeline.sleep(100.0 - timeline.now)
        client.push(Encoded(payloads, 1000, torch.float32))
        return timeline.now - 100.0

    if befall is not None:
        timeline.at(100.0 + at, partial(befall, servers))
    times = run_programs(timeline, [partial(program, rank) for rank in range(workers)])
    return pytest.approx(sorted(times)), servers


def test_payloads_are_decoded_together_and_merged_one_after_the_other() -> None:
    """What is being decoded is not sent again; a restart loses it, and then it is; a paused shard decodes afterwards."""
    assert pushed(3)[0] == [5.0, 9.0, 13.0]
    times, servers = pushed(faults="drop=1e-12,retry=0.1")
    assert times == [5.0]
    assert "resent" not in servers.clients[0].ledger.as_dict()
    times, servers = pushed(at=0.5, befall=lambda servers: servers.restart_shard(0, 2.0))
    assert times == [7.5]
    assert torch.equal(servers.stores[0].center, ONES)
    assert pushed(at=-0.5, befall=lambda servers: servers.shards[0].pause(2.0))[0] == [6.5]
