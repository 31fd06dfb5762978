"""What a call may do beside computing its rows: it is cut where that is one process's, and computed whole where not."""

import re

import pytest
from observing import Program, Ran, alone, on_workers

CUT = "each of 2 workers computes its rows of a call"
KINDS: dict[str, str] = {
    "hook": "it keeps something from call to call (seen)",
    "later_hook": "it keeps something from call to call (seen)",
    "kept": "it keeps something from call to call (seen)",
    "says": "it prints something of all rows",
    "gradient_hook": "a hook of the script sees gradients in it",
    "moving": "it keeps something from call to call (a parameter)",
    "attribute": "its rows depend on each other",
    "variable": "its rows depend on each other",
    "argument": "its rows depend on each other",
    "layer": "its rows depend on each other",
    "inner_mode": "its rows depend on each other",
    "gate": "its rows depend on each other",
    "counted": "its attributes or whole numbers among its arguments are others in each call",
    "tables": CUT,
    "longest": CUT,
    "penalty": "an output is the same for fewer rows, and follows from them",
    "checkpointed": CUT,
    "looked_at": CUT,
    "in_use": CUT,
    "held": CUT,
    "inner_norm": CUT,
    "straight": CUT,
    "normed": "its rows depend on each other in a backward of the script's own",
    "hooked": "its rows depend on each other in a backward of the script's own",
    "scripted": "its buffers depend on all rows",
    "traced": CUT,
    "compiled": CUT,
    "for_each_row": "",
    "dataclasses": CUT,
    "own_collate": CUT,
    "drops_rows": "its collate_fn does not put every batch together row by row",
    "own_sampler": CUT,
    "turning": "its dataset or its collate_fn changes while it is read",
}
"""{a loop: what is said of it}"""
READ_BY_ROWS = {
    "own_collate": "",
    "drops_rows": r"BadInput: calls.py, line .*--read rows .* its collate_fn does not put",
}
WITHIN = 1e-10
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("observed calls"), pytest.mark.timeout(400)]
pytestmark.append(pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"))
Runs = tuple[dict[str, Ran], dict[str, Ran]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """On two workers, and alone."""
    root, programs = tmp_path_factory.mktemp("calls"), [Program("calls", (name,)) for name in KINDS]
    rows = [Program("calls", (name,), read="rows") for name in READ_BY_ROWS]
    several, one = on_workers(2, [*programs, *rows], root / "workers"), alone(programs, root / "alone")
    names = *KINDS, *(f"{name} by rows" for name in READ_BY_ROWS)
    return dict(zip(names, several, strict=True)), dict(zip(KINDS, one, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_one_process(kind: str, runs: Runs) -> None:
    ran, expected = (found[kind] for found in runs)
    assert (ran.error, expected.error) == ("", "")
    assert KINDS[kind] in ran.said
    assert "every worker reads all rows" not in ran.said or kind in ("drops_rows", "turning")
    if KINDS[kind] == CUT:
        assert "computed whole" not in ran.said
    assert ran.output.count("\n") == expected.output.count("\n")
    assert ran.dump["printed"] == pytest.approx(expected.dump["printed"], abs=1e-9)
    for own, theirs in zip(ran.parameters, expected.parameters, strict=True):
        assert (own - theirs).abs().max() < WITHIN


def test_reading_by_rows_on_demand(runs: Runs) -> None:
    for name, error in READ_BY_ROWS.items():
        assert re.match(error or "$", runs[0][f"{name} by rows"].error), name
