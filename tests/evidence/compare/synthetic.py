"""Comparisons that nobody ran: numbers of plausible sizes from a seed, for the tests of what is made of them."""

import math
from dataclasses import replace
from random import Random
from typing import Any

from manyhands.evidence.advise import Advice
from manyhands.evidence.compare.comparison import Comparison, Difference, Point, Target, Trial, Variant

ROWS, VALIDATIONS = 24_000, 12
SERVED = ("downpour", "dynsgd", "agn")
HOSTILE = (
    "<a href='//x.y'>z</a></script><script>window.broken = 1</script><img src=x onerror=\"window.broken = 2\">"
    "<a href='http://elsewhere.invalid/'>&lt;b&gt;%{x}</a>$x$ {{ 7 * 7 }} <!-- `|` **b** @somebody"
)
SPECS = (
    *("allreduce", "local-sgd:period=8", "diloco:period=16,outer_momentum=0.9", "downpour:push_every=4"),
    *("gossip:graph=exponential", "allreduce:compress=topk:0.01"),
)


def comparison(
    specs: tuple[str, ...] = SPECS[:4],
    workers: tuple[int, ...] = (2, 4),
    *,
    threads: int = 1,
    repeats: int = 3,
    target: float | None = 0.95,
    fails: tuple[str, ...] = (),
    **changes: Any,
) -> Comparison:
    """Solo with one thread and with four, and each strategy on each number of workers."""
    variants = (
        Variant(strategy="solo", workers=1, threads=1, name="solo, 1 thread"),
        Variant(strategy="solo", workers=1, threads=4, name="solo, 4 threads"),
        *(Variant(strategy=spec, workers=n, threads=threads, name=f"{spec} on {n}") for spec in specs for n in workers),
    )
    aim = None if target is None else Target(metric="test_accuracy", value=target, higher=True)
    trials = tuple(_trial(one, repeat, aim, one.name in fails) for repeat in range(repeats) for one in variants)
    made = Comparison(
        task="digits",
        parameters=38_282,
        variants=variants,
        trials=trials,
        repeats=repeats,
        metric="test_accuracy",
        higher=True,
        target=aim,
        reference="solo, 4 threads",
        time_margin=0.05,
        metric_margin=0.01,
        differences={one.name: _differences(one) for one in variants[2:] if one.name not in fails},
        verdict="allreduce on 4 is worth it: it reaches test_accuracy ≥ 0.95 in 0.62 of the time that solo, 4 threads takes.",
        advice=(
            Advice(
                kind="exchange-bound", text="downpour on 4 spends 31 % of its time exchanging: push_every=16 helps."
            ),
            Advice(kind="rate", text="diloco on 4 lost 0.012 of test_accuracy: its effective rate is 4 times solo's."),
        ),
        machine={"host": "workbench", "cores": 4, "processor": "AMD EPYC 7B13", "engine": "local", "device": "cpu"}
        | {"versions": {"python": "3.11.9", "torch": "2.13.0", "manyhands": "1.2.3"}, "when": "2031-05-04 12:31 UTC"}
        | {"command": "manyhands compare digits --workers 2,4 --target test_accuracy=0.95"},
        seconds=94.2,
    )
    return replace(made, **changes)


def changed(made: Comparison, name: str, **changes: Any) -> Comparison:
    """With other fields in all trials of a variant; a list has a value for each repeat."""

    def of(repeat: int) -> dict[str, Any]:
        return {field: value[repeat] if isinstance(value, list) else value for field, value in changes.items()}

    trials = tuple(replace(one, **of(one.repeat)) if one.variant == name else one for one in made.trials)
    return replace(made, trials=trials)


def hostile(text: str = HOSTILE) -> Comparison:
    """Every string that a user, a task or an error may choose is `text`."""
    made = comparison(("allreduce", text), (2,), fails=(f"{text} on 2",), verdict=f"The verdict of {text}.", task=text)
    named = Variant(strategy=text, workers=3, threads=1, name=f"{text} on 3")
    trials = [replace(trial, failure=text and f"{text}\n{text}") if trial.failure else trial for trial in made.trials]
    trials += [
        replace(_trial(named, repeat, made.target, False), metrics={"test_accuracy": 0.9, text: 1.0}, staleness={2: 9})
        for repeat in range(3)
    ]
    return replace(
        made,
        variants=(*made.variants, named),
        trials=tuple(trials),
        advice=(Advice(kind="any", text=text),),
        machine={"host": text, text: text, "versions": {text: text}, "command": text},
        simulated={text: text},
    )


