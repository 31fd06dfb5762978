"""`prepare(model, optimizer, loader)`: the user's own training loop on any number of workers, by one changed line."""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from manyhands.comm.group import Group
from manyhands.data.batch import columns, map_columns, rows_of
from manyhands.engines import under_torchrun
from manyhands.engines.base import LaunchSpec
from manyhands.engines.own_rules import list_rule
from manyhands.engines.single_process import pick_device
from manyhands.errors import BadInput, Unsupported, is_number
from manyhands.own_loop import prepared_loader
from manyhands.own_loop.argument_checks import check_arguments, check_equal, facts_of, root_of
from manyhands.own_loop.batches import WHOLE, batches_of, has_own_exchange
from manyhands.own_loop.launch import launched_batches, launched_strategy
from manyhands.own_loop.own_pace_schedule import OwnPaceSchedule, check_scheduler
from manyhands.own_loop.prepared_loader import check_loader, cut_rows, warn_of_whole_items
from manyhands.own_loop.rank_zero import RankZeroLines, mute_nonzero_ranks
from manyhands.own_loop.session import Pair, Session
from manyhands.replica import fingerprint
from manyhands.replica.sync_batch_norm import Rows, synchronize, unsynchronized
from manyhands.server.in_process import InProcessServers
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Strategy
from manyhands.task import named
from manyhands.units import count
from manyhands.worker import Worker, current

DEFAULT = "allreduce"
TIMEOUT_S = 300.0

V = TypeVar("V", float, Tensor)
B = TypeVar("B")
M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
Prepared = tuple[M, O, *tuple[Any, ...]]  # DataLoaders and schedulers as they were given, PreparedLoaders of others
Given = Iterable[Any] | LRScheduler


def prepare(
    model: M,
    optimizer: O,
    *others: Given,
    strategy: Strategy | str | None = None,
    batches: str | None = None,
    sync_batch_norm: bool = False,
    model_parallel: str | None = None,
) -> Prepared[M, O]:
    """Make a plain training script one of any number of workers; alone, it stays bit for bit what it was.

        model, optimizer, loader = mh.prepare(model, optimizer, loader)

    Call it on all workers alike, after the model is on its device and before training. It gives back the same model,
    whose parameters and buffers are rank 0's; the same optimizer; and the loaders and schedulers. What loops see of a
    batch is `batches`:

    "whole", the default where workers have one model (allreduce and its options): every worker runs the loop on whole
    batches, and calls of modules are cut by rows, so that any loss, metric, branch, batch norm and evaluation are one
    process's (see docs/zero.md). Loaders come back as they are, `mh.share` gives all rows, `mh.weight` changes nothing.

    "slices", the only way of strategies whose workers' models differ: each loop sees its rows, the user's batch size is
    the global one, and `step()` is the strategy's exchange. A DataLoader is shared in place, but where workers share a
    process: it comes back itself, and its `plain` still gives all rows (see `PreparedLoader`). Prepare only loaders of
    training data: one that is not prepared gives every worker everything, which is right for validation. Take slices
    under allreduce too where the script looks at large outputs, where reading a whole batch on each worker is dear, and
    over several hosts. docs/own-loop.md says what a loop must keep to.

    others: loaders of training data, and the optimizer's schedulers, in any order.
    Several pairs of model and optimizer (a GAN's) are prepared one by one; one optimizer over several modules as
    `mh.prepare([encoder, decoder], optimizer)`, which gives back the list.

    batches: None: that of `manyhands run` or `launch`, else the variable MANYHANDS_BATCHES, else the default above; on
    engine sim, whose workers share a process, slices.
    sync_batch_norm: with slices, batch normalization takes the statistics of all workers' rows, under strategies that apply
    the workers' mean gradient; with whole batches it does so anyway.
    model_parallel: refused. A stage's backward waits for that of the next one, which cannot run between a loop's own
    lines: `mh.train(task, model_parallel="stages=2")`.
    strategy: how the workers agree. None: the one of `manyhands run` or `launch`, else the variable MANYHANDS_STRATEGY,
    else allreduce. Under allreduce `.grad` holds the workers' mean as soon as `backward()` returns, so that clipping
    and accumulation are exact; under strategies that exchange parameters it is the worker's own. `local-sgd:period=end`
    averages at the end of each pass over a prepared loader. A strategy with a parameter server is given to `manyhands
    run` or `launch`, which start it. Where its workers go at their own pace (downpour, easgd, …), each gets as many
    slices of batches as it has time for, all meet at the end of each pass, where the model holds the center, and
    schedulers that were prepared are stepped by the rows that all have had.

    All workers must call `backward()`, `step()` and the loader equally often. With slices a loss counts what its graph
    shows: as a mean the batch's rows, or what `cross_entropy` and `nll_loss` divide by; a sum over rows is added up over
    the workers; `mh.weight(w)` or `mh.weight("sum")` before `backward()` says it where the graph does not. With several
    workers a gradient that is not finite raises ManyhandsError in `step()`; with whole batches, and alone, nobody looks.

    Raises BadInput for what is no model, optimizer or loader, a wrapped model (DistributedDataParallel), a
    DistributedSampler, an optimizer over parameters of another module, workers that do not prepare the same or compute
    with other values, and with slices a batch_size of less than one row a worker; Unsupported for a strategy that needs
    more than a group, and with slices, later, for `step(closure)`, for a GradScaler where workers do not average
    gradients in each step, and for a backward of which nobody knows what it counts.
    """
    if model_parallel is not None:
        raise Unsupported(
            f"prepare takes no model_parallel ({model_parallel}): stages are spans of a declared task's loss, and another stage's backward cannot run between the "
            f'lines of a loop. Declare a task, and train it with mh.train(task, model_parallel="{model_parallel}")'
        )
    if session().unchanged:
        raise BadInput(
            "this script calls mh.prepare, and --auto prepares scripts that do not: leave --auto out, or the call"
        )
    here, chosen = session(), strategy_of(strategy or launched_strategy() or DEFAULT)
    wanted = batches_of(batches or launched_batches(), chosen, one_process=here.worker.shares_process)
    replicated = wanted == WHOLE and (here.worker.size > 1 or not has_own_exchange(chosen))
    if replicated:
        return prepare_whole(here, model, optimizer, *others, strategy=chosen)
    return prepare_slices(here, model, optimizer, *others, strategy=chosen, sync_batch_norm=sync_batch_norm)


