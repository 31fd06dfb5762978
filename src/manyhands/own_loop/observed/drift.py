"""Whether replicas that are to be equal have stayed so: what a script changes by hand may make them drift apart."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from manyhands.comm.group import Group
from manyhands.errors import ManyhandsError
from manyhands.own_loop.first_step_checks import checksum
from manyhands.own_loop.session import Pair

_FIRST, _EVERY = (1, 10, 100), 1000  # steps after which replicas are compared


class DriftCheck:
    """Compares prepared models, and modules that no optimizer steps: averages of models, say."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._others: list[weakref.ref[nn.Module]] = []

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """These are compared from now on, too."""
        self._others = [weakref.ref(module) for module in modules]

    def stepped(self, pair: Pair) -> None:
        """A collective after steps 1, 10, 100 and each 1,000, where every step applies the workers' mean. Raises
        ManyhandsError, by name, for what differs."""
        step = pair.replica.step
        if not pair.averages or not (step in _FIRST or step % _EVERY == 0):
            return
        own = {name: [checksum(value)] for name, value in pair.replica.named(pair.replica.parameters).items()}
        for module in [module for reference in self._others if (module := reference()) is not None]:
            own.setdefault(f"a {type(module).__name__}", []).append(_checksum_of(module))
        first, *others = self._group.all_gather_json({name: sorted(found) for name, found in own.items()})
        for rank, theirs in enumerate(others, start=1):
            for name, found in first.items():
                other = theirs.get(name, found)
                if other != found and len(other) == len(found):  # of garbage one worker may have more left
                    raise ManyhandsError(
                        f"after step {step} {name} of worker {rank} is not what it is on worker 0. Something other than the optimizer's step changes it on each "
                        "worker by its own rows: change it by what all workers have (parameters, gradients after backward), or train in one process"
                    )


def _checksum_of(module: nn.Module) -> int:
    found = 0
    for p in module.parameters():
        found = checksum(p, found)
    return found
