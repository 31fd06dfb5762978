"""The catalogue of strategies: one line each. Specs (`local-sgd:period=8`) become objects here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manyhands import spec
from manyhands.errors import BadInput

if TYPE_CHECKING:
    from manyhands.strategies.base import Strategy

CATALOGUE = {
    "solo": "manyhands.strategies.solo:Solo",
    "allreduce": "manyhands.strategies.allreduce:AllReduce",
    "local-sgd": "manyhands.strategies.local_sgd:LocalSGD",
    "diloco": "manyhands.strategies.diloco:DiLoCo",
    "gossip": "manyhands.strategies.gossip:Gossip",
    "ensemble": "manyhands.strategies.ensemble:Ensemble",
    "downpour": "manyhands.strategies.downpour:Downpour",
    "agn": "manyhands.strategies.agn:AGN",
    "dynsgd": "manyhands.strategies.dynsgd:DynSGD",
    "distance": "manyhands.strategies.distance:Distance",
    "easgd": "manyhands.strategies.easgd:EASGD",
    "eamsgd": "manyhands.strategies.eamsgd:EAMSGD",
    "quorum": "manyhands.strategies.quorum:Quorum",
    "hogwild": "manyhands.strategies.hogwild:Hogwild",
}

ELSEWHERE = {  # what other systems call them
    "ddp": "allreduce",
    "all-reduce": "allreduce",
    "horovod": "allreduce",
    "data-parallel": "allreduce",
    "sync": "allreduce",
    "mirrored": "allreduce",
    "fedavg": "local-sgd",
    "localsgd": "local-sgd",
    "local": "local-sgd",
    "parameter-averaging": "local-sgd",
    "averaging": "local-sgd:period=end",
    "post-local-sgd": "local-sgd:warmup=100",
    "opendiloco": "diloco",
    "streaming-diloco": "diloco:streaming=4",
    "decoupled-diloco": "diloco:via=server",
    "fedopt": "diloco",
    "single": "solo",
    "none": "solo",
    "adag": "agn",  # dist-keras' name for what its author's thesis calls accumulated gradient normalisation
    "experimental": "distance",
    "async": "downpour",
    "asgd": "downpour",
    "aeasgd": "easgd",
    "aeamsgd": "eamsgd",
    "ssp": "downpour:bound=3",
    "d-psgd": "gossip:graph=ring",
    "dpsgd": "gossip:graph=ring",
    "decentralized": "gossip",
    "decentralised": "gossip",
    "bluefog": "gossip",
    "sgp": "gossip:weights=push-sum",
    "push-sum": "gossip:weights=push-sum",
    "ad-psgd": "gossip:graph=pairs",
    "adpsgd": "gossip:graph=pairs",
    "backup-workers": "quorum:backups=1",
}


def strategy_of(given: Strategy | str) -> Strategy:
    """The strategy that an object or a spec string names. Raises UnknownName, listing what there is."""
    from manyhands.strategies.base import Strategy

    if isinstance(given, Strategy):
        return given
    if not isinstance(given, str):
        raise BadInput(f"strategy must be a Strategy or a string such as 'local-sgd:period=8', not {given!r}")
    name, options = spec.parse(given)
    maker = spec.find(name, CATALOGUE, "strategy", ELSEWHERE)
    if not (isinstance(maker, type) and issubclass(maker, Strategy)):
        raise BadInput(f"{name} is not a Strategy: derive the class from manyhands.Strategy")
    return spec.make(maker, options, f"strategy {name}")  # type: ignore[no-any-return]


def described(given: str) -> dict[str, Any]:
    """{options: all with their values, own_pace} of a catalogued strategy's spec; {} of a user's own."""
    if spec.parse(given)[0] not in CATALOGUE:
        return {}
    strategy = strategy_of(given)
    options = {name: getattr(strategy, name) for name in spec.options_of(type(strategy))}
    return {"options": options, "own_pace": strategy.leasing() is not None}


def kind_of(given: str) -> type[Strategy] | None:
    """The class of a catalogued strategy's spec; None for a user's own."""
    name = given.partition(":")[0]
    return spec.find(name, CATALOGUE, "strategy", ELSEWHERE) if name in CATALOGUE else None


def takes_codec(given: str) -> bool:
    """Whether the strategy of a spec could compress what it exchanges."""
    if kind_of(given) is None:
        return False
    try:
        strategy_of(f"{given}{',' if ':' in given else ':'}compress=int8")
    except BadInput:
        return False
    return True


def spec_of(strategy: Strategy) -> str:
    """The string that names this strategy with its options."""
    return spec.to_spec(strategy, strategy.name)
