"""What a checkpoint of a training run holds: a replica, its strategy's state, random state and place, by name and unpadded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from manyhands import random_state
from manyhands.checkpoint import Checkpoint
from manyhands.errors import BadInput
from manyhands.replica import Replica
from manyhands.strategies.base import State

Parts = tuple[dict[str, Tensor], dict[str, Any]]  # tensors by name, JSON values


def capture(replica: Replica, state: State, place: dict[str, Any]) -> Parts:
    """This rank's part; `place` is where the loop stands."""
    tensors: dict[str, Tensor] = {}
    _put(tensors, "parameters", replica.named(replica.parameters))
    _put(tensors, "buffers", dict(replica.model.named_buffers()))
    for field, tensor in state.tensors().items():
        _put(tensors, f"strategy/{field}", _by_name(replica, tensor))
    optimizer = _optimizer_state(replica, tensors)
    random_tensors, random_values = random_state.capture()
    _put(tensors, "random", random_tensors)
    values = {
        "place": place,
        "step": replica.step,
        "strategy": state.numbers(),
        "optimizer": optimizer,
        "schedule": _plain(replica.schedule.state_dict()) if replica.schedule is not None else None,
        "random": random_values,
    }
    return tensors, values


def restore(
    checkpoint: Checkpoint, replica: Replica, state: State, rank: int, size: int, total: int | None
) -> tuple[State, dict[str, Any]]:
    """Put this rank back where the checkpoint stood; returns its strategy state and `place`.

    With as many ranks as it was written by, bit for bit. With another number: the mean of the written replicas (which
    are equal in synchronous strategies, and then kept as they are), rank 0's optimizer and schedule, the strategy's own
    `merge`, and each rank's random state as it is now. Where `total`, the number of steps planned, is another than it
    was, the schedule is the new one's, wound on to the same step.
    """
    same = checkpoint.ranks == size
    source = rank if same else 0
    tensors, values = checkpoint.tensors(source), checkpoint.values(source)
    _fill(replica.named(replica.parameters), "parameters", tensors if same else _mean_parameters(checkpoint))
    _fill(dict(replica.model.named_buffers()), "buffers", tensors)
    rescheduled = replica.schedule is not None and values["place"]["total"] != total
    _restore_optimizer(replica, tensors, values["optimizer"], hyperparameters=not rescheduled)
    if rescheduled:
        _wind(replica, values["schedule"]["last_epoch"])
    elif replica.schedule is not None:
        replica.schedule.load_state_dict(_scheduler_state(values["schedule"]))
    replica.step = values["step"]
    if same:
        random_state.restore(_take(tensors, "random"), values["random"])
        return _restore_state(replica, state, tensors, values["strategy"]), values["place"]
    states = [
        _restore_state(replica, state, checkpoint.tensors(r), checkpoint.values(r)["strategy"])
        for r in range(checkpoint.ranks)
    ]
    return state.merge(states, rank, size), values["place"]


def _put(tensors: dict[str, Tensor], prefix: str, named: dict[str, Tensor]) -> None:
    tensors.update({f"{prefix}/{name}": tensor for name, tensor in named.items()})


def _take(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(prefix + "/")}


def _by_name(replica: Replica, tensor: Tensor) -> dict[str, Tensor]:
    return replica.named(tensor) if tensor.shape == replica.parameters.shape else {"": tensor}


def _fill(targets: dict[str, Tensor], prefix: str, tensors: dict[str, Tensor]) -> None:
    sources = _take(tensors, prefix)
    if sources.keys() != targets.keys() or any(sources[name].shape != targets[name].shape for name in targets):
        raise BadInput(
            f"the checkpoint's {prefix} are not this model's: {_difference(sources, targets)}. Resume with the model it was written by, "
            "or start in another run directory"
        )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(sources[name])


def _difference(sources: dict[str, Tensor], targets: dict[str, Tensor]) -> str:
    lines = [f"{name} only in the checkpoint" for name in sources.keys() - targets.keys()]
    lines += [f"{name} only in the model" for name in targets.keys() - sources.keys()]
    both = sources.keys() & targets.keys()
    lines += [
        f"{n} is {list(sources[n].shape)} there, {list(targets[n].shape)} here"
        for n in both
        if sources[n].shape != targets[n].shape
    ]
    return "; ".join(sorted(lines)[:5])


