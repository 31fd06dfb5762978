"""Options as users write them: quantities, roles, survive."""

import dataclasses
import math
from typing import Any

import pytest

from manyhands.engines.base import LaunchSpec
from manyhands.engines.quantities import expect_number, read_bandwidth, read_factor, read_items, read_seconds, shown
from manyhands.engines.roles import Roles
from manyhands.engines.survive import Survive
from manyhands.errors import BadInput, UnknownName
from manyhands.spec import field_docs
from refusals import all_refused

TIMES = {"0.01": 0.01, "1e-4": 1e-4, "10ms": 0.01, "50us": 5e-5, "50µs": 5e-5, "7ns": 7e-9, "2s": 2.0, "2 s": 2.0}
BANDWIDTHS = {"1e9": 1e9, "100Mbit": 1e8, "100mbit": 1e8, "100Mbit/s": 1e8, "100Mbps": 1e8, "56kbit": 56e3}
BANDWIDTHS |= {"1Gbit": 1e9, "2.5Gbit": 2.5e9, "1Tbit": 1e12, "1000bit": 1e3, "inf": math.inf}


def test_times_and_bandwidths() -> None:
    assert {text: read_seconds(text, "latency") for text in [*TIMES, ".5"]} == {**TIMES, ".5": 0.5}
    assert {text: read_bandwidth(text, "bandwidth") for text in BANDWIDTHS} == BANDWIDTHS
    no_times = ("", "1m", "10MS", "-1", "1 0", "nan", "inf", "1min", "s", "1e", "1,5")
    words = "latency must be a time in seconds, such as"
    all_refused(lambda text: read_seconds(text, "latency"), [(text, words) for text in no_times])
    words = r"bandwidth must be a number of bit/s above 0, such as 1e9.*; got '[^']*'$"
    no_bandwidths = [(text, words) for text in ("", "0", "-1", "1G", "100M", "nan", "Mbit", "1Xbit")]
    words = "bytes are not bits, 1 MB/s is 8Mbit"
    bytes_ = [(text, words) for text in ("100MB", "100MB/s", "1GBps", "8B", "100 Mbyte")]
    all_refused(lambda text: read_bandwidth(text, "bandwidth"), [*no_bandwidths, *bytes_])


def test_factors_and_numbers() -> None:
    assert [read_factor(text, "3") for text in ("5x", "0.5x", "2")] == [5.0, 0.5, 2.0]
    no_factors = [(text, "3 must be a factor above 0, such as 5x") for text in ("0x", "-1x", "x", "5y", "")]
    all_refused(lambda text: read_factor(text, "3"), no_factors)

    expect_number(0, "row", least=0)
    odd = [(value, "row must be a finite number; got") for value in (math.nan, math.inf, True, "1", None)]
    all_refused(lambda value: expect_number(value, "row"), odd)
    all_refused(lambda value: expect_number(value, "row", least=0), [(-1, "row must be at least 0; got -1")])
    all_refused(lambda value: expect_number(value, "row", above=0), [(0, "row must be above 0; got 0")])
    for value, text in ((1e9, "1e+09"), (0.1, "0.1"), (1 / 3, "0.3333333333333333"), (math.inf, "inf")):
        assert (shown(value), float(text)) == (text, value)


def test_items() -> None:
    assert read_items("lan, a=1 ,b='x,y'", "network") == [("lan", ""), ("a", "1"), ("b", "x,y")]
    assert read_items("[a=1,b=2]", "network") == [("a", "1"), ("b", "2")]
    assert read_items("  ", "network") == []
    no_items = [(text, "network must be option=value") for text in ("a=", "=1", "a=1,,b=2")]
    all_refused(lambda text: read_items(text, "network"), no_items)


def test_ranks_are_chief_workers_ps_evaluator_whatever_the_order_asked() -> None:
    roles = Roles(workers=2, others={"evaluator": 1, "ps": 2, "chief": 1})
    assert list(map(roles.name_of, range(6))) == ["chief 0", "worker 0", "worker 1", "ps 0", "ps 1", "evaluator 0"]
    assert roles.awaited == {0, 1, 2}
    assert Roles(workers=1, others={"ps": 0}).counts == {"worker": 1}


def test_until_says_whose_return_ends_the_run() -> None:
    for until, awaited in (
        (("chief",), {0}),
        (("worker",), {1, 2}),
        (("chief", "worker", "evaluator"), {0, 1, 2, 4}),
        (["ps"], {3}),
    ):
        roles = Roles(workers=2, others={"chief": 1, "ps": 1, "evaluator": 1}, until=until)  # type: ignore[arg-type]
        assert roles.awaited == awaited, until


def test_what_no_cluster_can_be() -> None:
    one: dict[str, Any] = {"workers": 1, "others": {}}
    wrong = [
        ({"workers": 0}, "workers must be a whole number of at least 1, not 0"),
        ({"others": {"worker": 2}}, "must not contain worker"),
        ({"others": {"ps": True}}, "number of ps must be a whole number, 0 or more, not True"),
        ({"others": {"chief": 2}}, "at most one chief, not 2"),
        ({"others": {"evaluator": 2}}, "at most one evaluator, not 2"),
        ({"until": "worker"}, r"until must be a tuple of roles.*'worker',"),
        ({"until": ("chief",)}, "names no role of this cluster: choose from worker"),
        ({"until": ()}, "names no role of this cluster"),
    ]
    all_refused(lambda options: Roles(**{**one, **options}), wrong)
    unknown = [
        ({"others": {"master": 1}}, "no role 'master'; choose from chief, ps, evaluator"),
        ({"until": ("boss",)}, "no role 'boss'; choose from chief, worker, ps"),
    ]
    all_refused(lambda options: Roles(**{**one, **options}), unknown, UnknownName)


