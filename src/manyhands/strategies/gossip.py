"""Gossip: workers average with few others at a time, and nobody with all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.server.base import ServerSpec
from manyhands.strategies import graphs, pairs, server_strategy
from manyhands.strategies.base import Change, Leasing, State, StepResult, Strategy, Traits
from manyhands.strategies.graphs import Turn
from manyhands.strategies.pairs import PairsState
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica

GRAPHS = ("exponential", "ring", "random", "pairs")
WEIGHTS = ("doubly-stochastic", "push-sum")


@dataclass(kw_only=True)
class GossipState(State):
    """In step: the window since the last round, how many rounds there were, and what push-sum remembers."""

    ticks: int = 0
    weight: float = 0.0
    rounds: int = 0  # that mixed
    mass: float = 1.0  # push-sum: how much this replica counts in the mean; all together are N
    ask: bool = True  # before the next round all say whether they have rows
    memory: list[FlatVector] = field(default_factory=list)  # two of scratch: what came, and what it adds up to

    @override
    def merge(self, others: list[GossipState], rank: int, size: int) -> GossipState:
        """With another number of ranks, a new window, from the mean: each replica counts the same again."""
        if len(others) == size:
            return others[rank]
        return replace(others[0], ticks=0, weight=0.0, mass=1.0, ask=True)

    @override
    def weight_of_window(self) -> float:
        return self.mass


@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """Decentralised SGD over a graph.

    Source: Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel
    Stochastic Gradient Descent, Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, 2017 (D-PSGD).
    Push-sum: Stochastic Gradient Push for Distributed Deep Learning, Mahmoud Assran, Nicolas Loizou, Nicolas Ballas,
    Michael Rabbat, 2019 (SGP). Pairs: Asynchronous Decentralized Parallel Stochastic Gradient Descent, Xiangru Lian,
    Wei Zhang, Ce Zhang, Ji Liu, 2018 (AD-PSGD).

    Doubly stochastic, W of the graph:
    1. The gradient g_i is taken at the worker's own x_i.
    2. Every `period` steps x_i becomes the sum of W_ij·x_j over itself and its neighbours.
    3. The worker's own optimizer takes its step along g_i, from there.
    Push-sum, P of the graph, columns summing to 1, a mass w_i beside each x_i, at first 1:
    1. The gradient is taken at z_i = x_i / w_i, which is what the replica holds.
    2. The optimizer's step moves x_i, so z_i by step / w_i.
    3. Every `period` steps x_i and w_i become the sums of P_ij·x_j and P_ij·w_j.
    Pairs, each worker at its own pace, over a server (see server/rules/pairs.py):
    1. The gradient is taken at x_i as of the worker's last exchange, and the optimizer takes its step.
    2. Every `period` steps, i and one other worker become their mean, in one go, and i moves by what its steps were.

    The answer is the mean of all replicas, each counting the same whatever its rows (with push-sum, by mass), which no
    mixing moves; replicas never take it over. A worker without rows in a tick mixes like any other; with `pairs` it
    does not begin an exchange.

    Deviations: any optimizer, whose state stays with its worker, instead of plain SGD. A window that an epoch's end
    cuts short is closed by a round. On streams a round begins with everybody's control words, so that a round before
    which nobody had rows mixes nothing, and all workers learn at once that the rows are out; where the number of ticks
    is known no round asks anybody but neighbours. So a round on such data mixes also where the loss counted nothing on
    any worker: the replicas come closer, the answer stays. With `pairs` the paper's workers exchange with each other;
    here they meet at the server, since a group knows no one-sided operation, and any two may meet.
    """

    graph: Literal["exponential", "ring", "random", "pairs"] = "exponential"
    """Who mixes with whom in a round. `exponential`: one peer, at 1, 2, 4, … ranks' distance in turn; the default since
    it sends the least and comes closest to the mean: with 2^m workers, all the way in m rounds. `ring`: both
    neighbours, for links between neighbours only. `random`: a matching drawn anew. `pairs`: any two, each worker at its
    own pace, where some are slow."""
    weights: Literal["doubly-stochastic", "push-sum"] = "doubly-stochastic"
    """How what comes is weighed. `push-sum` lets everybody send without being sent as much: on `random` each pushes to
    one drawn out of all; on `ring` to the right only."""
    period: int = 1
    """Steps between rounds. Raise it if exchange takes long, lower it if replicas drift apart; the papers use 1."""
    seed: int = 0
    """Of the draws of `random` and `pairs`. Change it to see how much a result depends on who met whom."""
    bound: int | None = None
    """With `pairs`: how many steps the fastest may be ahead; `none`: any. Lower it for stragglers."""

    name: ClassVar[str] = "gossip"
    source: ClassVar[str] = (
        "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel Stochastic Gradient "
        "Descent, Lian, Zhang, Zhang, Hsieh, Zhang, Liu, 2017"
    )
    summary: ClassVar[str] = "parameters, with few others on a graph, every `period` steps"
    consistency: ClassVar[str] = "decentralised"
    traits: ClassVar[Traits] = Traits(period="period")

    def __post_init__(self) -> None:
        for option, value, known in (("graph", self.graph, GRAPHS), ("weights", self.weights, WEIGHTS)):
            if value not in known:
                raise BadInput(f"strategy gossip: {option} must be one of {', '.join(known)}, not {value!r}")
        server_strategy.check_whole(self.name, period=self.period)
        server_strategy.check_whole(self.name, 0, seed=self.seed)
        server_strategy.check_pace(self.name, self.bound, 0)
        if self.graph == "pairs" and self.weights == "push-sum":
            raise BadInput(
                "strategy gossip: weights=push-sum has no effect with graph=pairs: leave it out, or give graph=random"
            )
        if self.graph != "pairs" and self.bound is not None:
            raise BadInput(
                f"strategy gossip: bound has no effect with graph={self.graph}, where all workers are in step: leave "
                "it out, or give graph=pairs"
            )
        if self.graph in ("exponential", "ring") and self.seed:
            raise BadInput(
                f"strategy gossip: seed has no effect with graph={self.graph}, which is not random: leave it out, or "
                "give graph=random"
            )

    @override
    def server(self) -> ServerSpec | None:
        if self.graph != "pairs":
            return None
        return ServerSpec(rule="pairs", bound=self.bound, options={"seed": self.seed})

    @override
    def fixed_places(self) -> str:
        return "at its server each worker has a place in the mean from the start" if self.graph == "pairs" else ""

    @override
    def leasing(self) -> Leasing | None:
        return server_strategy.leasing_of(self.bound, 0) if self.graph == "pairs" else None

    @override
    def start(self, replica: Replica, worker: Worker) -> GossipState | PairsState:
        if self.graph == "pairs":
            return PairsState(start=replica.parameters.clone())
        return GossipState(memory=[replica.parameters.empty_like() for _ in range(2)])

    @override
    def synchronize(self, replica: Replica, worker: Worker, state: GossipState | PairsState, change: Change) -> None:
        super().synchronize(replica, worker, state, change)
        if isinstance(state, PairsState):
            if not state.ticks:  # of a worker that joins, too: the window that it found was another's
                state.start.copy_(replica.parameters)
            if not change.first and worker.mesh.data.rank == 0:  # who saves the server's state must know how long it is
                server_strategy.read_center(replica, worker)
        elif not change.first:  # another graph, in which each replica counts the same
            state.mass, state.ask = 1.0, True

    @override
    def exchange(self, replica: Replica, worker: Worker, state: GossipState | PairsState) -> StepResult:
        if isinstance(state, PairsState):
            return pairs.turn(self.period, replica, worker, state)
        due, asked = state.ticks + 1 >= self.period, state.ask
        if due and self.weights == "doubly-stochastic":
            applied = self._round(replica, worker, state, state.weight + replica.weight, replica.apply)
        else:
            applied = self.step_alone(replica, worker, state)
            state.ticks += 1
            if due:
                self._round(replica, worker, state, state.weight)
        return StepResult(applied=applied, rows_left=replica.control.rows_left(worker, due and asked))

    @override
    def step_alone(self, replica: Replica, worker: Worker, state: GossipState, *, extra: bool = False) -> bool:
        state.weight += replica.weight
        return _step_by_mass(replica, state, extra) if self.weights == "push-sum" else replica.apply(extra=extra)

    @override
    def steps_since_round(self, state: GossipState | PairsState) -> int:
        return state.ticks

    @override
    def finish(self, replica: Replica, worker: Worker, state: GossipState | PairsState) -> None:
        if isinstance(state, PairsState):
            pairs.close(replica, worker, state)
            return
        if state.ticks:
            self._round(replica, worker, state, state.weight)
        state.ask = True

    @override
    def consensus(self, replica: Replica, worker: Worker, state: GossipState | PairsState) -> FlatVector:
        if isinstance(state, PairsState):
            return pairs.consensus(replica, worker, state)
        if worker.mesh.data.size == 1:
            return replica.parameters
        mean = replica.parameters.clone()
        mean.mean_(worker.mesh.data, state.mass)
        return mean

    # -- a round -----------------------------------------------------------------------------------------------------

    def _round(
        self,
        replica: Replica,
        worker: Worker,
        state: GossipState,
        weight: float,
        then: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Mix, unless it is known that nobody had rows in the window, of this weight here; `then` comes next."""
        asked, mass = state.ask, None
        if asked:
            total = replica.sum_weights(worker.mesh.data, weight)
        else:
            replica.rounds += worker.mesh.data.size > 1
        mixes = not asked or total > 0
        if mixes:
            mass = self._mix(replica, worker, state)

        def close() -> bool:
            if asked:
                state.ask = replica.control.any_rank_has_rows  # only a stream has rows of which the number is not known
            if mass is not None:
                state.mass = mass
                replica.parameters.add_(state.memory[1], alpha=1 / mass)
            state.ticks, state.weight, state.rounds = 0, 0.0, state.rounds + mixes
            return then()

        return replica.complete(worker.mesh.data, close)

    def _mix(self, replica: Replica, worker: Worker, state: GossipState) -> float | None:
        """The new mass w, and in `memory[1]` the sum of share_j·w_j·(z_j - z), by which w·z moves: replicas that are equal
        keep their bits. None for one who sits out."""
        assert self.graph != "pairs"
        push_sum, x, (came, moved) = self.weights == "push-sum", replica.parameters, state.memory
        turns = graphs.round_of(self.graph, worker.mesh.data.size, state.rounds, one_way=push_sum, seed=self.seed)[
            worker.mesh.data.rank
        ]
        if not turns:
            return None
        moved.zero_()
        mass = state.mass * (1 - sum(turn.given for turn in turns))
        for turn in turns:
            theirs = torch.ones(1, dtype=torch.float64)
            if push_sum:
                _swap(worker, turn, torch.tensor([state.mass], dtype=torch.float64), theirs)
            for part, into in zip(x.parts, came.parts, strict=True):
                _swap(worker, turn, part, into)
            if turn.source is not None:
                gotten = turn.gotten * float(theirs)
                moved.add_(came.sub_(x), alpha=gotten)
                mass += gotten
        return mass if push_sum else state.mass


def _step_by_mass(replica: Replica, state: GossipState, extra: bool) -> bool:
    """The optimizer's step, taken by x = mass·z, where the replica holds z; whether it was made."""
    if state.mass == 1:
        return replica.apply(extra=extra)
    before = state.memory[0].copy_(replica.parameters)
    applied = replica.apply(extra=extra)
    if applied:
        replica.parameters.sub_(before).div_(state.mass).add_(before)
    return applied


def _swap(worker: Worker, turn: Turn, tensor: Tensor, into: Tensor) -> None:
    """This rank's part of a turn: `tensor` leaves, another comes `into`, or both."""
    if turn.source is None:
        assert turn.target is not None
        worker.mesh.data.send(tensor, turn.target)
    elif turn.target is None:
        worker.mesh.data.receive_(into, turn.source)
    else:
        worker.mesh.data.swap(tensor, turn.target, into, turn.source)
