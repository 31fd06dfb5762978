"""Replicas of several stages train as replicas of one worker: on engine `sim`, whose bits are those of processes
(test_stages_integration.py)."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import BATCH, CNN, LENGTH, MICRO, TASKS, WIDTH
from stage_runs import TICKS, alone, expect_alike, train, trained
from torch import Tensor

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.sim.engine import Sim
from manyhands.parallel.build import is_absent
from manyhands.parallel.mesh import mesh_of
from manyhands.parallel.spec import ModelParallel
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import make_loop
from manyhands.worker import Worker

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    ("name", "shapes"),
    [("gpt", [(2, 3)]), ("mlp", [(1, 1), (1, 4), (2, 3)]), ("cnn", [(1, 3), (2, 2)]), ("lengths", [(1, 3)])],
)
def test_stages_train_as_one_worker_does(name: str, shapes: list[tuple[int, int]]) -> None:
    """pytorch#126600: micro-batches that are not equal, here of ten, nine and three rows, are refused. pytorch#159942: so are
    lengths that vary. transformers#34242: micro-batches' means are averaged, whatever a mask leaves of each.
    torchtitan#596: each stage clips by its own norm. piper#13: copies of a tied parameter drift apart."""
    for replicas, stages in shapes:
        run = trained(name, replicas * stages, f"stages={stages}")
        assert run.history[-1]["tick"] == TICKS - 1
        expect_alike(run, alone(name) if replicas == 1 else trained(name, 2, None))
    if name == "mlp":  # nothing is tied, no norm is added up in another order. pytorch#168058: numbers change with it
        run, expected = (trained(name, *given, clip_norm=None) for given in ((3, "stages=3"), (1, "stages=1")))
        assert torch.equal(run.parameters, expected.parameters)


@pytest.mark.parametrize(
    ("name", "workers", "plan"),
    [
        ("mlp", 2, "stages=2,schedule=gpipe"),
        ("mlp", 2, "stages=2,micro_batches=4"),  # of 39 rows those of ten rows each; of three rows, of one
        ("gpt", 2, "stages=2,cut=[blocks.2.mlp]"),
        ("checkpointed", 3, "stages=3"),  # computed again by torch, with a view of what was transposed
        ("encoder", 2, "stages=2"),  # layers that are copies of one
        ("tied", 2, "stages=2,cut=[join]"),  # before the cut it is the first stage's, though the second one has it, too
        ("marked", 3, "stages=3"),
        ("marked", 2, "stages=2,cut=[cut2]"),
    ],
)
def test_whatever_is_cut_and_wherever(name: str, workers: int, plan: str) -> None:
    run = trained(name, workers, plan)
    expect_alike(run, alone(name))
    if name == "marked":
        assert all(one["begins"] in ("", "cut1", "cut2", "cut3") for one in run.info["stages"])


@pytest.mark.parametrize(("name", "stages"), [("dropout", 2), ("cnn", 3), ("mlp", 1)])
def test_units_that_are_computed_again_have_the_same_bits(name: str, stages: int) -> None:
    """With dropout, and with batch statistics, which count each row once (pytorch#96136: twice)."""
    plans = f"stages={stages}", f"stages={stages},recompute=units"
    run, expected = (trained(name, stages, plan, epochs=1) for plan in plans)
    expect_alike(run, expected, within=0.0)


STRATEGIES = ["diloco:period=4", "local-sgd:period=3", "local-sgd:period=end", "easgd:period=3,via=group"]
STRATEGIES += ["eamsgd:period=3,via=group", "gossip", "ensemble"]


@slow
@pytest.mark.parametrize(
    ("name", "strategy"), [("gpt", STRATEGIES[0]), *(("mlp", one) for one in STRATEGIES), ("cnn", "ensemble")]
)
def test_a_strategy_acts_between_stages_as_between_replicas(name: str, strategy: str) -> None:
    run = trained(name, 4, "stages=2", strategy)
    expect_alike(run, trained(name, 2, None, strategy))
    if strategy == "ensemble":
        first, second = (torch.nn.utils.parameters_to_vector(one.parameters()) for one in run.model.members)
        assert not torch.allclose(first, second)


def library_model(kind: str) -> torch.nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
    small = sizes | {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    small |= {"max_position_embeddings": 16}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=3, n_head=2, n_embd=16, n_positions=16, **sizes)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return transformers.GPT2LMHeadModel(config).double()
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **small)).double()
    if kind == "bert":
        config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **small)
        return transformers.BertForSequenceClassification(config).double()
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=40, dropout_rate=0.0
    )
    config.decoder_start_token_id = config.pad_token_id = 0
    return transformers.T5ForConditionalGeneration(config).double()


def library_loss(kind: str, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    given, labels = batch
    return model(input_ids=given, labels=labels[:, 0] % 2 if kind == "bert" else labels).loss


@slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("bert", "t5"))]
)
def test_models_of_transformers_are_cut_as_they_are(kind: str) -> None:
    """pytorch#184361: a model of Hugging Face cannot be cut, because export fails on it."""
    pytest.importorskip("transformers")
    fields = {"model": functools.partial(library_model, kind), "loss": functools.partial(library_loss, kind)}
    fields |= {"validation_data": None, "max_steps": 1}
    whole, cut = (train("gpt", stages, f"stages={stages}", **fields) for stages in (1, 3))
    torch.testing.assert_close(cut.parameters, whole.parameters, rtol=0, atol=1e-10)


