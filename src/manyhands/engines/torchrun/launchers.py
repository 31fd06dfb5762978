"""The variables of launchers that start this process as one of several, in torchrun's terms. Imports are light."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.errors import BadInput, whole_of

RANK, SIZE, LOCAL_RANK, LOCAL_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Where the processes meet: torchrun sets them; to the others the user says them."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher's variables, by torchrun's name for what they hold."""

    start: str  # how to start with it, for errors
    names: Mapping[str, str]


TORCHRUN = Launcher(
    start="start with torchrun --nproc-per-node N script.py",
    names={RANK: RANK, SIZE: SIZE, LOCAL_RANK: LOCAL_RANK, LOCAL_SIZE: LOCAL_SIZE},
)
OPEN_MPI = Launcher(
    start=(
        "start with mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT python script.py (HOST: the host of rank 0; "
        "PORT: a free port there)"
    ),
    names={
        RANK: "OMPI_COMM_WORLD_RANK",
        SIZE: "OMPI_COMM_WORLD_SIZE",
        LOCAL_RANK: "OMPI_COMM_WORLD_LOCAL_RANK",
        LOCAL_SIZE: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
)
MPICH = Launcher(
    start=(
        "start with mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT PORT python script.py (HOST: the host of rank 0; "
        "PORT: a free port there)"
    ),
    names={RANK: "PMI_RANK", SIZE: "PMI_SIZE", LOCAL_RANK: "MPI_LOCALRANKID", LOCAL_SIZE: "MPI_LOCALNRANKS"},
)
SLURM = Launcher(
    start=(
        "start with MASTER_ADDR=HOST MASTER_PORT=PORT srun python script.py (HOST: the host of rank 0; "
        "PORT: a free port there)"
    ),
    names={
        RANK: "SLURM_PROCID",
        SIZE: "SLURM_STEP_NUM_TASKS",
        LOCAL_RANK: "SLURM_LOCALID",
        LOCAL_SIZE: "SLURM_STEP_TASKS_PER_NODE",
    },
)


def launcher_of(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Whose variables are set; torchrun's where nobody's are. srun starts PMI's too, so mpirun's own come first."""
    for launcher in (TORCHRUN, OPEN_MPI, MPICH, SLURM):
        if any(launcher.names[word] in environment for word in (RANK, SIZE)):
            return launcher
    return TORCHRUN


def value_of(word: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """What torchrun would have put into its variable `word`; None where it is not known."""
    launcher = launcher_of(environment)
    text = environment.get(launcher.names[word])
    if launcher is SLURM and word == LOCAL_SIZE and text is not None:
        return _tasks_here(text, environment.get("SLURM_NODEID", "0"))
    return text


def number_of(word: str, default: str | None = None) -> int:
    """`value_of`, a whole number of at least 0. Raises BadInput where it is none, or missing without a default."""
    name = launcher_of().names[word]
    text = value_of(word) or default
    if text is None:
        raise missing(name)
    number = whole_of(text)
    if number is None or number < 0:
        raise BadInput(f"the variable {name} must be a whole number, not {text!r}: {launcher_of().start}")
    return number


def missing(name: str) -> BadInput:
    """The error for a variable that engine torchrun needs."""
    return BadInput(f"engine torchrun needs the variable {name}: {launcher_of().start}")


def started_as_one_of_several(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process together with others, which are to work as one.

    Under srun only where the rendezvous address is set: it also starts tasks that have nothing to do with each
    other. A batch script has Slurm's variables too, but no step of its own.
    """
    launcher = launcher_of(environment)
    if value_of(SIZE, environment) in (None, "1"):
        return False
    if launcher is TORCHRUN:
        return all(name in environment for name in (RANK, LOCAL_RANK, *MEETING))
    return launcher is not SLURM or all(name in environment for name in ("SLURM_STEP_ID", *MEETING))


def run_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """A name that all processes of one launch know and no other launch has; None where the launcher gives none."""
    name = environment.get("TORCHELASTIC_RUN_ID")
    if name is not None:  # "none" is torchrun's default for every call, so its port distinguishes them
        return f"{name}-{environment.get('MASTER_PORT', '')}" if name == "none" else name
    if not started_as_one_of_several(environment):
        return None
    if "SLURM_STEP_ID" in environment:
        return f"slurm-{environment.get('SLURM_JOB_ID', '')}-{environment['SLURM_STEP_ID']}"
    return environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")


RESTARTS = "MANYHANDS_RESTART_COUNT"
"""How often `manyhands run` has started a script again."""


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun or `manyhands run` has started the workers again; 0 where nobody says."""
    number = whole_of(environment.get(RESTARTS) or environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return max(0, number or 0)


def _tasks_here(text: str, node: str) -> str | None:
    """Slurm's "2(x3),1" by the number of the node: 2, 2, 2, 1."""
    counts: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [count] * int(times or 1)
    number = whole_of(node)
    return counts[number] if number is not None and 0 <= number < len(counts) else None
