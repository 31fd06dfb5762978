"""The command: what it passes on, what it prints, what it ends with."""

import dataclasses
import importlib
import pydoc
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command_line import command, faked_train, invoke, refused

import manyhands as mh
from manyhands import errors, spec
from manyhands.checkpoint.paths import RemotePath
from manyhands.cli import commands, options
from manyhands.engines import engine_of
from manyhands.engines.hosts import join


def test_help_and_version_do_not_need_torch() -> None:
    assert "manyhands train digits --workers 2" in invoke("train", "--help").stdout
    for name in ("predict", "evaluate"):
        shown = invoke(name, "--help").stdout
        assert f"manyhands {name} runs/mine" in shown
        assert "75 asked to end" in shown
    found = command("--help", options=("-X", "importtime"))
    assert not re.search(r"\| +(torch|numpy)$", found.stderr, re.MULTILINE)
    for word in ("train", "run", "replay", "join", "strategies", "tasks", "engines", "--version", "75 preempted"):
        assert word in found.stdout
    line = rf"manyhands {mh.__version__}, Python 3\.\S+, torch \S+\n"
    assert re.fullmatch(line, invoke("--version").stdout)
    run = subprocess.run([sys.executable, "-m", "manyhands", "--help"], capture_output=True, text=True, timeout=60)
    assert "manyhands" in run.stdout


