"""Options of strategies: which cannot be, what a strategy asks of servers and leases for them, and how far its steps go."""

from typing import Any

import pytest
from by_hand import hands, slope

import manyhands as mh
from manyhands.errors import BadInput, UnknownName
from manyhands.strategies import server_strategy, spec_of, strategy_of
from manyhands.strategies.allreduce import AllReduce
from manyhands.strategies.base import Leasing
from manyhands.strategies.diloco import DiLoCo
from manyhands.strategies.easgd import EASGD
from manyhands.strategies.gossip import Gossip
from manyhands.strategies.quorum import Quorum
from refusals import all_refused, refused

REFUSED = [
    ("agn:window=0", "window must be a whole number of at least 1"),
    *((f"distance:rate={rate}", "rate must be a number above 0") for rate in (0.0, -1.0, "nan")),
    ("downpour:push_every=0", "push_every must be a whole number of at least 1, not 0"),
    ("downpour:pull_every=0", "pull_every must be"),
    ("downpour:bound=-1", "bound must be a whole number of 0 or more, or none"),
    ("downpour:warmup=-1", "warmup must be"),
    ("downpour:bound=0,warmup=5", "give bound=1 or more, or no warmup"),
    ("downpour:rule=lbfgs", "rule must be one of add, adagrad, sgd"),
    ("downpour:outer_rate=0.5", "rule add has no outer_rate"),
    ("downpour:rule=sgd,outer_rate=0", "outer_rate must be a number above 0"),
    ("downpour:rule=adam,outer_momentum=0.5", "rule adam has no outer_momentum"),
    ("downpour:rule=sgd,outer_momentum=1.0", "below 1"),
    ("downpour:overlap=true,bound=0", "overlap=true lets a worker compute while it exchanges, and bound=0"),
    ("downpour:compress=topk:2", "strategy downpour: compress=topk:2: topk:FRACTION takes a fraction"),
    ("allreduce:compress=zip", "strategy allreduce: compress=zip: no codec 'zip': .* one of topk:FRACTION"),
    ("allreduce:feedback=true", "feedback=true needs compress, and compress is none"),
    ("allreduce:compress=int8,overlap=true", "overlap sends slices .* compress=int8 looks at the whole"),
    *(
        (f"allreduce:sharded=true,{option}", "sharded gives each worker its part of the mean alone")
        for option in ("compress=int8", "overlap=true", "combine=adasum")
    ),
    ("hogwild:warmup=-1", "warmup must be a whole number of at least 0"),
    ("quorum:backups=-1", "backups must be a whole number of at least 0"),
    ("easgd:period=0", "period must be a whole number of at least 1"),
    ("easgd:alpha=0", "alpha must be a number above 0, or none"),
    ("easgd:via=group,bound=0", "have no effect with via=group"),
    ("easgd:via=group,warmup=5", "have no effect with via=group"),
    ("easgd:bound=0,warmup=5", "give bound=1 or more, or no warmup"),
    ("easgd:overlap=true,bound=0", "overlap=true lets a worker compute while it exchanges, and bound=0"),
    ("easgd:overlap=true,via=group", "overlap=true is for a server"),
    ("eamsgd:momentum=1", "momentum must be 0 or more and below 1"),
    ("gossip:period=0", "period must be a whole number of at least 1"),
    ("gossip:graph=random,seed=-1", "seed must be a whole number of at least 0"),
    ("gossip:graph=ring,seed=1", "seed has no effect with graph=ring"),
    ("gossip:bound=1", "bound has no effect with graph=exponential"),
    ("gossip:graph=pairs,bound=-1", "bound must be a whole number of 0 or more"),
    ("gossip:graph=pairs,weights=push-sum", "weights=push-sum has no effect with graph=pairs"),
    ("update-sharing:density=0", "density must be a number above 0 and at most 1"),
    ("update-sharing:density=1.5", "density must be a number above 0 and at most 1"),
    ("update-sharing:tau=0", "tau must be a number above 0"),
    ("update-sharing:density=none", "give tau, such as tau=0.001"),
    ("update-sharing:bound=2", "use downpour:bound=2"),
    ("update-sharing:bound=0,warmup=3", "bound=0 keeps all in step"),
    ("diloco:period=0", "period must be a whole number of at least 1"),
    *((f"diloco:outer_rate={rate}", "outer_rate must be a number above 0") for rate in (0, "inf", "nan")),
    ("diloco:outer_momentum=1.0", "outer_momentum must be a number from 0 to below 1"),
    ("diloco:compress=zip", "compress=zip: no codec 'zip'"),
    ("diloco:feedback=true", "feedback=true needs compress"),
    ("diloco:streaming=-1", "streaming must be a whole number of at least 0"),
    ("diloco:overlap=1", "overlap has no effect: leave it out, or give streaming=2"),
    ("diloco:mixing=0.5", "mixing has no effect: leave it out, or give streaming=2"),
    ("diloco:streaming=2,mixing=1.0", "mixing must be a number from 0 to below 1"),
    ("diloco:streaming=2,overlap=-1", "overlap must be a whole number of at least 0"),
    ("diloco:streaming=2,compress=int8", "compress=int8 waits for one whole vector: leave one of them out"),
    ("diloco:streaming=2,via=server", "streaming does not work with via=server"),
    ("diloco:streaming=5,period=4", "give streaming=4 or less"),
    ("diloco:streaming=2,period=4,overlap=4", "overlap=4 must be less than period=4"),
    *((f"diloco:{one}=0", f"{one} has no effect: leave it out, or give via=server") for one in ("grace", "bound")),
    ("diloco:quorum=2", "quorum has no effect: leave it out, or give via=server"),
    ("diloco:via=server,bound=-1", "bound must be a whole number of 0 or more"),
    ("diloco:via=server,bound=0,quorum=2", "bound=0 waits for all workers, so quorum has no effect"),
    ("diloco:via=server,quorum=0", "quorum must be a whole number of at least 1"),
    ("diloco:via=server,grace=-1", "grace must be a whole number of at least 0"),
]


