"""The tables of slow_links.py, and its goals: what came of the jobs, by strategy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from slow_links_workers import DDP

ALONE = "alone"  # all compute, nobody exchanges
WARM_UP, AFTER = 2, 1  # steps before and behind those that count; the last one takes what closing the run costs
COUNTED = slice(WARM_UP, -AFTER)
COMPUTE_GOAL_S, SPEED_GOAL, LIMIT_GOAL, LOSS_GOAL, PREDICTED_GOAL = 0.3, 5.0, 0.85, 0.03, 0.25

Row = dict[str, Any]  # a strategy's


# -- the numbers -----------------------------------------------------------------------------------------------------


def add_rates(table: dict[str, Row], found: list[dict[str, Any]], batch_size: int, bits_per_s: float) -> None:
    """Medians over blocks; those in comparison with DDP are medians of the blocks' own ratios."""
    by_block = {(job["name"], job["block"]): counted(job) for job in found if "refused" not in job}
    refused = {job["name"]: job["refused"] for job in found if "refused" in job}
    for name, row in table.items():
        mine = {block: value for (other, block), value in by_block.items() if other == name}
        if not mine:
            row["refused"] = refused.get(name, "not run")
            continue
        rates = {block: batch_size / value["seconds"] for block, value in mine.items()}
        row |= {
            key: statistics.median(value[key] for value in mine.values()) for key in ("seconds", "compute_s", "bytes")
        }
        row |= {"rows_per_s": statistics.median(rates.values()), "parameters": next(iter(mine.values()))["parameters"]}
        row |= {"lowest": min(rates.values()), "highest": max(rates.values())}
        row["over_ddp"] = statistics.median(by_block[DDP, block]["seconds"] / v["seconds"] for block, v in mine.items())
        sent_s = row["bytes"] * 8 / bits_per_s
        limits = {block: by_block[ALONE, block]["seconds"] + sent_s for block in mine}
        row["limit"] = batch_size / statistics.median(limits.values())
        row["of_limit"] = statistics.median(limits[block] / value["seconds"] for block, value in mine.items())


def counted(job: dict[str, Any]) -> dict[str, float]:
    """Means a step, over those that count; without an own number for compute (DDP overlaps it) that of the whole step."""
    columns = {key: job.get(key, job["seconds"])[COUNTED] for key in ("seconds", "compute_s", "bytes")}
    return {key: statistics.fmean(values) for key, values in columns.items()} | {"parameters": job["parameters"]}


def add_predictions(table: dict[str, Row], found: list[dict[str, Any]], batch_size: int) -> None:
    for job in found:
        if "seconds" in job:
            table[job["name"]]["predicted"] = batch_size / statistics.fmean(job["seconds"][COUNTED])


def add_losses(table: dict[str, Row], found: list[dict[str, Any]]) -> None:
    tested = {job["name"]: job for job in found}
    for name, row in table.items():
        job = tested.get(name, {})
        row |= {key: job[key] for key in ("test_loss", "refused", "parameters") if key in job}
        if "test_loss" in job and "test_loss" in tested.get(DDP, {}):
            row["worse_than_ddp"] = job["test_loss"] / tested[DDP]["test_loss"] - 1


# -- what is shown ---------------------------------------------------------------------------------------------------


def show(table: dict[str, Row], batch_size: int, loss_steps: int) -> None:
    parameters = next((row["parameters"] for row in table.values() if "parameters" in row), 0)
    print(f"\n{parameters:,} parameters, {batch_size} rows a step; losses after {loss_steps} steps\n")
    columns: dict[str, Callable[[Row], str]] = {
        "rows/s": lambda row: _number(row, "rows_per_s", ".2f"),
        "lowest to highest": lambda row: f"{row['lowest']:.2f} to {row['highest']:.2f}" if "lowest" in row else "–",
        "over DDP": lambda row: _number(row, "over_ddp", ".2f"),
        "KB a step": lambda row: f"{row['bytes'] / 1000:,.0f}" if "bytes" in row else "–",
        "limit, rows/s": lambda row: _number(row, "limit", ".2f"),
        "reached": lambda row: _number(row, "of_limit", ".1%"),
        "predicted, rows/s": lambda row: _number(row, "predicted", ".2f"),
        "test loss": lambda row: _number(row, "test_loss", ".4f"),
        "worse than DDP": lambda row: _number(row, "worse_than_ddp", "+.2%"),
    }
    print(f"| strategy | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, row in table.items():
        cells = (
            [row["refused"], *[""] * (len(columns) - 1)]
            if "refused" in row
            else [cell(row) for cell in columns.values()]
        )
        print(f"| `{name}` | {' | '.join(cells)} |")


def _number(row: Row, key: str, form: str) -> str:
    return "–" if row.get(key) is None else format(row[key], form)


def show_same_bits(limited: list[dict[str, Any]], free: list[dict[str, Any]]) -> dict[str, bool]:
    """{strategy: whether the steps that both parts made had the same training losses, bit for bit}"""
    short = {job["name"]: job["losses"] for job in limited if "losses" in job}
    same = {}
    for job in free:
        steps = min(len(job.get("losses", [])), len(short.get(job["name"], [])))
        if steps:
            same[job["name"]] = job["losses"][:steps] == short[job["name"]][:steps]
    print(
        f"\ntraining losses with and without limits, bit for bit the same: {_names(same, True)}; not: {_names(same, False)}"
    )
    return same


def _names(verdicts: dict[str, bool], which: bool) -> str:
    return ", ".join(name for name, verdict in verdicts.items() if verdict is which) or "none"


def show_goals(table: dict[str, Row]) -> dict[str, bool]:
    """{goal: whether it is met}, of those that were measured."""
    goals: dict[str, bool] = {}
    if "seconds" in table[ALONE]:
        goals[f"a step computes in under {COMPUTE_GOAL_S} s ({table[ALONE]['seconds']:.3f})"] = (
            table[ALONE]["seconds"] < COMPUTE_GOAL_S
        )
    for name, row in table.items():
        if not name.startswith("diloco"):
            continue
        if "over_ddp" in row:
            goals[f"{name} has {SPEED_GOAL:.0f} times DDP's rows/s ({row['over_ddp']:.2f})"] = (
                row["over_ddp"] >= SPEED_GOAL
            )
            goals[f"{name} reaches {LIMIT_GOAL:.0%} of the limit ({row['of_limit']:.1%})"] = (
                row["of_limit"] >= LIMIT_GOAL
            )
        if "worse_than_ddp" in row:
            off = row["worse_than_ddp"]
            goals[f"{name}: loss within {LOSS_GOAL:.0%} of DDP's ({off:+.2%})"] = off <= LOSS_GOAL
    for name, row in table.items():
        if "predicted" in row and "rows_per_s" in row:
            off = row["predicted"] / row["rows_per_s"] - 1
            goals[f"{name} predicted within {PREDICTED_GOAL:.0%} ({off:+.0%})"] = abs(off) <= PREDICTED_GOAL
    print()
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'missed'}  {goal}")
    return goals
