"""Replicas of several stages, in processes, train as replicas of one worker."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from stage_models import BATCH, CNN, LENGTH, MICRO, TASKS, WIDTH
from torch import Tensor

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, Unsupported
from manyhands.parallel.build import is_absent
from manyhands.parallel.mesh import mesh_of
from manyhands.parallel.spec import ModelParallel
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import make_loop
from manyhands.worker import Worker

WITHIN = 1e-10


@functools.cache
def trained(name: str, workers: int, model_parallel: str | None, strategy: str = "allreduce", **fields: Any) -> mh.Run:
    return mh.train(
        TASKS[name].with_fields(**fields),
        workers=workers,
        engine="local",
        strategy=strategy,
        model_parallel=model_parallel,
        threads_per_worker=1,
    )


def expect_alike(run: mh.Run, expected: mh.Run) -> None:
    """Parameters, buffers, metrics, rows and the loss of each step."""
    own, theirs = run.model.state_dict(), expected.model.state_dict()
    assert own.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=WITHIN, msg=lambda text, name=name: f"{name}: {text}")
    assert run.metrics == pytest.approx(expected.metrics, abs=WITHIN)
    assert run.rows["total"] == expected.rows["total"]
    assert [row["loss"] for row in run.history] == pytest.approx([row["loss"] for row in expected.history], abs=WITHIN)
    assert [row["rows"] for row in run.history] == [row["rows"] for row in expected.history]


SLOW = pytest.mark.slow
CASES = [
    pytest.param(name, replicas, stages, marks=[] if (name, replicas, stages) in FAST else SLOW)
    for FAST in [{("gpt", 1, 2), ("cnn", 1, 2), ("lengths", 1, 3)}]
    for name in ("gpt", "mlp", "cnn", "lengths")
    for replicas in (1, 2)
    for stages in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("name", "replicas", "stages"), CASES)
def test_stages_train_as_one_worker_does(name: str, replicas: int, stages: int) -> None:
    """pytorch#126600: micro-batches that are not equal, here of ten, nine and three rows, are refused. pytorch#159942: so are
    lengths that vary."""
    run = trained(name, replicas * stages, f"stages={stages}")
    assert run.history[-1]["tick"] == 11
    expect_alike(run, trained(name, replicas, None))


def test_gradients_of_stages_alone_have_one_workers_bits() -> None:
    """Nothing is tied, and no norm is added up in another order. pytorch#168058: numbers change with the layout."""
    run, expected = (trained("mlp", *given, clip_norm=None) for given in ((3, "stages=3"), (1, None)))
    assert torch.equal(run.parameters, expected.parameters)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5"])
def test_models_of_transformers_are_cut_as_they_are(kind: str) -> None:
    """pytorch#184361: a model of Hugging Face cannot be cut, because export fails on it."""
    pytest.importorskip("transformers")
    task = TASKS["gpt"].with_fields(
        model=functools.partial(library_model, kind),
        loss=functools.partial(library_loss, kind),
        validation_data=None,
        max_steps=6,
    )
    runs = [
        mh.train(task, workers=stages, engine="local", model_parallel=f"stages={stages}", threads_per_worker=1)
        for stages in (1, 2, 3)
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.parameters, runs[0].parameters, rtol=0, atol=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["schedule=gpipe", "micro_batches=4", "cut=[blocks.2.mlp]"])
def test_options(options: str) -> None:
    """Four micro-batches of 39 rows are those of ten rows each; of three rows, of one."""
    run = trained("gpt", 2, f"stages=2,{options}")
    expect_alike(run, trained("gpt", 1, None))


@pytest.mark.parametrize(
    ("name", "stages"), [pytest.param("dropout", 2, marks=SLOW), ("cnn", 3), pytest.param("gpt", 1, marks=SLOW)]
)
def test_units_that_are_computed_again_have_the_same_bits(name: str, stages: int) -> None:
    """With dropout, and with batch statistics, which count each row once."""
    plans = f"stages={stages}", f"stages={stages},recompute=units"
    run, expected = (trained(name, stages, plan) for plan in plans)
    assert torch.equal(run.parameters, expected.parameters)
    for key, value in expected.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[key], value), key


