"""The simulator's constants of codecs, from measured settings; and the stopwatch that measures them."""

from typing import Any

import pytest
import torch

from manyhands.comm.codecs import CODECS, Hints, codec_of
from manyhands.comm.compressed import compressed_mean_
from manyhands.engines.sim.compute import Coding
from manyhands.engines.sim.engine import Sim
from manyhands.evidence.calibrate import coding
from manyhands.evidence.calibrate.coding import SETTINGS, CodecTimes, _CodecTiming, _EchoGroup, codings, time_codecs
from manyhands.evidence.calibrate.observe import RunSetup, observe
from manyhands.strategies.ensemble import Ensemble
from manyhands.worker import Worker
from plain import task

N = 1000
PLACE = RunSetup(engine=Sim(), workers=2)


def setting(codec: str, nbytes: int, like: Coding) -> CodecTimes:
    """As a machine would measure it that is exactly as the model has it."""
    return CodecTimes(
        codec=codec, n=N, nbytes=nbytes, encode_s=like.encoding(N, nbytes), decode_s=like.decoding(N, nbytes)
    )


def test_constants_are_found_again_from_what_they_cost() -> None:
    """Seconds a byte from two settings of a codec; from one, or from several of one length, all are seconds a number."""
    threshold, onebit = Coding(1e-9, 5e-10, 1.2e-8, 7e-9), Coding(1e-9, 5e-9)
    measured = [setting("threshold:1e30", 0, threshold), setting("onebit", 133, onebit)]
    found = codings([*measured, setting("threshold:1e-30", 4 * N, threshold)])
    assert list(found) == ["threshold", "onebit"]
    for name, wanted in {"threshold": threshold, "onebit": onebit}.items():
        for constant in ("encode", "decode", "encode_byte", "decode_byte"):
            assert getattr(found[name], constant) == pytest.approx(getattr(wanted, constant), rel=1e-3), constant
    same = [CodecTimes(codec=f"powersgd:{rank}", n=N, nbytes=8 * N, encode_s=1.0, decode_s=2.0) for rank in (2, 8)]
    powersgd = codings(same)["powersgd"]
    assert (powersgd.encoding(N, 8 * N), powersgd.decoding(N, 8 * N)) == pytest.approx((1.0, 2.0))
    assert {text.partition(":")[0] for text in SETTINGS} == set(CODECS)


class Clock:
    """Each look at it takes as long as it is told."""

    def __init__(self, *steps: float) -> None:
        self.now, self.steps = 0.0, list(steps)

    def perf_counter(self) -> float:
        self.now += self.steps.pop(0)
        return self.now


def test_the_group_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made; JSON from, to; all_gather from, to; decoded; stopped."""
    many = _EchoGroup(Worker(rank=40, size=64))  # some payloads are enough
    assert len(many.all_gather(torch.ones(3))) == 4
    monkeypatch.setattr(coding, "time", Clock(0.0, 1.0, 100.0, 2.0, 100.0, 12.0, 4.0))
    group = _EchoGroup(Worker(rank=1, size=3))
    vector, codec = torch.tensor([1.0, -2.0, 3.0, -4.0] * 4), codec_of("onebit")
    total = compressed_mean_(group, codec, vector, 2.0, 5)
    group.stop()
    assert (total.weight, total.bits) == (6.0, 5)
    assert (group.n, group.nbytes) == (16, 4 + 2)
    assert group.encode_s == 1.0 + 2.0 + 4.0
    assert group.decode_s == 12.0 / 3
    torch.testing.assert_close(vector, 2.5 * torch.tensor([1.0, -1.0, 1.0, -1.0] * 4))


def test_each_setting_has_its_turn_on_the_whole_vector() -> None:
    """And the mean of equals is what the codec leaves."""
    found = {one.codec: one for one in time_codecs(PLACE, task(), 1)}
    assert list(found) == list(SETTINGS)
    n = found["bf16"].n
    assert {one.n for one in found.values()} == {n}
    lengths = {"bf16": 2 * n, "threshold:1e30": 0, "threshold:1e-30": 4 * 84}  # of every parameter, no padding
    assert {name: found[name].nbytes for name in lengths} == lengths
    assert min(min(one.encode_s, one.decode_s) for one in found.values()) > 0
    for text in SETTINGS:
        vector, own = torch.randn(N, generator=torch.Generator().manual_seed(1)), torch.empty(N)
        group, hints = _EchoGroup(Worker(rank=0, size=4)), Hints(torch.Generator().manual_seed(2))
        compressed_mean_(group, codec_of(text), vector, 1.0, 0, hints, own)
        torch.testing.assert_close(vector, own, rtol=1e-6, atol=1e-7)


def test_workers_train_as_if_there_were_no_codecs() -> None:
    """With the bits of models that never talk: same gradients, same draws, the same end."""
    steps = 2 * len(SETTINGS)

    def seen(program: Any, kind: str, *names: str) -> list[tuple[Any, ...]]:
        events = observe(PLACE, task(), program, steps, event_type=kind)
        return sorted((event.tick, event.rank, *(event.values[name] for name in names)) for event in events)

    ours, alone = (seen(one, "step", "loss", "rows") for one in (_CodecTiming(ticks=2), Ensemble()))
    assert (ours, len(ours)) == (alone, 2 * steps)
    turns = [
        (2 * i + 1, rank, text) for i, text in enumerate(SETTINGS) for rank in (0, 1)
    ]  # not at the first tick of each
    assert seen(_CodecTiming(ticks=2), "codec", "codec") == turns
