"""Advice: pure rules over what was measured, each with its number and its source; docs/advice.md has the table.

About one run: run_advice.py, exchange_advice.py. About several strategies that trained the same task: comparison_advice.py,
worse_metric.py.
"""

from __future__ import annotations

from manyhands.evidence.advise.comparison_advice import advise_comparison, largest_loss
from manyhands.evidence.advise.comparison_facts import VARIES, Compared, Contestant, Decision, Ratio
from manyhands.evidence.advise.run_advice import advise, all_advice
from manyhands.evidence.advise.run_facts import Advice, Machine, RunMeasurements, of_task

__all__ = [
    "VARIES",
    "Advice",
    "Compared",
    "Contestant",
    "Decision",
    "Machine",
    "Ratio",
    "RunMeasurements",
    "advise",
    "advise_comparison",
    "all_advice",
    "largest_loss",
    "of_task",
]
