"""The content of a checkpoint: a replica, its strategy's state, random state and position, by name and unpadded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from manyhands import rng
from manyhands.errors import BadInput, Unsupported
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.optimizer_state import COUNTS, counts_on_device
from manyhands.replica.replica import Replica
from manyhands.replica.sharded_update import in_memory, whole_states
from manyhands.server.base import Server, ServerState
from manyhands.strategies.base import State

Tensors = dict[str, Tensor]
Parts = tuple[Tensors, dict[str, Any]]  # tensors by name, JSON values


class Snapshot(Protocol):
    """What `restore` reads: a checkpoint on disk, or a worker's state as another takes it over."""

    @property
    def ranks(self) -> int:
        """Whose states it holds."""

    def reader(self, rank: int) -> Mapping[str, Tensor]:
        """A rank's tensors by name, each read when it is asked for."""

    def values(self, rank: int) -> dict[str, Any]:
        """A rank's JSON values."""


def declared(replica: Replica) -> dict[str, Any]:
    """What the task says of optimizer and schedule, as JSON; of a replica that has not stepped yet."""
    schedule = replica.schedule
    return {
        "optimizer": type(replica.optimizer).__name__,
        "groups": _groups(replica),
        "schedule": None if schedule is None else _plain({"type": type(schedule).__name__} | schedule.state_dict()),
    }