def test_blocks_that_are_computed_again() -> None:
    """torch.utils.checkpoint, and a view of what was transposed and made contiguous."""
    expect_alike(trained("checkpointed", 3, "stages=3"), trained("checkpointed", 1, None))


def compiled() -> torch.nn.Module:
    model = CNN().double()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.blocks[2] = torch.compile(model.blocks[2], backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize(
    "plan", ["cut=[blocks.1]", "cut=[head]", "cut=[blocks.0.norm2]", "cut=[blocks.2],recompute=units"]
)
def test_compiled_blocks(plan: str) -> None:
    """Before, in and after a stage; the third cut is crossed by a value that a function gives."""
    task = TASKS["cnn"].with_fields(model=compiled, max_steps=4, schedule=None)
    runs = [
        mh.train(task, workers=workers, engine="local", model_parallel=plan, threads_per_worker=1)
        for workers, plan in ((2, f"stages=2,{plan}"), (1, None))
    ]
    expect_alike(*runs)


def test_layers_that_are_copies_of_one() -> None:
    expect_alike(trained("encoder", 2, "stages=2"), trained("encoder", 1, None))


def test_a_tied_parameter_on_both_sides_of_a_cut() -> None:
    """What it gives before the cut is the first stage's, though the second one has it, too."""
    expect_alike(trained("tied", 2, "stages=2,cut=[join]"), trained("tied", 1, None))


@pytest.mark.parametrize("plan", ["stages=3", pytest.param("stages=2,cut=[cut2]", marks=pytest.mark.slow)])
def test_marks_in_a_forward_begin_stages(plan: str) -> None:
    run = trained("marked", 3 if "3" in plan else 2, plan)
    expect_alike(run, trained("marked", 1, None))
    assert all(one["begins"] in ("", "cut1", "cut2", "cut3") for one in run.info["stages"])


STRATEGIES = [
    "local-sgd:period=3",
    "local-sgd:period=end",
    "diloco:period=4",
    "easgd:period=3,via=group",
    "eamsgd:period=3,via=group",
    "gossip",
]


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[] if name.startswith("diloco") else SLOW) for name in STRATEGIES]
)
def test_a_strategy_acts_between_stages_as_between_replicas(strategy: str) -> None:
    expect_alike(trained("gpt", 4, "stages=2", strategy), trained("gpt", 2, None, strategy))


def test_the_same_plan_and_seed_give_the_same_bits_with_dropout() -> None:
    first, second = (trained.__wrapped__("dropout", 2, "stages=2", max_steps=4) for _ in range(2))
    assert torch.equal(first.parameters, second.parameters)


def test_what_a_run_says_of_its_stages() -> None:
    run = trained("gpt", 2, "stages=2")
    held = run.info["stages"]
    assert [one["begins"] for one in held] == ["", "blocks.2"]
    tied = run.model.tokens.weight.numel()
    assert sum(one["parameters"] for one in held) == run.info["parameters"] + tied == run.parameters.numel() + tied
    assert "1 replica of 2 workers" in run.summary()
    assert sum(one["bytes"] for one in held) == sum(entry["bytes"] for entry in run.ledger.values())
    assert [one["memory"] for one in held] == run.memory_of_workers
    for stage, begins in enumerate(("the beginning", "blocks.2")):
        timing = run.timing_of_workers[stage]
        waited = f"waited {100 * timing['wait'] / sum(timing.values()):.0f} %"
        (line,) = [one for one in run.summary().splitlines() if f"{stage} from {begins}: " in one]
        assert f"{held[stage]['parameters']:,} parameters, {waited}, sent " in line
    assert run.rows["workers"] == [run.rows["total"], 0]
    for row in run.history:
        assert all(row[f"{part}_s"] > -1e-3 for part in ("input", "compute", "exchange", "wait"))


# -- inside a worker -----------------------------------------------------------------------------------------------------