def compiled() -> torch.nn.Module:
    model = CNN().double()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.blocks[2] = torch.compile(model.blocks[2], backend="eager")
    return model


@slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_compiled_blocks() -> None:
    """In and after a stage; the first cut is crossed by a value that a function gives."""
    fields = {"model": compiled, "max_steps": 3, "schedule": None}
    expected = train("cnn", 1, None, engine="local", **fields)
    for plan in ("cut=[blocks.0.norm2]", "cut=[blocks.2],recompute=units"):
        expect_alike(train("cnn", 2, f"stages=2,{plan}", **fields), expected)


# -- a run that goes on under its own plan, to the bit, and under any other ------------------------------------------------


@slow
@pytest.mark.parametrize(
    ("name", "strategy", "replicas", "plans"),
    [
        ("gpt", "allreduce", 1, [(3, "stages=3")]),
        ("mlp", "allreduce", 1, [(2, "stages=2"), (1, None), (4, "stages=2")]),
        ("cnn", "allreduce", 1, [(3, "stages=3")]),
        ("dropout", "allreduce", 1, [(2, "stages=2")]),
        ("mlp", "diloco:period=3", 2, [(4, "stages=2"), (2, None)]),
        ("mlp", "local-sgd:period=2", 2, [(2, None)]),
    ],
)
def test_a_run_goes_on(
    name: str, strategy: str, replicas: int, plans: list[tuple[int, str | None]], tmp_path: Path
) -> None:
    """torchtitan#811: a checkpoint cannot be loaded by another number of workers."""

    def run(workers: int, plan: str | None, steps: int, **options: Any) -> mh.Run:
        given = {"max_steps": steps, "schedule": None, "keep": "best:validation_loss", **options}
        return train(name, workers, plan, strategy, **given)

    own = 2 * replicas, "stages=2"
    expected = run(*own, TICKS)
    for number, plan in enumerate(plans):
        there = {"run_dir": tmp_path / str(number), "resume": True}
        run(*own, 4 if strategy == "allreduce" else 3, **there)  # an epoch has 3: with no round open
        resumed = run(*plan, TICKS, **there)
        assert plan != own or torch.equal(resumed.parameters, expected.parameters)
        for key, value in expected.model.state_dict().items():
            torch.testing.assert_close(resumed.model.state_dict()[key], value, rtol=0, atol=1e-10)
        assert resumed.metrics == pytest.approx(expected.metrics, abs=1e-10)
        assert resumed.rows["total"] == expected.rows["total"]


# -- inside a worker -----------------------------------------------------------------------------------------------------


def inside(plan: str, worker: Worker) -> dict[str, Any]:
    """Of a worker's loop before its first step, and of one step."""
    spec = ModelParallel.of(plan)
    assert spec is not None
    worker.mesh = mesh_of(worker, spec.stages)
    strategy = mh.strategies.strategy_of("allreduce")
    loop = make_loop(WorkerPlan(task=TASKS["gpt"], strategy=strategy, model_parallel=spec), worker)
    executor: Any = loop.replica.executor
    held = {n: p.detach().clone() for n, p in loop.replica.model.named_parameters() if not is_absent(p)}
    loop.replica.begin_tick()
    loop.replica.backward(loop._first_rows())
    ledgers = [ledger.as_dict() for ledger in executor.ledgers()]
    loop.train_feed.close()
    return {
        "drawn": tuple(torch.rand(4).tolist()),
        "held": held,
        "sent": {way: one[way] for one in ledgers for way in ("forward", "back") if way in one},
        "groups": [len(g["params"]) for g in loop.replica.optimizer.param_groups],
    }


def looked_at(plan: str, stages: int) -> list[dict[str, Any]]:
    return Sim().launch(functools.partial(inside, plan), LaunchSpec(workers=stages, threads_per_worker=1))


def test_each_stage_begins_with_one_workers_parameters() -> None:
    """pytorch#139304: stages that are built from one seed have equal parameters, and others than one process. Their groups
    keep their number, and each stage draws numbers of its own."""
    torch.manual_seed(TASKS["gpt"].seed)
    whole = dict(TASKS["gpt"].model().named_parameters())
    found = looked_at("stages=4", 4)
    assert {name for one in found for name in one["held"]} == set(whole)
    for one in found:
        for name, value in one["held"].items():
            assert torch.equal(value, whole[name]), name
        assert (len(one["groups"]), sum(one["groups"])) == (2, len(one["held"]))
    assert sum(len(one["held"]) for one in found) == len(whole) + 1  # the tied one is on two
    assert len({one["drawn"] for one in found}) == 4


def test_each_cuts_bytes_are_in_the_ledger() -> None:
    """One value of [rows, length, width] float64 crosses each cut, forward and back: what a block gives."""
    found = looked_at("stages=3,cut=[blocks.1,blocks.3]", 3)
    crossing = {"bytes": BATCH * LENGTH * WIDTH * 8, "messages": -(-BATCH // MICRO)}
    assert [one["sent"] for one in found] == [
        {"forward": crossing},
        {"forward": crossing, "back": crossing},
        {"back": crossing},
    ]
