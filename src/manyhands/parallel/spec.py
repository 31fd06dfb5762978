"""How one replica spans several workers, as users write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manyhands import spec
from manyhands.errors import BadInput, Unsupported, is_whole
from manyhands.parallel.schedules import SCHEDULES, Schedule


@dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """One replica on several workers. A run has `workers / stages` replicas; a strategy acts between them.

    `str()` gives what `of` reads. Raises BadInput where a value makes no sense.
    """

    stages: int = 1
    """Into how many spans the model's program is cut, each of which a worker computes. More stages leave each worker
    less memory to hold, and make a step longer where one machine's cores are shared."""

    fsdp: int = 1
    """Workers that hold slices of each parameter. Not built yet."""

    tensor: int = 1
    """Workers that compute a part of each layer. Not built yet."""

    cut: str = "auto"
    """The modules at which stages begin: [blocks.4,blocks.8]. auto: so that stages have about equally many parameters."""

    micro_batches: int | None = None
    """Into how many parts a replica's rows are cut, at most one a row. More of them leave stages less time to wait, and
    cost each a little. None: by the task's micro_batch_size, else twice as many as stages."""

    schedule: Schedule = "1f1b"
    """In which order a stage goes forward and back: 1f1b holds as many micro-batches as there are stages behind, gpipe
    all of them."""

    recompute: Literal["none", "units"] = "none"
    """units: a stage holds what crosses its possible cuts alone, and computes the rest again in backward: less memory for
    each micro-batch, and about a third more to compute."""

    offload: Literal["none", "host", "disk"] = "none"
    """disk: the optimizer's state lies in a file, of which one parameter's part is in memory at a time; steps take longer.
    host: for the memory of GPUs, not built yet."""

    def __post_init__(self) -> None:
        for name in ("stages", "fsdp", "tensor"):
            if not is_whole(getattr(self, name)):
                raise BadInput(
                    f"model_parallel: {name} must be a whole number of at least 1; got {getattr(self, name)!r}: write {name}=2"
                )
        if self.fsdp > 1 or self.tensor > 1:
            name = "fsdp" if self.fsdp > 1 else "tensor"
            raise Unsupported(
                f"model_parallel: {name} comes in part 2 of model parallelism and is not built yet: use stages, or leave it out"
            )
        if self.micro_batches is not None and not is_whole(self.micro_batches):
            raise BadInput(
                f"model_parallel: micro_batches must be a whole number of at least 1; got {self.micro_batches!r}: write micro_batches=4"
            )
        if self.schedule not in SCHEDULES:
            raise BadInput(f"model_parallel: schedule must be {' or '.join(SCHEDULES)}; got {self.schedule!r}")
        if self.recompute not in ("none", "units"):
            raise BadInput(f"model_parallel: recompute must be none or units; got {self.recompute!r}")
        if self.offload not in ("none", "host", "disk"):
            raise BadInput(f"model_parallel: offload must be none or disk; got {self.offload!r}")
        if self.offload == "host":
            raise Unsupported(
                "model_parallel: offload=host is for the memory of GPUs and is not built yet: use offload=disk, or leave it out"
            )
        if self.cuts is not None and len(self.cuts) != self.stages - 1:
            raise BadInput(
                f"model_parallel: stages={self.stages} begin at {self.stages - 1} cuts, and cut names {len(self.cuts)}: name one for each stage but the first, "
                "cut=[blocks.4,blocks.8]"
            )

    @property
    def cuts(self) -> list[str] | None:
        """The names in `cut`; None: auto."""
        return (
            None if self.cut == "auto" else [name for part in self.cut.strip("[]").split(",") if (name := part.strip())]
        )

    @classmethod
    def of(cls, given: str | ModelParallel | None) -> ModelParallel | None:
        """The option as it is given: `stages=2,micro_batches=8`, or what this made. "" and None: None, a worker holds a
        replica. Raises BadInput or UnknownName."""
        return spec.option_of(ModelParallel, given, "model_parallel", "stages=2")

    def __str__(self) -> str:
        """The options that differ from their defaults; `stages=1` where none does, because "" reads as None."""
        return spec.to_spec(self, "model_parallel").partition(":")[2] or "stages=1"

    @property
    def workers(self) -> int:
        """Of a replica."""
        return self.stages * self.fsdp * self.tensor

    def check(self, workers: int) -> None:
        """BadInput for a number of workers that is no whole number of replicas."""
        if workers % self.workers:
            fewer, more = workers // self.workers * self.workers, (workers // self.workers + 1) * self.workers
            raise BadInput(
                f"model_parallel: a replica takes {self.workers} workers, and {workers} workers are no whole number of replicas: "
                f"give {f'{fewer} or {more}' if fewer else more} workers"
            )
