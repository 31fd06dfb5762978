"""What launchers say in the environment."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from manyhands import signals
from manyhands.engines import engine_of
from manyhands.engines.base import LaunchSpec
from manyhands.engines.torchrun import engine, launchers
from manyhands.engines.torchrun.engine import LauncherRank, Torchrun
from manyhands.engines.torchrun.launchers import (
    LOCAL_RANK,
    LOCAL_SIZE,
    RANK,
    SIZE,
    run_id,
    started_as_one_of_several,
    value_of,
)
from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec

VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def test_the_place_comes_from_the_environment() -> None:
    assert engine_of("auto") == Torchrun()
    assert LauncherRank.from_environment() == LauncherRank(rank=3, size=4, local_rank=1, local_size=2)


def test_a_variable_that_is_missing_or_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        with monkeypatch.context() as patch:
            patch.delenv(name)
            with pytest.raises(BadInput, match=f"needs the variable {name}: start with torchrun"):
                LauncherRank.from_environment()
    for name, value in (("RANK", "x"), ("RANK", "4"), ("WORLD_SIZE", "-1"), ("RANK", "²")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(BadInput, match=name):
                LauncherRank.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "two")  # also before the workers meet
    with pytest.raises(BadInput, match="WORLD_SIZE must be a whole number, not 'two'"):
        Torchrun().default_workers()
    monkeypatch.setenv("RANK", "²")
    with pytest.raises(BadInput, match="RANK must be a whole number, not '²'"):
        Torchrun().own_rank()


def test_other_numbers_of_workers_and_shards_are_refused() -> None:
    with pytest.raises(BadInput, match="workers=2 under torchrun with WORLD_SIZE=4"):
        Torchrun().launch(lambda worker: None, LaunchSpec(workers=2))
    spec = LaunchSpec(workers=4, server=ServerSpec(rule="add"), servers=2)
    with pytest.raises(BadInput, match="servers=2 under torchrun, where the first worker of each host holds one shard"):
        Torchrun().launch(lambda worker: None, spec)


def test_sigterm_ends_a_rank_that_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler of Python's would be called in the launcher's rendezvous."""

    def rendezvous(*_: Any) -> None:
        raise RuntimeError(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(engine, "_process_group", rendezvous)
    before = signal.getsignal(signal.SIGTERM)
    try:
        signals.end_by_sigterm()
        with pytest.raises(RuntimeError) as raised:
            Torchrun().launch(lambda worker: None, LaunchSpec(workers=4, device="cpu"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.args == (signal.SIG_DFL,)


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


def test_every_launchers_variables_say_the_same() -> None:
    for name, environment in {"torchrun": TORCHRUN, "openmpi": OPEN_MPI, "mpich": MPICH, "slurm": SLURM}.items():
        values = [value_of(word, environment) for word in (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE)]
        assert values == ["3", "4", "1", "2"], name
        assert started_as_one_of_several({**environment, **MEETING}), name
    assert value_of(RANK, {**OPEN_MPI, **TORCHRUN, "RANK": "0"}) == "0"  # torchrun's own come first


def test_a_user_of_mpirun_who_forgot_where_to_meet_means_one_run_all_the_same() -> None:
    assert started_as_one_of_several(OPEN_MPI)
    assert not started_as_one_of_several({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"})


def test_slurms_tasks_work_together_only_in_a_step_and_where_they_are_told_so() -> None:
    assert not started_as_one_of_several(SLURM)
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert not started_as_one_of_several({**batch, **MEETING})


def test_tasks_of_a_node() -> None:
    for text, node, tasks in (("2(x3),1", "3", "1"), ("2(x3),1", "2", "2"), ("4", "0", "4"), ("4", "1", None)):
        environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}
        assert value_of(LOCAL_SIZE, environment) == tasks, (text, node)


def test_nobody_started_this_process() -> None:
    assert launchers.launcher_of({}) is launchers.TORCHRUN
    assert not started_as_one_of_several({})
    assert run_id({}) is None


def test_the_name_of_a_launch() -> None:
    for environment, name in (
        ({"TORCHELASTIC_RUN_ID": "mine"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "7"}, "none-7"),
        ({**SLURM, **MEETING}, "slurm-99-0"),
        ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-1"}, "prterun-1"),
        ({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "17"}, "17"),
        (OPEN_MPI, None),
    ):
        assert run_id(environment) == name, environment
