"""tasks/__init__.py: tasks by name, loaded when they are asked for."""

import subprocess
import sys

import pytest

from manyhands import spec, tasks
from manyhands.task import Task

FILES = {
    "linear": "1 1:1\n0 2:1\n",
    "fm": "1 1:1\n0 2:1\n",
    "ffm": "1 0:1:1\n0 0:2:1\n",
    "factors": "users,items,ratings\n0,0,1\n",
    "glove": "word " * 9,
    "kmeans": "x,y\n1,2\n3,4\n",
    "cuts": "nodes,others,weights\n0,1,1\n1,2,1\n",
    "word2vec": "word " * 9,
}
"""What tasks that need a path read."""


def test_each_name_makes_a_task_of_that_name_with_options_from_text(tmp_path):
    (tmp_path / "known.csv").write_text("nodes,classes\n0,0\n2,1\n")
    needed = {"kmeans": {"clusters": "1"}, "cuts": {"known_path": str(tmp_path / "known.csv")}}
    for name in tasks.CATALOGUE:
        options = {"batch_size": "32", "epochs": "5", **needed.get(name, {})}
        if name in FILES:
            (tmp_path / f"{name}.csv").write_text(FILES[name])
            options["path"] = str(tmp_path / f"{name}.csv")
        maker = spec.find(name, tasks.CATALOGUE, "task")
        task = spec.make(maker, options, f"task {name}")
        assert isinstance(task, Task)
        assert (task.name, task.batch_size, task.epochs) == (name, 32, 5)
        assert getattr(tasks, name) is maker
        assert getattr(tasks, name) is maker  # a second time: no submodule has taken its place
        assert tasks.SUMMARIES[name]


def test_an_unknown_task_is_named_and_listing_tasks_loads_no_torch():
    with pytest.raises(AttributeError, match="digits, chars"):
        _ = tasks.mnist
    code = "import sys; from manyhands import tasks; assert set(tasks.CATALOGUE) <= set(dir(tasks)); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