def test_what_cannot_be_is_refused() -> None:
    all_refused(strategy_of, REFUSED)
    wrong: list[tuple[type[Any], dict[str, Any], str]] = [  # which no spec can say
        (AllReduce, {"compress": 0.1}, "compress must be a string such as topk:0.01"),
        (AllReduce, {"compress": "int8", "feedback": "x"}, "feedback must be true, false or none"),
        *((DiLoCo, {"outer_momentum": x}, "outer_momentum must be a number from 0 to below 1") for x in (True, None)),
        (DiLoCo, {"via": "mail"}, "via must be group or server"),
        (EASGD, {"via": "mail"}, "via must be server or group"),
        (Gossip, {"graph": "star"}, "graph must be one of exponential, ring, random, pairs"),
        (Gossip, {"weights": "mean"}, "weights must be one of doubly-stochastic, push-sum"),
        (DiLoCo, {"outer_rate": "0.7"}, "outer_rate must be a number above 0"),
        (DiLoCo, {"streaming": 2, "mixing": "a"}, "mixing must be a number from 0 to below 1"),
    ]
    for kind, options, words in wrong:
        refused(words, lambda kind, options: kind(**options), kind, options)
    for bound in (True, 1.0, -1):
        words = "strategy x: bound must be a whole number of 0 or more, or none"
        refused(words, server_strategy.check_pace, "x", bound, 0)
    server_strategy.check_pace("x", None, 3)
    for name in ("local-sgd", "easgd", "eamsgd", "hogwild", "solo", "ensemble"):  # they exchange parameters
        refused("has no option 'compress'", strategy_of, f"{name}:compress=int8", kind=UnknownName)
    refused("what others call ad-psgd is 'gossip:graph=pairs' here", strategy_of, "ad-psgd", kind=UnknownName)


def test_what_that_many_workers_cannot_have() -> None:
    refused("backups=2 must be less than workers=2: give at most 1", Quorum(backups=2).check_workers, 2)
    Quorum(backups=2).check_workers(1)
    with pytest.raises(BadInput, match="quorum=3 must not be more than workers=2: give at most 2"):
        hands("diloco:via=server,quorum=3", [slope(1.0)] * 2, lambda hand: None)