def test_a_launch_names_and_awaits_by_roles_and_else_calls_all_workers() -> None:
    plan = LaunchSpec(workers=2)
    assert plan.awaited == {0, 1}
    assert [plan.name_of(process_index) for process_index in (1, -1)] == ["worker 1", "server shard 0"]
    plan = LaunchSpec(workers=2, roles=Roles(workers=1, others={"ps": 1}))
    assert plan.awaited == {0}
    assert [plan.name_of(process_index) for process_index in (0, 1, -2)] == ["worker 0", "ps 0", "server shard 1"]


def test_a_text_is_read_and_reads_back() -> None:
    assert [Survive.of(nothing) for nothing in (None, "", "  ")] == [None] * 3
    for text, made in (
        ("max_losses=3,replace=false", Survive(max_losses=3, replace=False)),
        ("max_losses=any, min-workers=2", Survive(max_losses="any", min_workers=2)),
        ("max_workers=8,max_restarts=1,copies=2", Survive(max_workers=8, max_restarts=1, copies=2)),
        ("silence_s=2.5,wait_s=30,cooldown_s=1", Survive(silence_s=2.5, wait_s=30, cooldown_s=1)),
        ("slow=3,max_workers=none", Survive(slow=3)),
        ("max_losses=0", Survive()),
    ):
        assert Survive.of(text) == Survive.of(str(made)) == made, text
        assert Survive.of(made) is made
    assert str(Survive(max_losses="any", replace=False, slow=2.5)) == "max_losses=any,replace=false,slow=2.5"
    assert str(Survive()) == "max_losses=0"  # "" would read as None


def test_an_unknown_option_lists_what_there_is() -> None:
    with pytest.raises(UnknownName, match=r"no option 'max_loses' \(did you mean 'max_losses'\?\)") as caught:
        Survive.of("max_loses=3")
    for field in dataclasses.fields(Survive):
        assert field.name in str(caught.value)
    assert field_docs(Survive).keys() == {field.name for field in dataclasses.fields(Survive)}


def test_what_makes_no_sense_is_refused() -> None:
    unread: list[tuple[Any, str]] = [
        ("3", "cannot read '3'.*expected option=value"),
        ("max_losses=some", "max_losses must be a whole number.*one of any"),
        ("replace=perhaps", "replace must be true or false"),
        ("min_workers=2.5", "min_workers must be a whole number"),
        ("wait_s=long", "wait_s must be a number"),
        (3, "survive must be a text.*got int"),
    ]
    all_refused(Survive.of, unread)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_losses": -1}, "max_losses must be a whole number of at least 0, or any; got -1"),
        ({"max_losses": 1.5}, "max_losses .* got 1.5"),
        ({"max_losses": True}, "max_losses .* got True"),
        ({"max_losses": "all"}, "max_losses .* got 'all'"),
        ({"min_workers": 0}, "min_workers must be a whole number of at least 1; got 0"),
        ({"max_workers": 0}, "max_workers must be a whole number of at least 1; got 0"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers must be at least min_workers, which is 3; got 2"),
        ({"replace": 1}, "replace must be true or false; got 1"),
        ({"max_restarts": -1}, "max_restarts must be a whole number of at least 0; got -1"),
        ({"copies": 0}, "copies must be 1, or 2"),
        ({"copies": 3}, "copies must be 1, or 2 .* got 3"),
        ({"silence_s": 0}, "silence_s must be a positive number of seconds; got 0"),
        ({"wait_s": -1.0}, "wait_s must be a positive number of seconds; got -1.0"),
        ({"cooldown_s": math.nan}, "cooldown_s must be a positive number of seconds; got nan"),
        ({"wait_s": math.inf}, "wait_s must be a positive number of seconds; got inf"),
        ({"slow": 1}, "slow must be a factor above 1.* got 1"),
        ({"slow": -2.0}, "slow must be a factor above 1"),
    ]
    all_refused(lambda options: Survive(**options), cases)


def test_a_run_that_cannot_have_it_is_refused() -> None:
    Survive(min_workers=2, max_workers=8, copies=2).check(4, 8, True)
    Survive().check(4, None, False)
    cases: list[tuple[tuple[dict[str, Any], tuple[int, int | None, bool]], str]] = [
        (({"min_workers": 3}, (2, 32, False)), "must start with min_workers=3 or more; got 2 workers"),
        (({"max_workers": 4}, (5, 32, False)), "must start with max_workers=4 or less; got 5 workers"),
        (({"max_workers": 64}, (4, 32, False)), "max_workers must be at most batch_size, which is 32.*got 64"),
        (({}, (4, 3, False)), "max_workers must be at most batch_size, which is 3.*got 4"),
        (({"copies": 2}, (4, 32, False)), "copies=2 is of server shards, and this run has no server"),
    ]
    all_refused(lambda case: Survive(**case[0]).check(*case[1]), cases, BadInput)
