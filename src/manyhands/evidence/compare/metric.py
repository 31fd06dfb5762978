"""By which metric a comparison judges, what target it has, and on which rows trials validate. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from manyhands.errors import BadInput
from manyhands.evidence.compare.comparison import Target
from manyhands.replica.evaluation import higher_is_better
from manyhands.task import Task

TEST, VALIDATION, TRAIN = "test_", "validation_", "train_"
PREFERRED = ("accuracy", "loss")  # of several metrics
_TARGET = re.compile(r"\s*([^\s<>=≤≥]+)\s*(<=|>=|≤|≥|=)\s*([^\s<>=≤≥]+)\s*")


def target_of(given: Target | str | None) -> Target | None:
    """`test_accuracy=0.97`, `test_loss<=1.8`. BadInput for anything else, or where `=` leaves the direction open."""
    if given is None or isinstance(given, Target):
        return given
    match = _TARGET.fullmatch(given)
    if match is None or not _is_number(match[3]):
        raise BadInput(
            f'target must be METRIC=VALUE, METRIC>=VALUE or METRIC<=VALUE, such as "test_accuracy=0.97", not {given!r}'
        )
    name, sign, value = match[1], match[2], float(match[3])
    higher = higher_is_better(name) if sign == "=" else sign in (">=", "≥")
    if higher is None:
        raise BadInput(
            f"target: the name {name!r} does not tell whether a higher or a lower value is better: write "
            f'"{name}>={value:g}" or "{name}<={value:g}"'
        )
    if not name.startswith((TEST, VALIDATION)):
        raise BadInput(
            f"target: {name} is not measured while a trial runs: give a metric that begins with {TEST} or {VALIDATION}"
        )
    return Target(metric=name, value=value, higher=higher)


def _is_number(text: str) -> bool:
    try:
        return float(text) - float(text) == 0  # finite
    except ValueError:
        return False


def check_data(task: Task, target: Target | None) -> None:
    """Raise BadInput for a target whose rows the task does not have."""
    if target is None:
        return
    needed = "test_data" if target.metric.startswith(TEST) else "validation_data"
    if getattr(task, needed) is None:
        raise BadInput(f"target {target} needs {needed}, and the task has none: give it some, or another target")


def on_test(task: Task, target: Target | None) -> bool:
    """Whether trials validate on the test rows: where a test metric judges, and where there are no others.

    Nothing is selected by it: every trial runs to its end, whatever it shows.
    """
    if target is not None:
        return target.metric.startswith(TEST)
    return task.test_data is not None


def swapped(task: Task) -> Task:
    """The task with validation and test rows exchanged; `renamed` restores the metrics' names."""
    return task.with_fields(validation_data=task.test_data, test_data=task.validation_data)


def renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    """test_* as validation_*, and the other way round."""
    return {_other(name): value for name, value in metrics.items()}


def _other(name: str) -> str:
    for prefix, other in ((TEST, VALIDATION), (VALIDATION, TEST)):
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


def metric_of(names: list[str], target: Target | None) -> tuple[str, bool]:
    """(the metric to judge by, whether more is better): the target's; else test_accuracy, test_loss, another of test;
    then of validation; then of train.

    names: all that a trial measures. Raises BadInput for a target that is not among them, and where no name of the
    first kind that there is says which way is better.
    """
    if target is not None:
        if target.metric not in names:
            raise BadInput(f"target: no metric {target.metric!r}: the task measures {', '.join(names)}")
        return target.metric, target.higher
    for prefix in (TEST, VALIDATION, TRAIN):
        own = [name for name in names if name.startswith(prefix)]
        ordered = [prefix + name for name in PREFERRED if prefix + name in own] + own
        for name in ordered:
            if (higher := higher_is_better(name)) is not None:
                return name, higher
        if own:
            raise BadInput(
                f"compare cannot tell whether higher or lower is better for {', '.join(own)}: choose the metric to "
                "judge by with "
                f'target= (--target "{own[0]}>=0.9" or "{own[0]}<=0.1")'
            )
    raise BadInput("the task's evaluate returns no metrics, and compare needs one to judge by: return at least one")