def capture(
    replica: Replica,
    state: State,
    position: dict[str, Any],
    declaration: dict[str, Any] | None = None,
    counted: bool = True,
) -> Parts:
    """This rank's part; `position` is where the loop stands, `declaration` what `declared` returned when it began.

    counted: False where another rank's equal copy of the parameters is the one that counts.
    Raises Unsupported, by name, for an optimizer that remembers of a parameter what is neither a tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    _put(tensors, "parameters", replica.named(replica.parameters))
    _put(tensors, "buffers", dict(replica.model.named_buffers()))
    for field, tensor in state.tensors().items():
        _put(tensors, f"strategy/{field}", _by_name(replica, tensor))
    optimizer = _optimizer_state(replica, tensors)
    random_tensors, random_values = rng.capture()
    _put(tensors, "random", random_tensors)
    values = {
        "slices": {
            name: asdict(part) | {"counted": counted and part.counted}
            for shard in replica.shards
            for name, part in shard.slices.items()
        },
        "members": replica.executor.members.size,
        "buffers": [name for name, _ in replica.model.named_buffers() if replica.executor.counts(name)],
        "position": position,
        "step": replica.step,
        "strategy": state.numbers(),
        "optimizer": optimizer,
        "declared": declaration,
        "schedule": _plain(replica.schedule.state_dict()) if replica.schedule is not None else None,
        "random": random_values,
    }
    return tensors, values


def restore(
    checkpoint: Snapshot,
    replica: Replica,
    state: State,
    rank: int,
    size: int,
    total: int | None,
    warn: Callable[[str], None] = lambda message: None,
) -> tuple[State, dict[str, Any]]:
    """Put this rank back where the checkpoint stood; returns its strategy state and `position`.

    Raises BadInput, and has changed nothing, where the strategy's state is of other fields or shapes, as other options
    make them.

    With as many ranks as it was written by, bit for bit. With another number: the strategy's own `merge`, which may
    refuse (nothing has changed then); the mean of the written replicas, weighted by what each counted in its open
    window (of equal ones, as synchronous strategies have, one alone is read, and is kept as it is); rank 0's
    optimizer and schedule; each rank's random state as it is now. Where `total`, the number of steps planned, is
    another than it was, the schedule is the new one's, wound on to the same step. So it is where the task says other
    hyperparameters than it did when the checkpoint's run began: the task's are used, and `warn` gets their names.
    What the task sets as before stays as the checkpoint has it, moved by the schedule or by whatever else. Another
    class of optimizer is a BadInput.
    """
    same = checkpoint.ranks == size
    parts = [checkpoint.reader(r) for r in ([rank] if same else range(checkpoint.ranks))]
    numbers = [checkpoint.values(r) for r in ([rank] if same else range(checkpoint.ranks))]
    written = zip(parts, numbers, strict=True)
    states = [_restore_state(replica, state, part, number["strategy"], own=not same) for part, number in written]
    merged = states[0] if same else state.merge(states, rank, size)
    tensors, values = parts[0], numbers[0]
    now = declared(replica)
    declaration = values["declared"] or now
    if declaration["optimizer"] != now["optimizer"] or len(declaration["groups"]) != len(now["groups"]):
        raise BadInput(
            f"the task's optimizer does not fit the checkpoint: {now['optimizer']} (parameter groups: "
            f"{len(now['groups'])}), and the checkpoint has {declaration['optimizer']} ({len(declaration['groups'])}). "
            "Resume with the checkpoint's optimizer, or start in another run directory"
        )
    parameters: Mapping[str, Tensor] = tensors
    if not same:
        windows, slices = [own.weight_of_window() for own in states], [one["slices"] for one in numbers]
        parameters = _mean_parameters(parts, windows, slices)
    _fill(replica.named(replica.parameters), "parameters", parameters)
    _fill(dict(replica.model.named_buffers()), "buffers", tensors)
    longer = values["position"]["total"] != total
    changed = now["schedule"] != declaration["schedule"]
    rescheduled = replica.watched is None and ((longer and replica.schedule is not None) or changed)
    if replica.watched is not None:
        _restore_plateau(replica.schedule, values["schedule"])
    elif rescheduled:
        replica.wind_schedule(_steps_of(values["schedule"], values["position"].get("tick", values["step"])))
    elif replica.schedule is not None:
        replica.schedule.load_state_dict(_unpacked(values["schedule"]))
    state_tensors, saved = _optimizer_tensors(checkpoint, replica, tensors, values["optimizer"])
    _restore_optimizer(replica, state_tensors, saved, declaration["groups"], now["groups"], rescheduled)
    if changes := _changes(declaration, now, schedules=not longer):
        warn(
            f"hyperparameters differ from the checkpoint's: {'; '.join(changes[:8])}. From step "
            f"{values['position'].get('tick', values['step'])} on, the task's values are used (a schedule as if from "
            "the start). To keep the old values, give them to the task"
        )
    replica.step = values["step"]
    if same and values["random"] is not None:
        rng.restore(_take(tensors, "random"), values["random"])
    return merged, values["position"]


def capture_server(server: Server, replica: Replica) -> Parts:
    """What the server must remember, by parameter name."""
    held = server.capture()
    tensors: Tensors = {}
    for vector, values in held.vectors.items():
        _put(tensors, f"server/{vector}", replica.named(values))
    return tensors, {"vectors": sorted(held.vectors), "numbers": held.numbers}


def restore_server(checkpoint: Snapshot, rank: int, server: Server, replica: Replica) -> None:
    """Have the server go on from what this rank's part of a checkpoint holds."""
    saved, values = checkpoint.reader(rank), checkpoint.values(rank)["server"]
    vectors = {}
    for vector in values["vectors"]:
        vectors[vector] = torch.zeros(replica.layout.padded, dtype=replica.layout.dtype)
        _fill(replica.named(vectors[vector]), f"server/{vector}", saved)
    server.restore(ServerState(vectors, values["numbers"]))


def _put(tensors: dict[str, Tensor], prefix: str, named: dict[str, Tensor]) -> None:
    tensors.update({f"{prefix}/{name}": tensor for name, tensor in named.items()})


def _take(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: tensors[name] for name in tensors if name.startswith(prefix + "/")}


def _by_name(replica: Replica, value: FlatVector | Tensor) -> dict[str, Tensor]:
    """By parameter, where the value has a number for each of theirs."""
    if isinstance(value, FlatVector):
        same = value.numel == replica.parameters.numel
        return replica.named(value) if same else {str(i or ""): part for i, part in enumerate(value.parts)}
    return replica.named(value) if value.shape == (replica.layout.padded,) else {"": value}


def _fill(targets: dict[str, Tensor], prefix: str, tensors: Mapping[str, Tensor]) -> None:
    sources = _take(tensors, prefix)
    if differences := _differences(_shapes(sources), _shapes(targets)):
        raise BadInput(
            f"the checkpoint's {prefix} are not this model's: {'; '.join(differences[:5])}. Resume with the model it was written by, "
            "or start in another run directory"
        )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(sources[name])