def test_specs_name_codecs() -> None:
    strategy = strategy_of("allreduce:compress=topk:0.01,feedback=false")
    assert strategy == AllReduce(compress="topk:0.01", feedback=False)
    assert spec_of(strategy) == "allreduce:compress=topk:0.01,feedback=false"
    listed = ["solo", "allreduce:compress=topk:0.01,feedback=true"]
    assert mh.spec.split_list(",".join(listed)) == listed


def test_servers() -> None:
    for spec in ("easgd:via=group", "hogwild", "gossip", "diloco:compress=int8"):
        assert strategy_of(spec).server() is None, spec
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("quorum:backups=1", {"rule": "quorum", "options": {"backups": 1}, "one_shard": True}),
        ("gossip:graph=pairs,seed=3,bound=2", {"rule": "pairs", "bound": 2, "options": {"seed": 3}}),
        ("diloco:via=server,compress=int8", {"rule": "rounds", "one_shard": True, "compress": "int8"}),
        ("diloco:via=server,bound=0,compress=int8", {"rule": "outer", "compress": "int8"}),
        ("downpour", {"bound": None}),
        ("downpour:rule=adamw", {"options": {"optimizer": "AdamW", "rate": 1e-3, "momentum": 0.0}}),
        *(
            (f"{spec}compress=threshold:1e-3:4", {"compress": "threshold:1e-3:4"})
            for spec in ("downpour:rule=adagrad,", "downpour:rule=adam,", "downpour:", "agn:", "dynsgd:", "quorum:")
        ),
    ]
    for spec, fields in wanted:
        server = strategy_of(spec).server()
        assert {name: getattr(server, name) for name in fields} == fields, spec
    for rule, rate in (("adagrad", 0.01), ("sgd", 1.0)):
        server = strategy_of(f"downpour:rule={rule}").server()
        assert server is not None
        assert server.options["rate"] == rate


def test_leases() -> None:
    """None: all are in step."""
    for spec, warmup in [
        ("downpour:warmup=7", 7),
        ("downpour:bound=2,warmup=3", 3),
        ("downpour:bound=0", None),
        ("easgd:warmup=3", 3),
        ("easgd:bound=0", None),
        ("easgd:via=group", None),
        ("hogwild:warmup=5", 5),
        ("quorum", None),
        ("gossip", None),
        ("gossip:graph=pairs,bound=2", 0),
        ("gossip:graph=pairs,bound=0", None),
        ("diloco", None),
        ("diloco:via=server", 0),
        ("diloco:via=server,bound=0", None),
    ]:
        assert strategy_of(spec).leasing() == (None if warmup is None else Leasing(rank0_warmup_ticks=warmup)), spec


def test_rate_factors() -> None:
    """At one speed dynsgd's updates of N workers enter with 1/N each; at bound 0 nothing is stale."""
    sgd = "downpour:rule=sgd,outer_rate=.5"
    for spec, workers, factor in [
        ("agn", 4, 1.0),
        ("agn:window=8", 4, 0.5),
        ("dynsgd", 4, 1),
        ("dynsgd:bound=0", 4, 4),
        ("eamsgd:momentum=.75", 4, 4),
        ("hogwild", 3, 3),
        ("downpour", 4, 4),
        (sgd, 4, 2),
        (f"{sgd},outer_momentum=.5", 4, 4),
        (f"{sgd},outer_momentum=.5,bound=0", 4, 1),
        ("downpour:rule=adagrad", 4, 4),
        ("diloco", 9, 7.0),
        ("diloco:streaming=2", 9, 7 * (1 - 0.5 / 16) / 4),
        ("diloco:streaming=2,overlap=0", 9, 7.0),
        ("diloco:via=server", 9, 7.0),
        ("diloco:via=server,grace=0", 4, 7 * 4 / 3),
        ("diloco:via=server,grace=0,quorum=2", 8, 28.0),
        ("diloco:via=server,grace=0,quorum=2", 1, 7.0),
        ("diloco:via=server,bound=0", 9, 7.0),
    ]:
        assert strategy_of(spec).rate_factor(workers) == pytest.approx(factor), (spec, workers)
