"""Roles in another framework's cluster: how many of each, in which order, and whose return ends the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from manyhands.errors import BadInput, UnknownName, is_whole

CHIEF, WORKER, PS, EVALUATOR = "chief", "worker", "ps", "evaluator"
TRAINING = (CHIEF, WORKER)
"""Who trains: these have a RANK, counted in this order. A chief is a worker that does a little more."""
ROLES = (*TRAINING, PS, EVALUATOR)
"""All roles, in the order of the processes' ranks in the run."""
_ONLY_ONE = (CHIEF, EVALUATOR)  # TensorFlow: multi_worker_util._validate_cluster_spec


@dataclass(frozen=True, kw_only=True)
class Roles:
    """How many processes have which role.

    Raises BadInput or UnknownName for what no framework's cluster can be.
    """

    workers: int
    others: Mapping[str, int]  # how many of chief, ps and evaluator; none where one is missing
    until: Collection[str] = TRAINING  # the run is over when all processes of these roles have returned

    def __post_init__(self) -> None:
        if not is_whole(self.workers):
            raise BadInput(f"workers must be a whole number of at least 1, not {self.workers!r}")
        for role, count in self.others.items():
            if role == WORKER:
                raise BadInput(
                    "roles must not contain worker: give the number of workers as workers=, and only the other roles "
                    "in roles"
                )
            if role not in ROLES:
                raise UnknownName(f"roles: there is no role {role!r}; choose from chief, ps, evaluator")
            if not is_whole(count, least=0):
                raise BadInput(f"roles: the number of {role} must be a whole number, 0 or more, not {count!r}")
            if role in _ONLY_ONE and count > 1:
                raise BadInput(f"roles: a cluster has at most one {role}, not {count}")
        if isinstance(self.until, str):
            raise BadInput(f"until must be a tuple of roles, such as ({self.until!r},), not a string")
        if unknown := [role for role in self.until if role not in ROLES]:
            raise UnknownName(f"until: there is no role {unknown[0]!r}; choose from {', '.join(ROLES)}")
        if not set(self.until) & set(self.counts):
            raise BadInput(f"until={self.until!r} names no role of this cluster: choose from {', '.join(self.counts)}")

    @property
    def counts(self) -> dict[str, int]:
        """{role: how many}, in the order of `ROLES`, without those that nobody has."""
        asked = {**self.others, WORKER: self.workers}
        return {role: asked[role] for role in ROLES if asked.get(role)}

    @property
    def members(self) -> list[tuple[str, int]]:
        """Every process's (role, index), by its rank in the run."""
        return [(role, index) for role, count in self.counts.items() for index in range(count)]

    @property
    def trainers(self) -> int:
        """How many train: the first ranks."""
        return sum(count for role, count in self.counts.items() if role in TRAINING)

    @property
    def awaited(self) -> frozenset[int]:
        """The ranks that must return; the others are ended then."""
        return frozenset(rank for rank, (role, _) in enumerate(self.members) if role in self.until)

    def name_of(self, rank: int) -> str:
        """How messages call it: "ps 0"."""
        role, index = self.members[rank]
        return f"{role} {index}"
