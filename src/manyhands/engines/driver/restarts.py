"""Whether a run that cannot go on starts again from its newest checkpoint. Pure: no clock, no process, no file.

1. It starts again at most `most` times, whatever ends it: a worker that is lost, too few workers, the driver's death.
2. After three restarts from the same checkpoint the next failure ends it: it does not get beyond that place.
3. The same exception at the same line a second time is the program's own error. It ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manyhands.units import count

MOST_WITHOUT_CHECKPOINT = 3
"""So many restarts in a row from the same checkpoint."""


@dataclass
class Restarts:
    """The restarts of one run. made: for each, the step from which the run went on, 0 without a checkpoint."""

    most: int
    made: list[int] = field(default_factory=list)
    _errors: set[tuple[str, str]] = field(default_factory=set, init=False)

    @property
    def left(self) -> int:
        return max(0, self.most - len(self.made))

    def refusal(self, step: int, error: tuple[str, str] | None = None) -> str:
        """Why the run does not start again; "" where it does, from this step, and that counts.

        error: (type, "file:line") of the program's exception that ended it.
        """
        if error is not None and error in self._errors:
            return f"{error[0]} at {error[1]} came again after a restart: it follows the program or its rows"
        if not self.left:
            return f"the run has started again {count(len(self.made), 'time')}, and max_restarts is {self.most}"
        if self.made[-MOST_WITHOUT_CHECKPOINT:] == [step] * MOST_WITHOUT_CHECKPOINT:
            return (
                f"the run has started again {MOST_WITHOUT_CHECKPOINT} times from step {step:,} without a checkpoint in "
                "between"
            )
        if error is not None:
            self._errors.add(error)
        self.made.append(step)
        return ""

    def text(self) -> str:
        """`restart 1 of 3 from step 800`, of the newest one."""
        return f"restart {len(self.made)} of {self.most} from step {self.made[-1]:,}"
