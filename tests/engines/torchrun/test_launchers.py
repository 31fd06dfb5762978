from __future__ import annotations

import pytest

from manyhands.engines.torchrun import launchers
from manyhands.engines.torchrun.launchers import (
    LOCAL_RANK,
    LOCAL_SIZE,
    RANK,
    SIZE,
    run_id,
    started_as_one_of_several,
    value_of,
)

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "99",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "environment", [TORCHRUN, OPEN_MPI, MPICH, SLURM], ids=["torchrun", "openmpi", "mpich", "slurm"]
)
def test_every_launchers_variables_say_the_same(environment: dict[str, str]) -> None:
    assert [value_of(word, environment) for word in (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE)] == ["3", "4", "1", "2"]
    assert started_as_one_of_several({**environment, **MEETING})


def test_torchruns_own_variables_come_first() -> None:
    assert value_of(RANK, {**OPEN_MPI, **TORCHRUN, "RANK": "0"}) == "0"


def test_a_user_of_mpirun_who_forgot_where_to_meet_means_one_run_all_the_same() -> None:
    assert started_as_one_of_several(OPEN_MPI)
    assert not started_as_one_of_several({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"})


def test_slurms_tasks_work_together_only_in_a_step_and_where_they_are_told_so() -> None:
    assert not started_as_one_of_several(SLURM)
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert not started_as_one_of_several({**batch, **MEETING})


@pytest.mark.parametrize(
    ("text", "node", "tasks"), [("2(x3),1", "3", "1"), ("2(x3),1", "2", "2"), ("4", "0", "4"), ("4", "1", None)]
)
def test_tasks_of_a_node(text: str, node: str, tasks: str | None) -> None:
    environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}
    assert value_of(LOCAL_SIZE, environment) == tasks


def test_nobody_started_this_process() -> None:
    assert launchers.launcher_of({}) is launchers.TORCHRUN
    assert not started_as_one_of_several({})
    assert run_id({}) is None


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "mine"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "7"}, "none-7"),
        ({**SLURM, **MEETING}, "slurm-99-0"),
        ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-1"}, "prterun-1"),
        ({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "17"}, "17"),
        (OPEN_MPI, None),
    ],
)
def test_the_name_of_a_launch(environment: dict[str, str], name: str | None) -> None:
    assert run_id(environment) == name