def _mean_parameters(checkpoint: Checkpoint) -> dict[str, Tensor]:
    first = checkpoint.tensors(0)
    parts = [checkpoint.tensors(r) for r in range(1, checkpoint.ranks)]
    for name, tensor in _take(first, "parameters").items():
        others = [part[f"parameters/{name}"] for part in parts]
        if not all(torch.equal(tensor, other) for other in others):
            first[f"parameters/{name}"] = torch.stack([tensor, *others]).mean(0)
    return first


def _optimizer_state(replica: Replica, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors of the optimizer's state into `tensors`; the rest and the groups' hyperparameters as JSON values."""
    values: dict[str, dict[str, Any]] = {}
    for name, p in _optimized(replica):
        for key, value in replica.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in replica.optimizer.param_groups
    ]
    return {"values": values, "groups": groups}


def _wind(replica: Replica, steps: int) -> None:
    """Step a fresh schedule as often as the saved one was."""
    assert replica.schedule is not None
    replica.optimizer._opt_called = True  # type: ignore[attr-defined]  # else it warns of a wrong order
    for _ in range(steps):
        replica.schedule.step()


def _restore_optimizer(
    replica: Replica, tensors: dict[str, Tensor], saved: dict[str, Any], hyperparameters: bool
) -> None:
    if len(saved["groups"]) != len(replica.optimizer.param_groups):
        raise BadInput(
            f"the checkpoint's optimizer has {len(saved['groups'])} parameter groups, this one {len(replica.optimizer.param_groups)}"
        )
    replica.optimizer_state.reset()
    for name, p in _optimized(replica):
        state = dict(saved["values"].get(name, {}))
        for key, tensor in _take(tensors, "optimizer").items():
            kind, _, owner = key.partition("/")
            if owner == name:
                state[kind] = tensor.clone() if kind == "step" else tensor.to(p.device)
        if state:
            replica.optimizer.state[p] = state
    if hyperparameters:
        for group, values in zip(replica.optimizer.param_groups, saved["groups"], strict=True):
            group.update({key: _like(value, group.get(key)) for key, value in values.items()})


def _optimized(replica: Replica) -> Iterable[tuple[str, Tensor]]:
    return zip(replica.layout.names, replica.layout.parameters, strict=True)


def _restore_state(replica: Replica, state: State, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> State:
    """A copy of `state` with the saved numbers and tensors."""
    restored = type(state)(**{**vars(state), **numbers})
    for field, tensor in state.tensors().items():
        saved = _take(tensors, f"strategy/{field}")
        for name, target in _by_name(replica, tensor).items():
            target.copy_(saved[name])
    return restored


def _plain(value: Any) -> Any:
    """JSON for hyperparameters and scheduler states; what JSON cannot hold (functions) is left to be rebuilt by the task."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        kept = {key: plain for key, item in value.items() if (plain := _plain(item)) is not _UNSAVED}
        return (
            kept if all(isinstance(key, str) for key in kept) else {_PAIRS: [[key, item] for key, item in kept.items()]}
        )
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _UNSAVED if any(item is _UNSAVED for item in items) else items
    return value if value is None or isinstance(value, int | float | str | bool) else _UNSAVED


_UNSAVED = object()
_PAIRS = (
    "pairs of a dict whose keys are no strings"  # JSON has string keys only: MultiStepLR counts milestones by number
)


def _scheduler_state(values: dict[str, Any]) -> dict[str, Any]:
    return {key: Counter(dict(v[_PAIRS])) if isinstance(v, dict) and _PAIRS in v else v for key, v in values.items()}


def _like(value: Any, model: Any) -> Any:
    """`value` from JSON in the type that the optimizer had there: betas are a tuple, a capturable rate is a tensor."""
    if isinstance(model, tuple):
        return tuple(value)
    return torch.tensor(value, dtype=model.dtype, device=model.device) if isinstance(model, Tensor) else value
