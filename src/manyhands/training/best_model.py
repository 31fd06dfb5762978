"""Which parameters a run returns: the last, or the best by a validation metric (`mh.train`'s `keep`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from manyhands.errors import BadInput
from manyhands.replica.evaluation import higher_is_better
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.replica import Replica


@dataclass(frozen=True)
class BestModelPolicy:
    """`last`, or `best:METRIC` (highest accuracy, auc, …, lowest loss, error, …); `best:max:METRIC`, `best:min:METRIC`."""

    metric: str = ""  # "": keep the last
    higher: bool = False

    @classmethod
    def parse(cls, text: str) -> BestModelPolicy:
        """Raises BadInput for anything but the forms above, and where METRIC does not say which way is better."""
        if text == "last":
            return cls()
        if not isinstance(text, str):
            raise BadInput(f'keep must be "last" or "best:METRIC", not {text!r}')
        kind, _, metric = text.partition(":")
        mode, colon, rest = metric.partition(":")
        if kind != "best" or not metric or (colon and mode not in ("max", "min")):
            raise BadInput(f'keep must be "last", "best:METRIC", "best:max:METRIC" or "best:min:METRIC", not {text!r}')
        name = rest if colon else metric
        higher = mode == "max" if colon else higher_is_better(name)
        if higher is None:
            raise BadInput(
                f"keep: the name {name!r} does not tell whether a higher or a lower value is better: write "
                f"best:max:{name} or best:min:{name}"
            )
        return cls(metric=name, higher=higher)


KEEP_LAST = BestModelPolicy()


@dataclass
class BestModel:
    """The newest validation, and a copy of the best model so far where the policy asks for it."""

    policy: BestModelPolicy
    newest: dict[str, float] = field(default_factory=dict)  # metrics of the newest validation
    metrics: dict[str, float] = field(default_factory=dict)  # those of the best
    at: dict[str, int] = field(default_factory=dict)  # {"epoch", "step"} that were done when the best was validated
    parameters: FlatVector | None = None  # of the best, None before the first
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def offer(
        self, metrics: dict[str, float], parameters: FlatVector, buffers: dict[str, Tensor], at: dict[str, int]
    ) -> bool:
        """See a validation; whether it is the best so far (then a copy of it is kept). The same on all ranks."""
        self.newest = metrics
        name, higher = self.policy.metric, self.policy.higher
        if not name:
            return False
        if name not in metrics:
            raise BadInput(f"keep: validation reports no metric {name!r}: give one of {', '.join(metrics)}")
        best, value = self.metrics.get(name), metrics[name]
        better = value == value and (best is None or best != best or (value > best if higher else value < best))
        if better or self.parameters is None:
            self.metrics, self.parameters, self.buffers, self.at = dict(metrics), parameters.clone(), buffers, at
        return better

    def capture(self, replica: Replica) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON values for a checkpoint."""
        tensors = (
            {}
            if self.parameters is None
            else {f"best/{name}": view for name, view in replica.named(self.parameters).items()}
        )
        tensors |= {f"best_buffers/{name}": buffer for name, buffer in self.buffers.items()}
        return tensors, {"newest": self.newest, "metrics": self.metrics, "at": self.at}

    def restore(self, replica: Replica, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """What `capture` gave, back."""
        self.newest, self.metrics, self.at = values["newest"], values["metrics"], values.get("at", {})
        saved = {name.removeprefix("best/"): tensor for name, tensor in tensors.items() if name.startswith("best/")}
        if saved and self.policy.metric:
            self.parameters = replica.parameters.zeros_like()
            for name, view in replica.named(self.parameters).items():
                view.copy_(saved[name])
            self.buffers = {
                n.removeprefix("best_buffers/"): t for n, t in tensors.items() if n.startswith("best_buffers/")
            }