def _shapes(named: Tensors, what: str = "") -> dict[str, list[int]]:
    """The shapes by name; `what`: whose names they are, in errors."""
    return {" of ".join(filter(None, (what, name))): list(tensor.shape) for name, tensor in named.items()}


def _differences(then: dict[str, list[int]], now: dict[str, list[int]]) -> list[str]:
    other = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    return [f"{name} was {then.get(name, 'missing')} and is now {now.get(name, 'missing')}" for name in other]


def _mean_parameters(
    parts: Sequence[Mapping[str, Tensor]], weights: list[float], slices: list[dict[str, Any]]
) -> dict[str, Tensor]:
    """The ranks' parameters by name: the weighted mean of those that count, or the parameters themselves where they are
    equal. One parameter after the other is read."""
    means = {}
    for name in (name for name in parts[0] if name.startswith("parameters/")):
        counting = [r for r, own in enumerate(slices) if own[name.removeprefix("parameters/")]["counted"]]
        total = sum(weights[r] for r in counting)
        shares = [weights[r] / total if total else 1 / len(counting) for r in counting]
        tensors = [parts[r][name] for r in counting]
        if all(torch.equal(tensors[0], other) for other in tensors[1:]):
            means[name] = tensors[0]
        else:
            shared = zip(tensors, shares, strict=True)
            means[name] = torch.stack([tensor * share for tensor, share in shared if share]).sum(0)
    return means


def _optimizer_state(replica: Replica, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors of the optimizer's state into `tensors`; the rest and the groups' hyperparameters as JSON values."""
    values: dict[str, dict[str, Any]] = {}
    sharded = replica.executor.sharded
    for name, p in _optimized(replica):
        for key, value in replica.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{key}/{name}"] = value
            else:
                values.setdefault(name, {})[key] = _json_value(replica, key, name, value)
    found = {"values": values, "groups": _groups(replica)}
    if sharded is not None:
        found["pieces"] = {name: [piece.start, piece.stop] for name, piece in sharded.pieces.items()}
    return found


def _groups(replica: Replica) -> list[dict[str, Any]]:
    """The hyperparameters of each parameter group, as JSON."""
    return [_plain({k: v for k, v in group.items() if k != "params"}) for group in replica.optimizer.param_groups]


def _json_value(replica: Replica, key: str, name: str, value: Any) -> Any:
    plain = value.item() if isinstance(value, np.generic) else value
    try:
        json.dumps(plain)
    except TypeError:
        raise Unsupported(
            f"cannot write a checkpoint: {type(replica.optimizer).__name__} keeps {key!r} of {name} as a "
            f"{type(value).__name__}, and only tensors and JSON values can be saved. Use another optimizer, or train "
            "without a run directory"
        ) from None
    return plain


_SCHEDULED = ("lr", "momentum", "betas")  # what torch's schedules move
_DERIVED = ("initial_lr", "base_lrs", "last_epoch")  # from the rate, and from how far the schedule is


def _changes(declaration: dict[str, Any], now: dict[str, Any], schedules: bool) -> list[str]:
    """`lr was 0.1 and is 0.05`: each hyperparameter that the task changed, once. schedules: include the schedule's."""
    given = [
        [group | {"lr": group.get("initial_lr", group.get("lr"))} for group in one["groups"]]
        for one in (declaration, now)
    ]
    pairs = list(_pairs(*given))
    if schedules:
        both = [{"the schedule": None} if one is None else one for one in (declaration["schedule"], now["schedule"])]
        pairs += [("the schedule's " + name, then, today) for name, then, today in _pairs(both[:1], both[1:])]
    lines = [f"{name} was {_short(then)} and is {_short(today)}" for name, then, today in pairs]
    if schedules and not lines and declaration["schedule"] != now["schedule"]:
        lines = ["the schedule is built differently"]
    return list(dict.fromkeys(lines))


def _pairs(declaration: list[dict[str, Any]], now: list[dict[str, Any]]) -> Iterable[tuple[str, Any, Any]]:
    """(name, what it was, what it is) of what differs, but for what follows from something else."""
    for then, today in zip(declaration, now, strict=True):
        for name in sorted(name for name in then.keys() | today.keys() if name not in _DERIVED and name[0] != "_"):
            if then.get(name) != today.get(name):
                yield name, then.get(name), today.get(name)


def _short(value: Any) -> str:
    return "none" if value is None else f"{value!s:.40}"


_OF_PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # what a ReduceLROnPlateau has seen


def _restore_plateau(schedule: Any, saved: dict[str, Any] | None) -> None:
    """What it has seen of validations, if it was on validations then too; its hyperparameters are the task's."""
    if saved is not None and set(_OF_PLATEAU) <= saved.keys():
        schedule.load_state_dict({name: _unpacked(saved[name]) for name in _OF_PLATEAU})


def _steps_of(schedule: dict[str, Any] | None, tick: int) -> int:
    """How often a saved schedule was stepped; of a ChainedScheduler its members count. One that was not there, or was
    on validations: as often as there were steps."""
    if schedule is None or set(_OF_PLATEAU) <= schedule.keys():
        return tick
    while "last_epoch" not in schedule:
        schedule = schedule["_schedulers"][0]
    return int(schedule["last_epoch"])


def _restore_optimizer(
    replica: Replica,
    tensors: Mapping[str, Tensor],
    saved: dict[str, Any],
    declaration: list[dict[str, Any]],
    now: list[dict[str, Any]],
    rescheduled: bool,
) -> None:
    """Per-parameter state, and the hyperparameters that the task did not change and no new schedule moves."""
    groups = replica.optimizer.param_groups
    for group, values, then, today in zip(groups, saved["groups"], declaration, now, strict=True):
        plain = _plain({key: group.get(key) for key in values})
        for key, value in values.items():
            moved = rescheduled and (key in _SCHEDULED or plain.get(key) != today.get(key))
            if then.get(key) == today.get(key) and not moved:
                group[key] = _like(value, group.get(key))
    replica.optimizer_state.reset()
    states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in saved["values"].items()}
    for key, tensor in _take(tensors, "optimizer").items():
        kind, _, owner = key.partition("/")
        states.setdefault(owner, {})[kind] = tensor
    on_device = counts_on_device(replica.optimizer)
    for name, p in _optimized(replica):
        if name in states:
            replica.optimizer.state[p] = {k: _placed(k, v, p, p in on_device) for k, v in states[name].items()}