def prepare_slices(
    session: Session,
    model: M,
    optimizer: O,
    *others: Given,
    strategy: Strategy | str = DEFAULT,
    sync_batch_norm: bool = False,
) -> Prepared[M, O]:
    """`prepare` for the Worker of a session, whose loop sees its rows of each batch."""
    strategy, worker = strategy_of(strategy), session.worker
    if sync_batch_norm and not (strategy.needs.mean_gradient and strategy.leasing() is None):
        raise Unsupported(
            f"sync_batch_norm=True: with strategy {strategy.name} workers do not make each step together: use allreduce, or leave it out"
        )
    if sync_batch_norm and worker.shares_process and worker.size > 1:
        raise Unsupported(
            "sync_batch_norm=True: on engine sim no worker can wait for others within a backward: use engine local, or leave it out"
        )
    if session.whole is not None:
        raise Unsupported(
            f"this script computes with whole batches since an earlier mh.prepare, and strategy {strategy.name} is for slices of them: give batches=slices to each"
        )
    for given in others:
        if isinstance(given, LRScheduler):
            check_scheduler(given, optimizer)
            continue
        check_loader(given, worker.size)
        warn_of_whole_items(given, worker)
    spec = strategy.server()
    if spec is not None and worker.size == 1 and (worker.server is None or session.prepared):
        list_rule(spec)  # a server holds one model; alone each has one of its own, in this process
        (worker.server,) = InProcessServers(spec, workers=1).clients
    elif spec is not None and worker.server is None and worker.start_server is not None:
        list_rule(spec)
        worker.server = worker.start_server(spec)
    pair = Pair(session, model, optimizer, strategy)
    if sync_batch_norm and worker.size > 1:
        synchronize(root_of(model), Rows(worker.group, lambda: session.next_backward().weight))
    elif pair.averages:
        RankZeroLines(worker.rank)(unsynchronized(root_of(model)))
    for given in others:
        if isinstance(given, LRScheduler) and pair.leasing is not None:
            session.schedules.append(OwnPaceSchedule(lambda: session.pass_under_way))
            session.schedules[-1].bind(given)
    return (
        model,
        optimizer,
        *(given if isinstance(given, LRScheduler) else prepared_loader.share(given, session, pair) for given in others),
    )


def prepare_whole(session: Session, model: M, optimizer: O, *others: Given, strategy: Strategy) -> Prepared[M, O]:
    """`prepare` for the Worker of a session, whose loop sees whole batches; schedulers and loaders stay what they are."""
    if session.worker.shares_process:
        raise Unsupported(
            "batches=whole replaces torch's functions in each worker's process, and on engine sim all workers are in one: use engine local, or batches=slices"
        )
    root = root_of(model)
    check_arguments(root, optimizer, strategy, session.worker)
    for given in others:
        if isinstance(given, LRScheduler):
            check_scheduler(given, optimizer)
        else:
            check_loader(given, 1)
    if session.worker.size == 1:
        session.prepared += 1
        return (model, optimizer, *others)
    if session.whole is None and session.pairs:
        raise Unsupported(
            "this script computes with slices of batches since an earlier mh.prepare: give batches=slices to each, or batches=whole"
        )
    script = session.run_whole()
    script.prepare(root, optimizer)
    if has_own_exchange(strategy):
        pair = Pair(session, model, optimizer, strategy)
        script.average_elsewhere(pair.replica.trainable)
    else:
        fingerprint.compare(session.worker, partial(facts_of, root, optimizer, strategy))
        session.prepared += 1
    optimizer.manyhands_trains = True  # type: ignore[attr-defined]
    return (model, optimizer, *others)


def worker() -> Worker:
    """The Worker that this process is: rank, size, device, group and so on. Outside a run it is a run of one."""
    return session().worker


