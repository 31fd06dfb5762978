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
    "update-sharing": "manyhands.strategies.update_sharing:UpdateSharing",
    "hogwild": "manyhands.strategies.hogwild:Hogwild",
    "rotate": "manyhands.strategies.rotate:Rotate",
}

_TRAVELS = "how numbers travel (shared memory, a ring, nccl) is the engine's choice; what is averaged so is `allreduce`"
_SPLIT = (
    "slices of each layer on several workers are not built yet; stages of a model are no strategy, but go with `allreduce` and others: "
    "model_parallel='stages=2'"
)
_OPTIMIZER = "an optimizer, which the task's `optimizer` makes; its gradients are averaged by `allreduce`"
_SOFTSYNC = (
    "`dynsgd` is the nearest: an update enters alone, divided by its staleness + 1; n-softsync collects N/n first"
)

ELSEWHERE = {  # what other systems call them: a spec of ours; or, where nothing here is the same, a sentence
    **dict.fromkeys(("ddp", "all-reduce", "horovod", "data-parallel", "sync", "synchronous", "mirrored"), "allreduce"),
    **dict.fromkeys(("bsp", "hardsync", "dist-sync", "bigdl", "byteps"), "allreduce"),
    **dict.fromkeys(("mirroredstrategy", "multiworkermirrored", "multiworkermirroredstrategy"), "allreduce"),
    **dict.fromkeys(("ring", "ring-allreduce", "hierarchical", "mpi", "nccl", "gloo"), _TRAVELS),
    "bytescheduler": "`allreduce:overlap=true` sends gradients while backward computes, without priorities",
    "adasum": "allreduce:combine=adasum",
    **dict.fromkeys(("zero-1", "zero1", "zeroredundancyoptimizer"), "allreduce:sharded=true"),
    **dict.fromkeys(("1bit", "1-bit", "one-bit", "onebit"), "allreduce:compress=onebit"),
    **dict.fromkeys(("topk", "top-k"), "allreduce:compress=topk:0.01"),
    "dgc": "`allreduce:compress=topk:0.001` is deep gradient compression without its momentum correction",
    "powersgd": "allreduce:compress=powersgd:2",
    "qsgd": "allreduce:compress=qsgd:4",
    **dict.fromkeys(("fp16", "bf16"), "allreduce:compress=bf16"),
    **dict.fromkeys(("fedavg", "localsgd", "local", "parameter-averaging", "model-averaging"), "local-sgd"),
    "federated": "rows that must stay where they are, and clients that drop out, are not here; FedAvg is `local-sgd`",
    "averaging": "local-sgd:period=end",
    "post-local-sgd": "local-sgd:warmup=100",
    "swap": "local-sgd:period=end,warmup=100",  # stochastic weight averaging in parallel
    **dict.fromkeys(("opendiloco", "fedopt", "bmuf"), "diloco"),
    "slowmo": "slow momentum is an example of a strategy of one's own; the nearest here is `diloco`, with Nesterov momentum",
    "streaming-diloco": "diloco:streaming=4",
    "decoupled-diloco": "diloco:via=server",
    **dict.fromkeys(("single", "none"), "solo"),
    "adag": "agn",  # dist-keras' name for what its author's thesis calls accumulated gradient normalisation
    "experimental": "distance",
    **dict.fromkeys(("async", "asynchronous", "asgd", "asp", "delayed", "distbelief", "dist-async"), "downpour"),
    **dict.fromkeys(("parameter-server", "parameterserver", "ps", "parameterserverstrategy"), "downpour"),
    **dict.fromkeys(("ssp", "essp", "stale", "stale-synchronous", "petuum", "bosen"), "downpour:bound=3"),
    **dict.fromkeys(("gradient-sharing", "shared-training", "strom"), "update-sharing"),
    **dict.fromkeys(("softsync", "n-softsync", "staleness-aware"), _SOFTSYNC),
    "dc-asgd": "delay compensation is not here; `dynsgd` divides an update by its staleness + 1",
    "adaptive": "a server with adaptive rates is `downpour:rule=adagrad`; a period that adapts is not here",
    "sandblaster": "Sandblaster L-BFGS is not built yet; DistBelief's other algorithm is `downpour`",
    **dict.fromkeys(("aeasgd", "elastic-averaging"), "easgd"),
    "elastic": "elastic averaging is `easgd`; workers that come and go during a run are `survive`",
    "aeamsgd": "eamsgd",
    **dict.fromkeys(("d-psgd", "dpsgd"), "gossip:graph=ring"),
    **dict.fromkeys(("decentralized", "decentralised", "bluefog"), "gossip"),
    **dict.fromkeys(("sgp", "push-sum"), "gossip:weights=push-sum"),
    **dict.fromkeys(("ad-psgd", "adpsgd"), "gossip:graph=pairs"),
    "swarm": "gossip:graph=pairs,period=4",
    "backup-workers": "quorum:backups=1",
    **dict.fromkeys(("hogwild!", "lock-free", "lockfree"), "hogwild"),
    **dict.fromkeys(("lars", "lamb"), _OPTIMIZER),
    "gradient-accumulation": "no strategy: with any, `micro_batch_size` says how many rows a forward takes",
    **dict.fromkeys(("zero", "fsdp", "deepspeed", "megatron", "model-parallel", "tensor-parallel"), _SPLIT),
    **dict.fromkeys(("pipeline", "pipeline-parallel", "gpipe"), _SPLIT),
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