def inside(name: str, stages: int, worker: Worker) -> dict[str, Any]:
    """Of a worker's loop before its first step, and of one step."""
    spec = ModelParallel(stages=stages)
    worker.mesh = mesh_of(worker, stages)
    plan = WorkerPlan(task=TASKS[name], strategy=mh.strategies.strategy_of("allreduce"), model_parallel=spec)
    loop = make_loop(plan, worker)
    executor: Any = loop.replica.executor
    held: dict[str, Tensor] = {
        n: p.detach().clone() for n, p in loop.replica.model.named_parameters() if not is_absent(p)
    }
    batch = loop._first_rows()
    loop.replica.begin_tick()
    loop.replica.backward(batch)
    sent = {k: v for ledger in executor.ledgers() for k, v in ledger.as_dict().items() if k in ("forward", "back")}
    loop.train_feed.close()
    drawn = torch.rand(4).tolist()
    return {
        "drawn": drawn,
        "held": held,
        "sent": sent,
        "groups": [len(g["params"]) for g in loop.replica.optimizer.param_groups],
    }


@functools.cache
def looked_at(name: str, stages: int) -> list[dict[str, Any]]:
    return Local().launch(functools.partial(inside, name, stages), LaunchSpec(workers=stages, threads_per_worker=1))


def test_each_stage_begins_with_one_workers_parameters() -> None:
    """pytorch#139304: stages that are built from one seed have equal parameters, and others than one process."""
    torch.manual_seed(TASKS["gpt"].seed)
    whole = dict(TASKS["gpt"].model().named_parameters())
    found = looked_at("gpt", 4)
    assert {name for one in found for name in one["held"]} == set(whole)
    for one in found:
        for name, value in one["held"].items():
            assert torch.equal(value, whole[name]), name
    assert sum(len(one["held"]) for one in found) == len(whole) + 1  # the tied one is on two


def test_a_tick_sends_each_cuts_bytes_forward_and_back() -> None:
    """One value of [rows, length, width] float64 crosses each cut: what a block gives."""
    nbytes = BATCH * LENGTH * WIDTH * 8
    pieces = -(-BATCH // MICRO)
    first, second = looked_at("gpt", 2)
    assert first["sent"] == {"forward": {"bytes": nbytes, "messages": pieces}}
    assert second["sent"] == {"back": {"bytes": nbytes, "messages": pieces}}


def test_each_stage_draws_numbers_of_its_own() -> None:
    drawn = [one["drawn"] for one in looked_at("gpt", 4)]
    assert len({tuple(one) for one in drawn}) == 4


def test_an_optimizers_groups_keep_their_number() -> None:
    found = looked_at("gpt", 4)
    assert {len(one["groups"]) for one in found} == {2}
    assert all(sum(one["groups"]) == len(one["held"]) for one in found)


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "given", "strategy", "error", "said"),
    [
        (
            4,
            "stages=3",
            "allreduce",
            BadInput,
            "a replica takes 3 workers, and 4 workers are no whole number of replicas: give 3 or 6",
        ),
        (2, "stages=0", "allreduce", BadInput, "stages must be a whole number of at least 1"),
        (2, "stages=two", "allreduce", BadInput, "stages"),
        (2, "stags=2", "allreduce", BadInput, "stages"),
        (2, "stages=2,schedule=zigzag", "allreduce", BadInput, "1f1b"),
        (2, "stages=2,recompute=all", "allreduce", BadInput, "recompute"),
        (2, "stages=2,micro_batches=0", "allreduce", BadInput, "micro_batches must be"),
        (2, "stages=2,cut=[blocks.1,blocks.2]", "allreduce", BadInput, "begin at 1 cuts, and cut names 2"),
        (2, "fsdp=2", "allreduce", Unsupported, "part 2"),
        (2, "tensor=2", "allreduce", Unsupported, "part 2"),
        (2, "stages=2", "hogwild", Unsupported, "write to one copy"),
        (2, "stages=2", "quorum", Unsupported, "server"),
        (2, "stages=2", "allreduce:overlap=true", Unsupported, "overlap"),
        (2, "stages=2", "diloco:streaming=2", Unsupported, "streaming"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    workers: int, given: str, strategy: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        trained("gpt", workers, given, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("stages=2,cut=[blocks.9]", r"the model has no such module; did you mean blocks\."),
        ("stages=2,cut=[blocks]", "it holds modules and is not called itself"),
        ("stages=3,cut=[blocks.2,blocks.1]", "not in the order of the calls: blocks.1, blocks.2"),
    ],
)
def test_cuts_that_are_none(given: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        trained("gpt", 3 if "stages=3" in given else 2, given)
