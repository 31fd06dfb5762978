"""Engines: where workers run. One engine is one module here and one row of the catalogue; imports are lazy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from manyhands.engines.torchrun import launchers

if TYPE_CHECKING:
    from manyhands.engines.base import Capabilities, Engine

CATALOGUE: dict[str, str] = {
    "local": "manyhands.engines.local.engine:Local",
    "hosts": "manyhands.engines.hosts.engine:Hosts",
    "spark": "manyhands.engines.spark.engine:Spark",
    "sim": "manyhands.engines.sim.engine:Sim",
    "torchrun": "manyhands.engines.torchrun.engine:Torchrun",
}
"""{name: "module:class"}: what a spec string may name; nothing is imported before it is asked for."""

HINTS = {
    **dict.fromkeys(("fork", "multiprocessing", "processes"), "local"),
    **dict.fromkeys(("elastic", "distributed", "mpi", "mpirun", "srun"), "torchrun"),
    **dict.fromkeys(("cluster", "ssh"), "hosts"),
    **dict.fromkeys(("pyspark", "databricks", "yarn", "kubernetes", "barrier"), "spark"),
    **dict.fromkeys(("simulated", "simulator", "virtual"), "sim"),
}
"""What others call them."""


def engine_of(engine: Engine | str) -> Engine:
    """The engine that an object or a spec string means; "auto" is where this process already is.

    That is: the run whose worker this process is, else torchrun where its variables are set, else `local`.
    """
    from manyhands import spec
    from manyhands.engines.base import Engine
    from manyhands.errors import BadInput

    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str):
        raise BadInput(f"engine must be an engine or its spec string, such as 'local', not {type(engine).__name__}")
    if engine == "auto":
        if "manyhands.worker" in sys.modules:  # else nobody can have made this process a worker
            from manyhands.engines.nested import Nested
            from manyhands.worker import current

            if (worker := current()) is not None:
                return Nested(worker=worker)
        engine = "torchrun" if under_torchrun() else "local"
    name, options = spec.parse(engine)
    made = spec.make(spec.find(name, CATALOGUE, "engine", HINTS), options, f"engine {name}")
    if not isinstance(made, Engine):
        raise BadInput(
            f"{name} is a {type(made).__name__}, not an Engine: derive it from manyhands.engines.base.Engine"
        )
    return made


def under_torchrun() -> bool:
    """Whether torchrun, mpirun or srun started this process, as one of several that work together."""
    return launchers.started_as_one_of_several()


def capabilities_of(name: str) -> Capabilities:
    """Of a catalogued engine that a record names; none of a user's own."""
    from manyhands import spec
    from manyhands.engines.base import Capabilities

    if name not in CATALOGUE:
        return Capabilities()
    found: Capabilities = spec.find(name, CATALOGUE, "engine", HINTS).capabilities
    return found