def is_first() -> bool:
    """Whether this is rank 0, the one that prints, logs and saves."""
    return _worker_here().rank == 0


def weight(w: float | Literal["sum"]) -> None:
    """State what the loss of this step is a mean over, where that is not the batch's rows: tokens, class weights.

    Call it before `backward()`; it holds until the next `step()` or batch, whichever comes first. 0: this worker's
    gradient does not count. "sum", on all workers: the loss is a sum over rows; its gradients are then multiplied by
    the workers' number, also where `torch.autograd.grad` asks for those of parameters, so that their mean over the
    workers is one process's sum. Raises BadInput for a negative or infinite number and for another word; `step()` does
    if it came after `backward()`.
    """
    session().state_weight(w if isinstance(w, str) else float(w))


def share(rows: B) -> B:
    """This worker's rows of a batch that a script makes without a DataLoader; they are the weight of the next backward.

        ix = mh.share(torch.randint(len(data), (batch_size,)))

    rows: a tensor, or tensors in tuples, lists or dicts, whose first dimension counts the batch's rows; those of rank 0
    are everybody's. Rank r of N gets rows [r·b//N, (r+1)·b//N). Call it on all workers alike; alone, `rows` comes back.
    Where a script runs with `manyhands run --auto`, and autograd is off, all of them come back, as for evaluation.

    Raises BadInput for fewer rows than workers, and for tensors of unequal length.
    """
    here = session()
    if here.worker.size == 1 or here.whole is not None:
        return rows
    if here.sliced is not None:
        here.sliced.prepare()
        if not torch.is_grad_enabled():
            return rows
    if here.own_pace is not None:
        raise Unsupported(
            "mh.share waits for all workers, and with this strategy they go at their own pace: use one whose workers are in step (allreduce, local-sgd), "
            "or give the rows by a DataLoader"
        )
    if rows_of(rows) < here.worker.size:
        raise BadInput(
            f"mh.share was given {count(rows_of(rows), 'row')} for {here.worker.size} workers, and each needs one at least: make the batch larger, or "
            "use fewer workers"
        )
    whole = everybodys(rows, here.worker.group)
    own = cut_rows(whole, here.worker.rank, here.worker.size)
    here.state_weight(float(own.rows or 0))
    return cast(B, own.batch)


def everybodys(rows: B, group: Group) -> B:
    """Rank 0's rows on all ranks; columns that are no tensors are as they are. A collective."""
    shapes = [f"{list(one.shape)} {one.dtype}" for _, one in columns(rows) if isinstance(one, Tensor)]
    check_equal(group, shapes, "give mh.share a batch of the same shapes")

    def first(column: Any) -> Any:
        if not isinstance(column, Tensor):
            return column
        whole = column.detach().to("cpu", copy=True).contiguous()
        group.broadcast_(whole.view(-1).view(torch.uint8), 0)
        return whole.to(column.device)

    return cast(B, map_columns(rows, first))


def mean(value: V, weight: float = 1.0) -> V:
    """The mean of a number or a tensor over all workers, weighted by what it counts on each: a loss over rows, say.

        loss = mh.mean(loss.item(), weight=len(inputs))  # the same on all workers
        scheduler.step(loss)

    A collective: call it on all workers alike. A tensor gives a new one of its shape, dtype and device. Alone, and
    where no worker has any weight, `value` comes back. Raises BadInput for anything but numbers and tensors of numbers.
    """
    group = _worker_here().group
    if session().pass_under_way is not None:
        raise Unsupported(
            "mh.mean waits for all workers, and in a pass over a prepared loader they go at their own pace, each over its own number of batches: "
            "call it between two passes, of sums that you keep meanwhile"
        )
    if not isinstance(value, Tensor) and not is_number(value):
        raise BadInput(f"mh.mean takes a number or a tensor, not {named(value)}")
    if group.size == 1:
        return value
    whole = torch.as_tensor(value).detach()
    total = whole.to("cpu", torch.float64).reshape(-1).clone()
    counted = group.mean_(total, weight, 0).weight
    if not counted:
        return value
    return total.reshape(whole.shape).to(whole) if isinstance(value, Tensor) else float(total)


# -- which worker this is --------------------------------------------------------------------------------------------

_outside: Worker | None = None  # the worker of a process that no engine of ours started


def session() -> Session:
    """What this process has prepared, as the worker that it is now."""
    now = _worker_here()
    if now.prepared is None:
        now.prepared = Session(now)
    found: Session = now.prepared
    return found


def _worker_here() -> Worker:
    global _outside
    if (inside := current()) is not None:
        return inside
    if _outside is not None:
        return _outside
    if not under_torchrun():
        _outside = Worker(device=pick_device("auto", 0))
        return _outside
    from manyhands.engines.torchrun.engine import LauncherRank, joined

    stack = ExitStack()  # until the process ends, it has the place that torchrun gave it
    worker = stack.enter_context(joined(LaunchSpec(workers=LauncherRank.from_environment().size, timeout_s=TIMEOUT_S)))
    atexit.register(stack.close)
    mute_nonzero_ranks(worker, TIMEOUT_S)
    _outside = worker
    return worker
