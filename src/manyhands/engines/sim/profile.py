"""A measured machine, as `manyhands calibrate` writes it and engine `sim` takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from manyhands.checkpoint.checkpoints import write_whole
from manyhands.engines.quantities import expect_number
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.errors import BadInput

_SCHEMA = 1
_KIND = "manyhands profile"
_AGAIN = "write it again with `manyhands calibrate TASK`"
_LOCAL = "local"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a task costs on a machine. Frozen; `load(path)` of what `save(path)` wrote is equal to it.

    networks: by name. `local`, which is always there: hosts like this machine, each with as many workers as were
    measured; local_latency and local_bandwidth are those of the group in shared memory, latency and bandwidth those of
    sockets on this machine, which no network between two machines beats. Others are for reading, and for `network=`.
    """

    networks: Mapping[str, SimNetworkSpec] = field(hash=False)
    compute: Compute  # seconds a row and a tick, jitter, lease, and the server's merge
    task: str  # its name or spec
    workers: int  # at the same time, when it was measured
    batch_sizes: tuple[int, ...] = ()  # rows of a worker's batches that were measured
    measured: str = ""  # when: ISO 8601
    machine: Mapping[str, str] = field(default_factory=dict, hash=False)  # where: processor, cores, versions …
    errors: Mapping[str, float] = field(default_factory=dict, hash=False)
    """{strategy: predicted step time / measured step time - 1}, where it was tried."""

    def __post_init__(self) -> None:
        if _LOCAL not in self.networks:
            raise BadInput(f"a profile must have a network {_LOCAL!r}; got {', '.join(self.networks) or 'none'}")
        if not self.workers >= 1:
            raise BadInput(f"a profile must be of at least 1 worker; got {self.workers}")
        for strategy, error in self.errors.items():
            expect_number(error, f"a profile's prediction error of {strategy}")

    @property
    def network(self) -> SimNetworkSpec:
        """That of workers on the machine: `local`."""
        return self.networks[_LOCAL]

    def save(self, path: Path) -> None:
        """Write it as JSON; the file is whole or, if that fails (OSError), not there."""
        content: dict[str, Any] = {"kind": _KIND, "schema": _SCHEMA}
        content |= {entry.name: getattr(self, entry.name) for entry in fields(self)}
        content |= {
            "networks": {name: str(network) for name, network in self.networks.items()},
            "compute": str(self.compute),
            "batch_sizes": list(self.batch_sizes),
            "machine": dict(self.machine),
            "errors": dict(self.errors),
        }
        write_whole(Path(path), (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """What `save` wrote. Raises BadInput for a file that is not there, is no profile, or is of another schema."""
        try:
            content = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise BadInput(
                f"profile {path} cannot be read ({error.strerror}): give the path of one, or {_AGAIN}"
            ) from error
        except ValueError as error:
            raise BadInput(f"profile {path} is not JSON ({error}): {_AGAIN}") from error
        if not isinstance(content, dict) or content.pop("kind", None) != _KIND:
            raise BadInput(f"{path} is not a profile of manyhands: {_AGAIN}")
        schema = content.pop("schema", None)
        if schema != _SCHEMA:
            raise BadInput(f"profile {path} has schema {schema!r}, and this version reads {_SCHEMA}: {_AGAIN}")
        known = {entry.name for entry in fields(cls)}
        if content.keys() != known:
            lacks = [f"lacks {name}" for name in sorted(known - content.keys())]
            more = [f"has {name}, which is unknown" for name in sorted(content.keys() - known)]
            raise BadInput(f"profile {path} {', '.join(lacks + more)}: {_AGAIN}")
        try:
            return cls(**_values(content))
        except BadInput as error:
            raise BadInput(f"profile {path} is damaged: {error}; {_AGAIN}") from error


_TYPES: dict[str, tuple[type, type | tuple[type, ...]]] = {
    "networks": (dict, str),
    "compute": (str, str),
    "task": (str, str),
    "workers": (int, int),
    "batch_sizes": (list, int),
    "measured": (str, str),
    "machine": (dict, str),
    "errors": (dict, (int, float)),
}
"""Of each field in JSON, and of what is in it."""


def _values(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, of the types that they have; BadInput where JSON has another."""
    for name, value in content.items():
        outer, inner = _TYPES[name]
        parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if not isinstance(value, outer) or not all(isinstance(p, inner) and not isinstance(p, bool) for p in parts):
            raise BadInput(f"{name} has the wrong type: {json.dumps(value)[:80]}")
    return {
        **content,
        "networks": {name: SimNetworkSpec.parse(text) for name, text in content["networks"].items()},
        "compute": Compute.parse(content["compute"]),
        "batch_sizes": tuple(content["batch_sizes"]),
    }
