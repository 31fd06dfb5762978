"""Spec strings, there and back."""

from dataclasses import dataclass
from typing import Literal

from manyhands import spec
from manyhands.errors import UnknownName
from manyhands.strategies import spec_of, strategy_of
from manyhands.strategies.base import State, Strategy
from manyhands.strategies.local_sgd import LocalSGD
from refusals import refused


@dataclass(frozen=True, kw_only=True)
class Options:
    period: int | Literal["end"] = 8
    alpha: float = 0.5
    master: str = "local"
    flag: bool = False
    limit: float | None = None
    mode: Literal["a", "b"] = "a"


def test_parse() -> None:
    for text, name, options in (
        ("solo", "solo", {}),
        ("local-sgd:period=8,optimizer-state=kept", "local-sgd", {"period": "8", "optimizer_state": "kept"}),
        ("spark:master=local-cluster[2,1,1024],x=1", "spark", {"master": "local-cluster[2,1,1024]", "x": "1"}),
        ("spark:master=spark://host:7077", "spark", {"master": "spark://host:7077"}),
        ('s:m="a,b"', "s", {"m": "a,b"}),
        ("dir/my.py:Mine:alpha=.1", "dir/my.py:Mine", {"alpha": ".1"}),
        ("my.py:task", "my.py:task", {}),
    ):
        assert spec.parse(text) == (name, options)
    for text in ("a:b", "my.py", "a:x=[1", "a:=3", 'a:x="1'):
        refused("expected option=value|names a file|is not closed", spec.parse, text)


def test_lists() -> None:
    for text, specs in (
        ("solo,local-sgd:period=8,warmup=3,allreduce", ["solo", "local-sgd:period=8,warmup=3", "allreduce"]),
        ("solo, downpour", ["solo", "downpour"]),
        ("a:m=x[1,2],b", ["a:m=x[1,2]", "b"]),
        ("local-sgd,period=2", ["local-sgd:period=2"]),
        ("a,b:x=spark://h:1,y=2", ["a", "b:x=spark://h:1,y=2"]),
    ):
        assert spec.split_list(text) == specs


def test_values_take_the_types_of_the_options() -> None:
    texts = {"period": "end", "alpha": "1e-1", "flag": "yes", "limit": "none", "mode": "b", "master": "3"}
    made = Options(period="end", alpha=0.1, flag=True, limit=None, mode="b", master="3")
    assert spec.make(Options, texts, "x") == made
    assert spec.make(Options, {"period": "3", "limit": "2"}, "x") == Options(period=3, limit=2.0)
    for name, value in (("period", "x"), ("alpha", "x"), ("flag", "x"), ("mode", "c")):
        refused(f"x: {name} must be", lambda name=name, value=value: spec.make(Options, {name: value}, "x"))


def test_unknown_names_list_what_there_is_and_hint() -> None:
    hint = "no option 'alfa' .did you mean 'alpha'..: its options are period, alpha"
    refused(hint, spec.make, Options, {"alfa": "1"}, "x", kind=UnknownName)
    refused(
        "no strategy 'fedavg' .what others call fedavg is 'local-sgd' here", strategy_of, "fedavg", kind=UnknownName
    )


def test_objects_and_strings_name_the_same() -> None:
    for text in ("solo", "allreduce:overlap=true", "local-sgd", "local-sgd:period=end,warmup=3"):
        assert spec_of(strategy_of(text)) == text
    for given in ("local-sgd:period=3", LocalSGD(period=3)):
        assert strategy_of(given) == LocalSGD(period=3)
    text = spec.to_spec(Options(master="a,b"), "x")
    assert text == 'x:master="a,b"'
    assert spec.make(Options, spec.parse(text)[1], "x") == Options(master="a,b")


def test_strategies_of_the_users_own_file(tmp_path) -> None:
    file = tmp_path / "own_strategy.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom manyhands.strategies.solo import Solo\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Solo):\n    alpha: float = 0.0\nclass Other: pass\n"
    )
    assert strategy_of(f"{file}:Mine:alpha=.1").alpha == 0.1
    refused("is not a Strategy", strategy_of, f"{file}:Other")


def test_an_option_without_annotation_takes_its_defaults_type() -> None:
    def make(width=32, rate=0.5, deep=False, kind="a", other=None):  # type: ignore[no-untyped-def]
        return width, rate, deep, kind, other

    texts = {"width": "64", "rate": "1", "deep": "yes", "kind": "3", "other": "3"}
    assert spec.make(make, texts, "x") == (64, 1.0, True, "3", "3")
    refused("x: width must be a whole number", spec.make, make, {"width": "wide"}, "x")


def test_a_strategy_of_the_users_own_needs_no_name() -> None:
    class Mine(Strategy):
        def start(self, replica, worker):  # type: ignore[no-untyped-def]
            return State()

        def exchange(self, replica, worker, state):  # type: ignore[no-untyped-def]
            return True

    assert (Mine.name, Mine.source, Mine.summary, Mine.consistency) == ("mine", "", "", "")
    assert strategy_of("local-sgd").name == "local-sgd"


def test_local_sgd_takes_whole_numbers_and_known_words() -> None:
    """CASE 20"""
    for name, values in {"period": (2.5, True, "2", 0), "warmup": (1.5, -1), "optimizer_state": ("mean",)}.items():
        for wrong in values:
            refused(f"{name} must be", lambda name=name, wrong=wrong: LocalSGD(**{name: wrong}), case=(name, wrong))