def _trial(variant: Variant, repeat: int, target: Target | None, fails: bool) -> Trial:
    if fails:
        message = f"worker 1 raised RuntimeError: the loss is not finite\n\nTraceback of {variant.name}\n  File train.py, line 3"
        return Trial(variant=variant.name, repeat=repeat, seed=repeat, failure=message)
    random = Random(f"{variant.name} {repeat}")
    late = 0.0 if variant.solo else 0.1 * random.random() * variant.strategy.startswith("d")
    lost = 0.0 if variant.solo else 0.06 + 0.02 * math.log2(variant.workers) + late
    threads = (variant.workers * variant.threads) ** (0.7 if variant.solo else 1.0)
    speed = 4200 * threads * (1 - lost) * random.uniform(0.97, 1.03)
    seconds, ahead = ROWS / speed, random.uniform(-0.02, 0.02) - 0.3 * lost
    curve = tuple(_point(variant, at, seconds, ahead) for at in range(1, VALIDATIONS + 1))
    reached = next((one for one in curve if target is not None and one.metrics["test_accuracy"] >= target.value), None)
    final, right = curve[-1], curve[-1].metrics["test_accuracy"]
    return Trial(
        variant=variant.name,
        repeat=repeat,
        seed=repeat,
        rows=ROWS,
        unused=random.randrange(200) if variant.strategy.startswith("downpour") else 0,
        steps=375,
        rounds=375,
        seconds=seconds,
        launch_seconds=seconds + 1.2,
        rows_per_s=speed,
        curve=curve,
        metrics={"train_accuracy": right + 0.01, "test_accuracy": right, "test_loss": 0.08},
        target_seconds=reached and reached.seconds,
        target_rows=reached and float(reached.rows),
        distance=final.distance,
        cosine=0.99 - lost if final.distance else 1.0,
        agreement=0.99 - 0.1 * lost if final.distance else 1.0,
        agreement_of="classes",
        timing=tuple(_timing(variant, seconds, random) for _ in range(variant.workers)),
        bytes=0 if variant.solo else int(3.1e7 * variant.workers * (0.05 if "period" in variant.strategy else 1)),
        messages=0 if variant.solo else 750,
        staleness=_staleness(variant, random),
        memory=tuple(int(random.uniform(2.9e8, 3.3e8)) for _ in range(variant.workers)),
        effective_rate=0.003,
        rate=0.003,
        batch_size=64,
    )


def _point(variant: Variant, at: int, seconds: float, ahead: float) -> Point:
    reached = 0.985 - 0.85 * math.exp(-(at + 3 * ahead * at) / 2.6) + 0.1 * ahead
    far = 0.0 if variant.strategy == "allreduce" else (0.02 + abs(ahead)) * math.sqrt(at)
    apart = None if variant.name == "solo, 4 threads" else 2e-7 * at if variant.solo else far
    return Point(
        rows=ROWS * at // VALIDATIONS,
        seconds=seconds * at / VALIDATIONS,
        metrics={"test_accuracy": reached, "test_loss": 1.2 * math.exp(-at / 4)},
        distance=apart,
    )


def _timing(variant: Variant, seconds: float, random: Random) -> dict[str, float]:
    exchange, wait = (0.0, 0.0) if variant.solo else (random.uniform(0.08, 0.2), random.uniform(0.02, 0.1))
    shares = {"input": 0.02, "compute": 0.98 - exchange - wait, "exchange": exchange, "wait": wait}
    return {part: share * seconds for part, share in shares.items()}


def _staleness(variant: Variant, random: Random) -> dict[int, int]:
    if not variant.strategy.startswith(SERVED):
        return {}
    return {
        versions: random.randint(1, 400) // (1 + abs(versions - variant.workers + 1)) + 1
        for versions in range(2 * variant.workers)
    }


def _differences(variant: Variant) -> tuple[Difference, ...]:
    better, loses = variant.workers >= 4, "diloco" in variant.strategy
    rows = (1.61, 1.52, 1.7, "better") if better else (0.97, 0.9, 1.04, "unclear")
    time = (0.62, 0.58, 0.7, "better") if better else (1.2, 1.1, 1.3, "worse")
    metric = (-0.012, -0.02, -0.011, "worse") if loses else (0.001, -0.002, 0.004, "same")
    return tuple(
        Difference(of=of, middle=middle, low=low, high=high, margin=margin, outcome=outcome)
        for of, margin, (middle, low, high, outcome) in (
            ("rows_per_s", 0.05, rows),
            ("target_seconds", 0.05, time),
            ("test_accuracy", 0.0098, metric),
        )
    )