def test_options_arrive_and_without_them_the_tasks_own_fields_stand(asked: dict[str, Any], tmp_path: Path) -> None:
    done = invoke("train", "digits:epochs=5")
    assert done.exit_code == 0, done.output
    assert done.stdout == "the summary\n"
    named = [asked[name] for name in ("task", "strategy", "engine", "workers")]
    assert named == ["digits:epochs=5", None, "auto", None]  # train() chooses the strategy
    assert not asked.keys() & {*options.TASK_FIELDS, "shuffle"}
    assert re.fullmatch(r"runs/digits-\d{8}-\d{6}-\d+", str(asked["run_dir"]))
    assert [type(callback).__name__ for callback in asked["callbacks"]] == ["Progress"]
    done = invoke("train", "digits", "--run-dir", "memory://bucket/run", "--log", "json")
    assert (done.stdout, done.stderr) == ("", "the summary\n")  # JSON has standard output for itself
    assert asked["run_dir"] == RemotePath("memory://bucket/run")
    asked.clear()
    texts = {"strategy": "local-sgd:period=8", "engine": "local", "device": "cpu", "precision": "bf16-mixed"}
    texts |= {"keep": "best:validation_loss", "nonfinite": "skip", "partition": "fixed", "model_parallel": "auto"}
    texts |= {"memory_per_worker": "2GB"}
    numbers = {"workers": 2, "servers": 3, "threads_per_worker": 1, "max_seconds": 60.0, "epochs": 3, "max_steps": 99}
    numbers |= {"batch_size_per_worker": 16, "micro_batch_size": 8, "seed": 7, "clip_norm": 1.5, "loader_processes": 2}
    numbers |= {"validate_every": 50, "checkpoint_every": 25, "check_replicas_every": 5}
    words = [word for name, value in (texts | numbers).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--timeout", "9", "--no-shuffle", "--resume", "--early-stopping", "validation_accuracy:5"]
    words += ["--log", "quiet", "--run-dir", str(tmp_path), "--tensorboard", str(tmp_path / "tb")]
    done = invoke("train", "my.py:task", *words)
    assert done.exit_code == 0, done.output
    callbacks = asked.pop("callbacks")
    others = {"task": "my.py:task", "survive": None, "timeout_s": 9.0, "shuffle": False, "resume": True}
    assert asked == texts | numbers | others | {"run_dir": tmp_path}
    assert [type(callback).__name__ for callback in callbacks] == ["Progress", "EarlyStopping", "TensorBoard"]
    assert (callbacks[1].metric, callbacks[1].patience) == ("validation_accuracy", 5)


def test_an_error_is_one_message_and_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in (
        (errors.BadInput("say it better"), 2),
        (errors.UnknownName("say it better"), 2),
        (errors.WorkerFailed("say it better", rank=1, host="h", phase="compute", step=3), 1),
        (errors.Preempted("say it better"), 75),
    ):
        faked_train(monkeypatch, error)
        done = invoke("train", "digits")
        assert (done.exit_code, done.stderr, done.stdout) == (code, "manyhands: say it better\n", "")
        done = invoke("train", "digits", "--debug")
        assert done.exit_code == code
        assert done.stderr.startswith("Traceback")
    faked_train(monkeypatch, KeyboardInterrupt())
    done = invoke("train", "digits")
    assert (done.exit_code, done.stderr) == (130, "manyhands: interrupted\n")
    faked_train(monkeypatch, ZeroDivisionError())  # a bug keeps its traceback
    done = invoke("train", "digits")
    assert done.exit_code == 1
    assert isinstance(done.exception, ZeroDivisionError)


def test_bad_input_ends_with_2_and_says_what_was_expected() -> None:
    for says, *words in (
        ("auto, json, quiet", "train", "digits", "--log", "loud"),
        ("METRIC:PATIENCE", "train", "digits", "--early-stopping", "loss:soon"),
        ("METRIC:PATIENCE", "train", "digits", "--early-stopping", f"loss:{'9' * 5000}"),
        ("validate_every must be", "train", "digits", "--validate-every", "-5"),
        ("checkpoint_every must be", "train", "digits", "--checkpoint-every", "²"),
        ("--workers must be whole numbers", "compare", "digits", "--workers", "1,²"),
        ("--roles must list each role once", "run", "--roles", f"ps={'9' * 5000}", "script.py"),
        ("timeout_s must be", "run", "--timeout", "nan", __file__),
        ("wait_s must be", "join", "127.0.0.1:7000", "--workers", "1", "--wait", "inf"),
        ("--workers", "train", "digits", "--wrokers", "2"),
        ("manyhands train digits", "train"),
        ("Missing argument", "compare"),
        ("trian", "trian"),
        ("did you mean", "tasks", "digit"),
        ("nosuch:// is not a known file system", "train", "digits", "--run-dir", "nosuch://bucket/run"),
        ("engine local has no option 'listen'", "train", "digits", "--engine", "local", "--listen", "10.0.0.1"),
        ("", "join", "10.0.0.1", "--workers", "2"),
    ):
        refused(says, *words)


def test_what_follows_the_script_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run_script(path: Path, args: list[str], **options: Any) -> int:
        seen.update(options, path=path, args=args)
        return 3

    monkeypatch.setattr("manyhands.own_loop.launch.run_script", run_script)
    monkeypatch.setattr(commands, "_started", lambda engine, workers: nullcontext(engine))
    done = invoke(
        *("run", "-n", "4", "--strategy", "local-sgd:period=8", "--servers", "2"),
        *("train.py", "--workers", "9", "-x", "--help", "--", "y"),
    )
    assert done.exit_code == 3, done.output
    assert seen.pop("args") == ["--workers", "9", "-x", "--help", "--", "y"]
    given = {"path": Path("train.py"), "workers": 4, "strategy": "local-sgd:period=8", "servers": 2}
    defaults = {"engine": "local", "timeout_s": 300.0, "replaces_gloo": False, "max_restarts": 0}
    nothing = dict.fromkeys(("threads_per_worker", "roles", "tensorboard", "around", "batches"))
    assert seen == given | defaults | nothing


def test_each_entry_is_listed_and_each_option_of_it_explained() -> None:
    strategies, tasks, engines = (invoke(name) for name in ("strategies", "tasks", "engines"))
    for word in ("allreduce", "local-sgd", "period=8 (int | end)", "overlap=false (bool)", "Stich, 2019"):
        assert word in strategies.stdout
    assert re.search("digits.*chars", tasks.stdout, re.DOTALL)
    for word in ("local", "torchrun", "listen=127.0.0.1 (str)", "wait_s=600.0 (float)", "--engine hosts:"):
        assert word in engines.stdout
    assert ".py" not in engines.stdout
    for kind in ("strategies", "engines"):
        catalogue = importlib.import_module(f"manyhands.{kind}").CATALOGUE
        for name in catalogue:
            maker = spec.find(name, catalogue, kind)
            docs = spec.field_docs(maker)
            shown = invoke(kind, name).stdout
            for option in spec.options_of(maker):
                assert re.search(rf"^  {option}=", shown, re.MULTILINE), (name, option)
                assert docs[option].split()[0] in shown, (name, option)
    shown = invoke("tasks", "digits").stdout  # with the task's own values
    assert re.search(r"batch_size=32 .*\n +GLOBAL rows a step", shown)
    assert "optimizer=" not in shown  # no text can say it


def test_a_run_directory_is_named_after_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"digits:epochs=5": "digits-", "sub/my.py:task:width=3": "my-task-", "": "task-"}
    for task, start in names.items():
        assert re.fullmatch(start + r"\d{8}-\d{6}-\d+", options.stamped("", task).name), task
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a/b c")  # torchrun's processes agree on a directory
    assert options.stamped("", "digits") == Path("runs/digits-a-b-c")


