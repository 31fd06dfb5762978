"""How the server merges pushes into the center: one algorithm a file, its options as fields, its source cited beside it.

Accumulated gradient normalisation (`agn`) has no rule: the worker divides by its window before it pushes.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from manyhands.errors import UnknownName
from manyhands.server.base import ServerSpec
from manyhands.server.rules.adagrad import AdagradRule
from manyhands.server.rules.add import AddRule
from manyhands.server.rules.base import Rule
from manyhands.server.rules.distance import DistanceRule
from manyhands.server.rules.elastic import ElasticRule
from manyhands.server.rules.outer import OuterRule
from manyhands.server.rules.pairs import PairsRule
from manyhands.server.rules.quorum import QuorumRule
from manyhands.server.rules.rounds import RoundsRule
from manyhands.server.rules.staleness import StalenessRule

RULES: dict[str, type[Rule]] = {
    "add": AddRule,
    "staleness": StalenessRule,
    "distance": DistanceRule,
    "elastic": ElasticRule,
    "adagrad": AdagradRule,
    "outer": OuterRule,
    "pairs": PairsRule,
    "rounds": RoundsRule,
    "quorum": QuorumRule,
}
"""All rules by name."""

OWN: dict[str, type[Rule]] = {}
"""Those of users' own, `file.py:Name`, as the process that launched a run has listed them: see `engines/own_rules.py`."""


def make_rule(spec: ServerSpec) -> Rule:
    """The rule that a spec names, with its options; UnknownName where there is no such rule or option."""
    kind = RULES.get(spec.rule) or OWN.get(spec.rule)
    if kind is None:
        raise UnknownName(
            f"no rule {spec.rule!r}: the rules of a server are {', '.join(RULES)}, and those of your own, file.py:Name, that "
            "the process which launches the run names"
        )
    names: list[str] = [f.name for f in fields(kind) if f.init] if is_dataclass(kind) else []
    for name in spec.options:
        if name not in names:
            raise UnknownName(f"rule {spec.rule!r} has no option {name!r}: it has {', '.join(names) or 'none'}")
    return kind(**spec.options)