def _optimizer_tensors(
    checkpoint: Snapshot, replica: Replica, tensors: Mapping[str, Tensor], saved: dict[str, Any]
) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """A rank's optimizer state, and what goes with it. Where updates are sharded, or were: cut from all ranks' pieces."""
    sharded = replica.executor.sharded
    now = None if sharded is None else {name: [piece.start, piece.stop] for name, piece in sharded.pieces.items()}
    if saved.get("pieces") == now:
        return tensors, saved
    if "pieces" in saved:
        ranks = range(checkpoint.ranks)
        all_saved = [checkpoint.values(rank)["optimizer"] for rank in ranks]
        spans = [one["pieces"] for one in all_saved]
        tensors = whole_states([checkpoint.reader(rank) for rank in ranks], spans, replica.layout)
        saved = saved | {"values": {name: held for one in all_saved for name, held in one["values"].items()}}
    if sharded is None:
        return tensors, saved
    cut: Tensors = {}
    layout = replica.layout
    places = dict(zip(layout.names, zip(layout.shapes, layout.strides, strict=True), strict=True))
    for key in (key for key in tensors if key.startswith("optimizer/")):
        _, kind, name = key.split("/", 2)
        if (piece := sharded.pieces.get(name)) is None:
            continue
        tensor, (shape, stride) = tensors[key], places[name]
        if tensor.shape == shape and kind not in COUNTS:
            placed = tensor.new_empty(tensor.numel()).as_strided(shape, stride).copy_(tensor)
            tensor = in_memory(placed)[piece.start : piece.stop].clone()
        cut[key] = tensor
    return cut, saved


def _placed(kind: str, value: Any, p: Tensor, counts_on_device: bool) -> Any:
    """State in its own aligned memory on its parameter's device; `step` is on the CPU unless the device counts it."""
    if not isinstance(value, Tensor):
        return value
    if kind == "step":
        return value.to(p.device if counts_on_device else "cpu", copy=True)
    if value.shape == p.shape:
        return torch.empty_like(p, dtype=value.dtype).copy_(value)  # in the parameter's memory format
    return value.to(p.device, copy=True)


