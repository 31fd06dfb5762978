"""Update sharing: each worker applies its own and its peers' quantised updates as they come, without a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm import signs
from manyhands.comm.mailbox import Mailbox
from manyhands.errors import BadInput, ManyhandsError
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies import server_strategy
from manyhands.strategies.base import Change, Leasing, Needs, State, StepResult, Strategy
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica

_FOLLOWS = 0.1  # a message of twice the density moves the threshold by 2 to the power of so much


@dataclass
class Messaging:
    """What a worker needs for its messages, and no checkpoint has."""

    mailbox: Mailbox
    before: FlatVector  # memory: the parameters as a step found them
    taken: list[list[int]] = field(default_factory=list)  # after each step, by rank how many messages were taken so far
    staleness: list[int] = field(
        default_factory=list
    )  # of each step: updates of others that came while it was computed


@dataclass(kw_only=True)
class UpdateSharingState(State):
    """What this worker has yet to send, and from which magnitude on it sends."""

    own: ClassVar[tuple[str, ...]] = ("residual", "tau")
    residual: Tensor  # [D'] joined
    tau: float = 0.0  # 0: no message was sent yet
    messaging: Messaging | None = None

    @override
    def merge(self, others: list[UpdateSharingState], rank: int, size: int) -> UpdateSharingState:
        """With another number of ranks, each takes its part of what all have yet to send."""
        if len(others) == size:
            return others[rank]
        total = sum((other.residual for other in others), torch.zeros_like(self.residual))
        self.residual.copy_(total / size)
        return replace(self, tau=max(other.tau for other in others))

    @override
    def drain_journal(self) -> dict[str, Any]:
        messaging = self.messaging
        if messaging is None or not messaging.taken:
            return {}
        drained = {"taken": messaging.taken, "staleness": messaging.staleness}
        messaging.taken, messaging.staleness = [], []
        return drained


@dataclass(frozen=True, kw_only=True)
class UpdateSharing(Strategy):
    """Decentralised asynchronous sharing of quantised updates.

    Source: Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Nikko Strom, 2015; Deeplearning4j's
    gradient sharing.

    1. Compute the gradient at the worker's own parameters x, and let its own optimizer take a step u, which is undone:
       the residual r takes it over, r += u.
    2. The update q is plus or minus the threshold where |r| is above it, and 0 elsewhere; r -= q, x += q.
    3. Post q to all other workers, and go on.
    4. Add the updates of others that have come since the last step to x.

    Nobody waits for anybody, and no server is needed. All x go the same way, each a few updates behind the others. They
    are equal where all workers meet, which is where epochs end, and where a validation or a checkpoint is due. All
    updates that were applied and all residuals are all steps that the optimizers took. N workers move the parameters
    N times as far as one: updates add up, as in the paper.

    Deviations: the threshold follows `density`, where the paper's is fixed; Deeplearning4j's follows a share of values,
    too. Residuals are not clipped, as Deeplearning4j clips them, which loses what is clipped. Any optimizer instead of
    plain SGD, momentum and moments being each worker's own. At the end of an epoch what is in the residuals is shared
    as it is, so that the answer has all its rows. Where all meet each takes over worker 0's parameters, which are equal
    to its own but for rounding. With one worker nothing is quantised.
    """

    density: float | None = 0.1
    """The share of values that a message is to have: the threshold follows it. No message takes more than 1.6 bits a
    number; below 0.05 it takes less. Lower it where the link is slow; `none` keeps the first threshold."""
    tau: float | None = None
    """The first threshold, in the units of parameters; `none`: half of what `density` of the first step's values
    exceed. Give one to repeat a paper's, with density=none."""
    bound: int | None = None
    """`0` keeps all in step: every worker applies the same updates in the same order. `none` does not wait."""
    warmup: int = 0
    """Steps of worker 0 alone at the start of the run; raise it when training is unstable at its beginning."""

    name: ClassVar[str] = "update-sharing"
    source: ClassVar[str] = "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Strom, 2015"
    summary: ClassVar[str] = "quantised updates, from each worker to all, every step"
    consistency: ClassVar[str] = "async"
    needs: ClassVar[Needs] = Needs(mailbox=True)

    def __post_init__(self) -> None:
        for option, value, most in (("density", self.density, 1.0), ("tau", self.tau, math.inf)):
            fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most
            if value is not None and not (fits and math.isfinite(value)):
                limit = "above 0 and at most 1" if option == "density" else "above 0"
                raise BadInput(f"strategy {self.name}: {option} must be a number {limit}, or none; not {value!r}")
        if self.density is None and self.tau is None:
            raise BadInput(f"strategy {self.name}: without density the threshold is fixed: give tau, such as tau=0.001")
        server_strategy.check_pace(self.name, self.bound, self.warmup)
        if self.bound:
            raise BadInput(
                f"strategy {self.name}: nobody sees how far all others are, so bound must be 0 (all in step) or none (each at its "
                f"own pace), not {self.bound}: for a bound between, use downpour:bound={self.bound}"
            )

    @override
    def leasing(self) -> Leasing | None:
        return server_strategy.leasing_of(self.bound, self.warmup)

    @override
    def fixed_members(self) -> str:
        return "what a lost worker had posted, some have applied and others have not"

    @override
    def rate_factor(self, workers: int) -> float:
        return float(workers)

    @override
    def start(self, replica: Replica, worker: Worker) -> UpdateSharingState:
        return UpdateSharingState(residual=replica.zeros().joined().clone())

    @override
    def synchronize(self, replica: Replica, worker: Worker, state: UpdateSharingState, change: Change) -> None:
        super().synchronize(replica, worker, state, change)
        mailbox = worker.mesh.data.open_mailbox(signs.longest(len(state.residual)))
        state.messaging = Messaging(mailbox, replica.parameters.empty_like())

    @override
    def exchange(self, replica: Replica, worker: Worker, state: UpdateSharingState) -> StepResult:
        group, messaging = worker.mesh.data, _messaging_of(state)
        in_step = self.bound == 0
        all_idle = in_step and not replica.sum_weights(group, replica.weight)  # the control bits travel with it
        if group.size == 1:
            applied = replica.apply()
        else:
            messaging.before.copy_(replica.parameters)
            applied = replica.apply()
            own = self._update_of(replica, state) if applied else signs.NOTHING
            if applied or (in_step and not all_idle):
                group.encoded("threshold", len(state.residual), len(own))
                messaging.mailbox.post(own)
            self._take(replica, worker, messaging, own, in_step)
        return StepResult(applied=applied, rows_left=replica.control.rows_left(worker, True) if in_step else True)

    @override
    def settle(self, replica: Replica, worker: Worker, state: UpdateSharingState) -> None:
        mailbox = _messaging_of(state).mailbox
        _add(mailbox.take(_posted(worker, mailbox)), replica.parameters)
        replica.parameters.broadcast_(worker.mesh.data, 0)

    @override
    def finish(self, replica: Replica, worker: Worker, state: UpdateSharingState) -> None:
        self.settle(replica, worker, state)
        worker.mesh.data.all_reduce_(state.residual)
        if bool(state.residual.any()):
            joined = replica.parameters.joined()
            replica.parameters.take_joined_(joined.add_(state.residual))
            state.residual.zero_()

    @override
    def consensus(self, replica: Replica, worker: Worker, state: UpdateSharingState) -> FlatVector:
        """Worker 0's parameters with all that is on its way to it: a copy, the same on all ranks."""
        mailbox, answer = _messaging_of(state).mailbox, replica.parameters.clone()
        _add(mailbox.peek(_posted(worker, mailbox)), answer)
        answer.broadcast_(worker.mesh.data, 0)
        return answer

    # -- a step --------------------------------------------------------------------------------------------------------

    def _update_of(self, replica: Replica, state: UpdateSharingState) -> Tensor:
        """The message of this step, which the residual loses; the parameters are as before the step."""
        residual, before = state.residual, _messaging_of(state).before
        residual.add_(replica.parameters.joined()).sub_(before.joined())
        replica.parameters.copy_(before)
        if not FlatVector([residual]).is_finite():
            raise ManyhandsError(
                f"strategy {self.name}: a step of the optimizer is not finite, and no threshold can send that: lower the rate"
            )
        state.tau = state.tau or self._first_threshold(residual)
        if not state.tau:
            return signs.NOTHING  # nothing has moved
        message, sent = signs.take_beyond_(residual, state.tau)
        if self.density is not None and (sent or bool(residual.any())):
            state.tau *= (max(sent, 1) / max(1.0, self.density * replica.layout.size)) ** _FOLLOWS
        return message

    def _first_threshold(self, residual: Tensor) -> float:
        if self.tau is not None:
            return self.tau
        assert self.density is not None
        moved = residual[residual != 0].abs().double()
        if not len(moved):
            return 0.0
        return float(moved.topk(max(1, round(self.density * len(moved)))).values[-1]) / 2

    def _take(self, replica: Replica, worker: Worker, messaging: Messaging, own: Tensor, in_step: bool) -> None:
        """Add this step's own update, and those of others that are here, in rank order."""
        mailbox, group = messaging.mailbox, worker.mesh.data
        came = mailbox.take([mailbox.posted] * group.size if in_step else None)
        if not in_step:
            messaging.taken.append(list(mailbox.taken))
            messaging.staleness.append(sum(map(len, came)))
        came[group.rank] = [own]
        _add(came, replica.parameters)
        theirs = [message for rank, messages in enumerate(came) for message in messages if rank != group.rank]
        if theirs:
            group.decoded("threshold", replica.parameters.numel, sum(map(len, theirs)), len(theirs))
        replica.rounds += bool(theirs or len(own))


def _messaging_of(state: UpdateSharingState) -> Messaging:
    assert state.messaging is not None, "synchronize comes first"
    return state.messaging


def _posted(worker: Worker, mailbox: Mailbox) -> list[int]:
    """By rank, how many have been posted: all workers are here, and none posts meanwhile."""
    posted: list[int] = worker.mesh.data.all_gather_json(mailbox.posted)
    return posted


def _add(messages: Sequence[Sequence[Tensor]], vector: FlatVector) -> None:
    """Add what they say, rank by rank."""
    if any(messages):
        joined = vector.joined()
        for of_rank in messages:
            for message in of_rank:
                signs.add_(message, joined)
        vector.take_joined_(joined)