def test_several_local_workers_get_their_server_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("prestart", "close"):
        patched = f"manyhands.engines.local.engine.Local.{name}"
        monkeypatch.setattr(patched, lambda self, name=name: done.append(name) or self)

    def fail() -> None:
        with commands._started("auto", 2) as engine:
            assert (type(engine).__name__, done) == ("Local", ["prestart"])
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert done == ["prestart", "close"]
    cases = ("auto", 1, "Local", ["close"]), ("auto", None, "Local", ["close"]), ("sim", 2, "Sim", [])
    for engine, workers, kind, happened in cases:
        done.clear()
        with commands._started(engine, workers) as place:
            assert type(place).__name__ == kind
        assert done == happened, engine


def test_options_of_engine_hosts_are_fields_of_its_spec_and_join_offers_its_own(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--listen 10.0.0.1 --local-workers 1 --ports 7000-7100 --no-tls --plain-network --wait 9"
    invoke("train", "digits", "-n", "2", *options.split())
    wanted = mh.Hosts(listen="10.0.0.1", local_workers=1, ports="7000-7100", wait_s=9.0, tls=False, plain_network=True)
    assert engine_of(asked["engine"]) == wanted
    invoke("train", "digits", "--engine", "hosts:local_workers=1", "--listen", "10.0.0.1")
    assert engine_of(asked["engine"]) == mh.Hosts(listen="10.0.0.1", local_workers=1)
    offers: list[Any] = []
    monkeypatch.setattr(join, "join", lambda offer, say: offers.append(offer))
    options = "--workers 2 --listen 10.0.0.2 --ports 7000-7100 --wait 9"
    done = invoke("join", "10.0.0.1:7000", *options.split())
    assert done.exit_code == 0, done.output
    assert offers == [join.Join(address="10.0.0.1:7000", workers=2, listen="10.0.0.2", ports="7000-7100", wait_s=9.0)]


def test_roles_of_another_frameworks_cluster_and_ways_to_run_that_cannot_be() -> None:
    for roles, workers, until, counts, awaited in (
        ("worker=2", None, None, {"worker": 2}, {0, 1}),
        ("ps=1, chief=1", 2, None, {"chief": 1, "worker": 2, "ps": 1}, {0, 1, 2}),
        ("chief=1,ps=2", None, "chief", {"chief": 1, "worker": 1, "ps": 2}, {0}),
        ("evaluator=1,worker=1", None, "worker,evaluator", {"worker": 1, "evaluator": 1}, {0, 1}),
    ):
        cast = options.cast_of(roles, workers, until, None)
        assert (cast.counts, cast.awaited) == (counts, awaited), roles
    for words, says in (
        (["--roles", "ps"], "such as chief=1,worker=2,ps=1; not 'ps'"),
        (["--roles", "ps=1,ps=2"], "each role once"),
        (["--roles", "worker=2", "-n", "2"], "--workers 2 and --roles worker=2 both give"),
        (["--roles", "boss=1"], "no role 'boss'; choose from chief, ps, evaluator"),
        (["--as", "distributed", "--roles", "worker=2"], "both say whose program this is"),
        (["--as", "a-loop"], "--as must be one of loop, keras, distributed"),
        (["--auto", "--roles", "worker=2"], "leave one of them out"),
        (["--auto", "--engine", "hosts", "-s", "diloco"], "shares slices of batches on engine local"),
        (["--verify", "3"], "add --auto"),
        (["--share-gpu"], "add --auto"),
        (["--auto", "--verify", "0"], "at least 1, not 0"),
        (["--auto", "--verify", "3", "--own-batches"], "N times as large"),
        (["--auto", "--verify", "3", "--strategy", "local-sgd"], "not meant to be equal"),
        (["--as", "distributed", "--verify", "3"], "leave it out, or give --as loop"),
        (["--as", "distributed", "--servers", "1"], "averages for itself: leave --strategy and --servers out"),
        (["--until", "chief"], "add --roles worker=2"),
        (["--auto", "--batches", "whole", "-s", "downpour"], "each worker's model is its own"),
        (["--batches", "some"], "batches must be whole or slices"),
        (["--auto", "--own-batches", "--batches", "whole"], "leave one of them out"),
        (["--auto", "--read", "columns"], "--read must be rows or whole, not 'columns'"),
        (["--auto", "--read", "rows", "--batches", "slices"], "of slices each worker reads its rows"),
    ):
        refused(says, "run", *words, "script.py")


# -- what an option means ----------------------------------------------------------------------------------------------


def test_help_shows_what_each_field_means() -> None:
    for kind in (mh.Task, mh.Run, mh.EarlyStopping, mh.LocalSGD, mh.Hosts):
        docs = spec.field_docs(kind)
        text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
        assert docs
        assert all(f"{name}:" in text and doc.splitlines()[0] in text for name, doc in docs.items())
    undocumented = {field.name for field in dataclasses.fields(mh.Task)} - spec.field_docs(mh.Task).keys()
    assert not undocumented


# -- what a run survives -----------------------------------------------------------------------------------------------


def test_what_a_run_survives_reaches_train(asked: dict[str, Any]) -> None:
    for words, workers, survive in (
        (["-n", "4"], 4, None),
        (["-n", "2:4"], 4, mh.Survive(max_losses="any", min_workers=2, max_workers=4)),
        (["-n", "1:1"], 1, mh.Survive(max_losses="any", max_workers=1)),
        (["-n", "4", "--max-losses", "3"], 4, mh.Survive(max_losses=3)),
        (["-n", "2:4", "--max-losses", "3"], 4, mh.Survive(max_losses=3, min_workers=2, max_workers=4)),
        (["-n", "4", "--survive", "max_losses=1,replace=false"], 4, mh.Survive(max_losses=1, replace=False)),
        (["-n", "4", "--survive", "max_losses=1", "--max-losses", "2"], 4, mh.Survive(max_losses=2)),
        (["--max-restarts", "2", "--copies", "2"], None, mh.Survive(max_restarts=2, copies=2)),
    ):
        assert invoke("train", "digits", *words).exit_code == 0
        assert (asked["workers"], asked["survive"]) == (workers, survive), words


def test_what_no_run_can_survive_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for words, named in (
        (["-n", "4:2"], "4:2"),
        (["-n", "0:4"], "0:4"),
        (["-n", "2:4:6"], "2:4:6"),
        (["-n", "many"], "many"),
        (["-n", "2", "--max-losses", "-1"], "max_losses"),
        (["-n", "2", "--max-losses", "1.5"], "max_losses"),
        (["-n", "4", "--survive", "min_workers=5"], "min_workers=5"),
        (["-n", "4", "--survive", "max_workers=80", "--batch-size", "64"], "batch_size"),
        (["-n", "2", "--copies", "2"], "copies=2"),
        (["-n", "2", "--copies", "3"], "copies"),
        (["-n", "2", "--survive", "copies=2,max_workers=4", "-s", "downpour"], "max_workers"),
        (["-n", "2", "--copies", "2", "-s", "downpour", "--engine", "local:faults=leave=1@step:1"], "leave=1@step:1"),
        (["-n", "2", "--copies", "2", "-s", "downpour", "--engine", "local:faults=kill=backup1@1s"], "shard 1"),
        (["-n", "2", "-s", "downpour", "--engine", "local:faults=kill=backup0@1s"], "copies=2"),
        (["-n", "2", "--max-losses", "1", "-s", "ensemble"], "ensemble"),
        (["-n", "1", "--max-losses", "1", "-s", "solo"], "solo"),
        (["-n", "2", "--max-losses", "1", "-s", "local-sgd:period=end"], "local-sgd"),
        (["-n", "2", "--survive", "max_losses=1,max_workers=3", "-s", "gossip:graph=pairs"], "max_workers=3"),
        (["-n", "2", "--max-losses", "1", "-s", "hogwild", "--engine", "hosts"], "hogwild"),
        (["-n", "2", "--max-losses", "1", "--engine", "torchrun"], "torchrun"),
        (["-n", "2", "--max-losses", "1", "--engine", "spark"], "spark"),
        (["-n", "2", "--survive", "silence_s=0"], "silence_s"),
        (["-n", "2", "--max-losses", "1", "--engine", "local:faults=kill=2@step:1"], "worker 2"),
        (["-n", "2", "--engine", "local:faults=leave=1@step:1"], "survive"),
        (["-n", "2", "--max-losses", "1", "--engine", "local:faults=kill=shard0@1s"], "shard 0"),
        (["-n", "2", "--survive", "max_loss=1"], "max_losses"),
        (["-n", "2", "--survive", "max_losses=1,slow=0.5"], "slow"),
    ):
        refused(named, "train", "digits", *words, "--run-dir", str(tmp_path / "run"))
        assert not (tmp_path / "run").exists()