def _optimized(replica: Replica) -> Iterable[tuple[str, Tensor]]:
    """What the optimizer holds, by parameter: where the update is sharded, this worker's pieces."""
    if replica.executor.sharded is not None:
        return ((name, piece.parameter) for name, piece in replica.executor.sharded.pieces.items())
    return zip(replica.layout.names, replica.trainable, strict=True)


def _restore_state(
    replica: Replica, state: State, tensors: Mapping[str, Tensor], numbers: dict[str, Any], own: bool
) -> State:
    """A copy of `state` with the saved numbers and tensors, in its memory or in memory of its `own`."""
    saved: dict[str, Tensors] = {}  # by field, with which the names begin
    for key, tensor in _take(tensors, "strategy").items():
        field, _, name = key.partition("/")
        saved.setdefault(field, {})[name] = tensor
    _check_state(replica, state, saved, numbers, same=not own)
    memory = {name: held.clone() for name, held in state.tensors().items()} if own else {}
    restored = type(state)(**{**vars(state), **numbers, **memory})
    for field, held in restored.tensors().items():
        targets = _by_name(replica, held)
        for name, value in saved.get(field, {}).items():
            targets[name].copy_(value)
    return restored


def _check_state(
    replica: Replica, state: State, saved: dict[str, Tensors], numbers: dict[str, Any], same: bool
) -> None:
    """BadInput, by field, where the state that was saved is another than the strategy has now.

    What may be None (a residual, which one worker alone does not have) may be missing when the number of ranks is not
    the `same`.
    """
    known = {field.name for field in fields(state)}
    optional = set() if same else {field.name for field in fields(state) if field.default is None}
    wrong = [f"{name} was {value} and does not exist now" for name, value in numbers.items() if name not in known]
    own = state.tensors()
    for name in sorted(saved.keys() | own.keys()):
        then = _shapes(saved.get(name, {}), name)
        now = _shapes(_by_name(replica, own[name]) if name in own else {}, name)
        if not (name in optional and not (then and now)):
            wrong += _differences(then, now)[:1]
    if wrong:
        raise BadInput(
            f"the strategy does not fit the checkpoint: {'; '.join(wrong[:5])}. Resume with the checkpoint's strategy "
            "options, or start in another run directory"
        )


def _plain(value: Any) -> Any:
    """JSON for hyperparameters and scheduler states. Functions, which JSON cannot hold, are rebuilt by the task."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, dict):
        pairs = [[_plain(key), _plain(item)] for key, item in value.items()]
        kept = [pair for pair in pairs if not any(part is _UNSAVED for part in pair)]
        if isinstance(value, Counter):
            return {_COUNTS: kept}
        return dict(kept) if all(isinstance(key, str) for key, _ in kept) else {_PAIRS: kept}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _UNSAVED if any(item is _UNSAVED for item in items) else items
    return value if value is None or isinstance(value, int | float | str | bool) else _UNSAVED


_UNSAVED = object()
_PAIRS = "pairs of a dict whose keys are no strings"  # JSON has string keys only
_COUNTS = "pairs of a Counter"  # MultiStepLR counts its milestones by number


def _unpacked(value: Any) -> Any:
    """The inverse of `_plain`, at any depth (SequentialLR nests schedulers); tuples stay lists, except as keys."""
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    for mark, kind in ((_PAIRS, dict), (_COUNTS, Counter)):
        if mark in value:
            return kind({_key(key): _unpacked(item) for key, item in value[mark]})
    return {key: _unpacked(item) for key, item in value.items()}


def _key(value: Any) -> Any:
    return tuple(_key(item) for item in value) if isinstance(value, list) else value


def _like(value: Any, model: Any) -> Any:
    """`value` from JSON in the type that the optimizer had there: betas are a tuple, a capturable rate is a tensor."""
    value = _unpacked(value)
    if isinstance(model, tuple):
        return tuple(value)
    if isinstance(model, np.ndarray | np.generic):
        return np.asarray(value, model.dtype)[()]
    return torch.tensor(value, dtype=model.dtype, device=model.device) if isinstance(model, Tensor) else value
