"""Kernels under torchrun: the same bits as on engine local, and every rank gets the tables."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from test_torchrun_integration import torchrun

PROGRAM = """
    import hashlib, json, os, sys
    import numpy as np
    import manyhands as mh
    from manyhands.kernels import Factors

    def digest(strategy, **options):
        random = np.random.default_rng(0)
        users, items = random.integers(0, 50, 2000), random.integers(0, 40, 2000)
        data = {"users": users, "items": items, "ratings": random.normal(size=2000) + users % 3}
        run = mh.train(kernel=Factors(users=50, items=40, rank=4), rate=0.1, train_data=data, validation_data=data,
                       batch_size=200, epochs=2, strategy=strategy, **options)
        tables = b"".join(table.tobytes() for table in run.model.tables().values())
        return [hashlib.sha256(tables).hexdigest(), run.metrics, run.rows["total"]]

    strategies = ["rotate:blocks=4", "local-sgd:period=3", "hogwild"]
    found = {strategy: digest(strategy) for strategy in strategies}
    with open("rank" + os.environ.get("RANK", "none") + ".json", "w") as file:
        json.dump(found, file)
"""


@pytest.mark.slow
def test_every_rank_gets_the_tables_of_engine_local(tmp_path: Path) -> None:
    done = torchrun(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert all(total == 4000 for _, _, total in first.values())
    scope: dict[str, object] = {"__name__": "here"}
    code = PROGRAM[: PROGRAM.index("    strategies =")]
    exec(textwrap.dedent(code), scope)
    for strategy in ("rotate:blocks=4", "local-sgd:period=3"):
        assert scope["digest"](strategy, engine="local", workers=2) == first[strategy]  # type: ignore[operator]
