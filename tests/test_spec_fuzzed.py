"""Spec strings and other texts of options that nobody meant: an object whose own text gives it again, or BadInput."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from fuzzing import Damage, bounded, survive
from manyhands import engines, spec, strategies
from manyhands.cli.options import cast_of
from manyhands.engines import engine_of
from manyhands.engines.faults import Faults
from manyhands.engines.hosts.network import ports_of
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.errors import BadInput
from manyhands.evidence.compare.metric import target_of
from manyhands.strategies import spec_of, strategy_of
from manyhands.training.best_model import BestModelPolicy
from manyhands.transport.address import format_address, parse_address

NINES = "9" * 4400  # more digits than `int` reads
VALUES = [
    *("1", "0", "-1", "--5", "²", "٣", "1e400", "nan", "inf", "-inf", NINES, "1_0", "", "none", "true", " 3 ", "0x10"),
    *("2.5", "[1,2]", "'a'", "\x00", "\ud800", "topk:0.01", "topk:nan", "powersgd:0", "qsgd:99", "threshold:-1"),
    *("1ms", "1Gbit", "end", "auto", "lognormal:1e400", "quantiles:nan/1", "5x", "15ns/1ns", "7000-7100"),
]
FAULTS = ("kill", "pause", "restart", "drop", "duplicate", "delay", "reorder", "retry", "notice")
PLANNED = ["kill=2@step:100,", "pause=1@2.5s+3,", "restart=shard0@4s+0.5,", "delay=0.1:0.5,", f"kill={NINES}@1s,"]
COMPUTE = ("row", "step", "jitter", "lease", "3", "8-15", "0-999999999", "²", NINES, "topk")
NETWORK = [field.name for field in fields(SimNetworkSpec)]
CATALOGUES = {"strategy": strategies.CATALOGUE, "engine": engines.CATALOGUE}
OPTIONS = {
    kind: {name: list(spec.options_of(spec.find(name, catalogue, kind))) for name in catalogue}
    for kind, catalogue in CATALOGUES.items()
}


def a_spec(kind: str, damage: Damage) -> str:
    name = damage.choice(list(OPTIONS[kind]))
    return damage.of_text([f"{name}:{items(damage, OPTIONS[kind][name] or ['x'])}"], 1)


def items(damage: Damage, names: list[str]) -> str:
    return ",".join(f"{damage.choice(names)}={damage.choice(VALUES)}" for _ in range(damage.randint(1, 3)))


def written(damage: Damage, *names: str) -> str:
    return damage.of_text([items(damage, list(names))], 1)


def same(kind: type[Any]) -> Callable[[str], None]:
    """Reads a text, whose object's own text gives it again."""

    def take(text: str) -> None:
        made = kind.parse(text)
        assert kind.parse(str(made)) == made, str(made)

    return take


def a_strategy(text: str) -> None:
    made = strategy_of(text)
    assert strategy_of(spec_of(made)) == made


def an_address(text: str) -> None:
    assert parse_address(format_address(parse_address(text))) == parse_address(text)


FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[Damage], str]]] = {
    "strategy": (a_strategy, lambda damage: a_spec("strategy", damage)),
    "engine": (engine_of, lambda damage: a_spec("engine", damage)),
    "list": (spec.split_list, lambda damage: f"{a_spec('strategy', damage)},{a_spec('engine', damage)}"),
    "faults": (same(Faults), lambda damage: written(damage, *FAULTS)),
    "planned faults": (same(Faults), lambda damage: damage.of_text(PLANNED).rstrip(",")),
    "compute": (same(Compute), lambda damage: written(damage, *COMPUTE)),
    "network": (same(SimNetworkSpec), lambda damage: written(damage, *NETWORK)),
    "target": (target_of, lambda damage: damage.of_text(["test_accuracy=", "test_loss<=", *VALUES])),
    "keep": (BestModelPolicy.parse, lambda damage: damage.of_text(["best:", "max:", "loss", "last", *VALUES])),
    "ports": (ports_of, lambda damage: damage.of_text(["7000", "-", "7100", *VALUES])),
    "roles": (
        lambda text: cast_of(text, None, None, None),
        lambda damage: written(damage, "chief", "worker", "ps", "evaluator"),
    ),
    "address": (an_address, lambda damage: damage.of_text(["10.0.0.1", ":7000", "[::1]", "host", *VALUES])),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_texts(kind: str, inputs: int) -> None:
    take, draw = FORMATS[kind]
    damage = Damage(kind)
    with bounded(256):
        taken, refused = survive(take, (draw(damage) for _ in range(inputs)), BadInput)
    assert taken
    assert refused
