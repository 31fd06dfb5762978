"""A server rule of the user's own, `ServerSpec(rule="my.py:Half")`: the process that launches lists it, and nobody else.

It loads the file and sends its text to the run's other processes, with the program: a shard may be on a host that has
no such file. No message of a worker names a rule, and a launch that names one without its text is refused.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from manyhands.errors import BadInput, UnknownName
from manyhands.server.base import ServerSpec
from manyhands.server.rules import OWN, RULES
from manyhands.server.rules.base import Rule
from manyhands.spec import find


def is_own(rule: str) -> bool:
    """Whether a spec's rule is in a file of the user's."""
    return ".py:" in rule


def list_rule(spec: ServerSpec) -> None:
    """Load the rule that the spec names, where it is the user's own. In the process that launches.

    BadInput for a file that is not there or fails, or for a name that is no Rule in it; UnknownName for a name that it
    has not.
    """
    if is_own(spec.rule) and spec.rule not in OWN:
        OWN[spec.rule] = _checked(spec.rule, find(spec.rule, {}, "rule"))


def to_fields(spec: ServerSpec) -> dict[str, Any]:
    """JSON for the processes of a launch; `from_fields` reads it."""
    fields = {name: value for name, value in vars(spec).items() if name != "coordinates" or value != 1}
    if not is_own(spec.rule):
        return fields
    return {**fields, "text": Path(spec.rule.partition(":")[0]).read_text()}


def from_fields(fields: dict[str, Any]) -> ServerSpec:
    """The spec, whose rule is then listed in this process, too. UnknownName for one that is not ours and has no text."""
    text = fields.get("text")
    spec = ServerSpec(**{name: value for name, value in fields.items() if name != "text"})
    if text is not None and spec.rule not in OWN:
        OWN[spec.rule] = _checked(spec.rule, _made(spec.rule, text))
    if spec.rule not in RULES and spec.rule not in OWN:
        raise UnknownName(
            f"rule {spec.rule!r} was not listed by the process that launched: the rules are {', '.join(RULES)}"
        )
    return spec


def _made(rule: str, text: str) -> Any:
    """What the file defines under the rule's name, from its text."""
    path, _, name = rule.partition(":")
    loaded = sys.modules.get(Path(path).stem)  # where this process has the file itself, the class is that one
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").name == Path(path).name:
        return getattr(loaded, name)
    module = ModuleType(Path(path).stem)
    module.__file__ = path
    sys.modules.setdefault(module.__name__, module)  # where dataclasses look their annotations up
    exec(compile(text, path, "exec"), vars(module))
    return getattr(module, name)


def _checked(rule: str, found: Any) -> type[Rule]:
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise BadInput(
            f"{rule} is no rule: write a class derived from manyhands.Rule, with `merge(self, old, new, pushes)`, see docs/strategies/server.md"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise BadInput(f"{rule} does not define {missing}, which every rule has to")
    if "__init__" in vars(found) and not is_dataclass(found):
        raise BadInput(f"{rule} has an __init__ of its own: make it a dataclass, whose fields are the rule's options")
    return found
