"""What launchers say in the environment."""

import signal
from typing import Any

import pytest

from manyhands import signals
from manyhands.engines import engine_of
from manyhands.engines.base import LaunchSpec
from manyhands.engines.torchrun import engine, launchers
from manyhands.engines.torchrun.engine import LauncherRank, Torchrun
from manyhands.engines.torchrun.launchers import run_id, started_as_one_of_several, value_of
from manyhands.server.base import ServerSpec
from refusals import refused

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"PROCID": "3", "STEP_NUM_TASKS": "4", "LOCALID": "1", "STEP_TASKS_PER_NODE": "2(x2)", "NODEID": "1"}
SLURM = {f"SLURM_{name}": value for name, value in {**SLURM, "STEP_ID": "0", "JOB_ID": "99"}.items()}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, **MEETING}.items():
        monkeypatch.setenv(name, value)


def test_the_place_comes_from_the_environment() -> None:
    assert engine_of("auto") == Torchrun()
    assert LauncherRank.from_environment() == LauncherRank(rank=3, size=4, local_rank=1, local_size=2)


def test_a_variable_that_is_missing_or_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        with monkeypatch.context() as patch:
            patch.delenv(name)
            refused(f"needs the variable {name}: start with torchrun", LauncherRank.from_environment)
    for name, value in (("RANK", "x"), ("RANK", "4"), ("WORLD_SIZE", "-1"), ("RANK", "²")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            refused(name, LauncherRank.from_environment)
    with monkeypatch.context() as patch:
        for name in (*TORCHRUN, *MEETING):
            patch.delenv(name)
        for name, value in OPEN_MPI.items():
            patch.setenv(name, value)
        words = "needs the variable MASTER_ADDR: start with mpirun -x MASTER_ADDR=HOST"
        refused(words, LauncherRank.from_environment)
    monkeypatch.setenv("WORLD_SIZE", "two")  # also before the workers meet
    refused("WORLD_SIZE must be a whole number, not 'two'", Torchrun().default_workers)
    monkeypatch.setenv("RANK", "²")
    refused("RANK must be a whole number, not '²'", Torchrun().own_rank)


def test_other_numbers_of_workers_and_shards_are_refused() -> None:
    refused("workers=2 under torchrun with WORLD_SIZE=4", Torchrun().launch, print, LaunchSpec(workers=2))
    spec = LaunchSpec(workers=4, server=ServerSpec(rule="add"), servers=2)
    words = "servers=2 under torchrun, where the first worker of each host holds one shard"
    refused(words, Torchrun().launch, print, spec)


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


def test_every_launchers_variables_say_the_same() -> None:
    for name, environment in {"torchrun": TORCHRUN, "openmpi": OPEN_MPI, "mpich": MPICH, "slurm": SLURM}.items():
        words = (launchers.RANK, launchers.SIZE, launchers.LOCAL_RANK, launchers.LOCAL_SIZE)
        values = [value_of(word, environment) for word in words]
        assert values == ["3", "4", "1", "2"], name
        assert started_as_one_of_several({**environment, **MEETING}), name
    assert value_of(launchers.RANK, {**OPEN_MPI, **TORCHRUN, "RANK": "0"}) == "0"  # torchrun's own come first


def test_who_works_together() -> None:
    """Those of mpirun, though the user forgot where to meet; slurm's tasks only in a step and where they are told so."""
    assert started_as_one_of_several(OPEN_MPI)
    assert not started_as_one_of_several({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"})
    assert not started_as_one_of_several(SLURM)
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert not started_as_one_of_several({**batch, **MEETING})
    assert not started_as_one_of_several({})
    assert launchers.launcher_of({}) is launchers.TORCHRUN


def test_tasks_of_a_node() -> None:
    for text, node, tasks in (("2(x3),1", "3", "1"), ("2(x3),1", "2", "2"), ("4", "0", "4"), ("4", "1", None)):
        environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}
        assert value_of(launchers.LOCAL_SIZE, environment) == tasks, (text, node)


def test_the_name_of_a_launch() -> None:
    for environment, name in (
        ({"TORCHELASTIC_RUN_ID": "mine"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "7"}, "none-7"),
        ({**SLURM, **MEETING}, "slurm-99-0"),
        ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-1"}, "prterun-1"),
        ({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "17"}, "17"),
        (OPEN_MPI, None),
        ({}, None),
    ):
        assert run_id(environment) == name, environment
