"""Settings of torch that hold for a whole process, and that the workers take from the caller's: default dtype, and so on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:  # it imports torch
    from manyhands.worker import Worker

T = TypeVar("T")


@dataclass(frozen=True)
class TorchSettings:
    """What a program may have set before it trains."""

    dtype: Any
    device: str
    deterministic: tuple[bool, bool]  # algorithms, and whether others are a warning only
    matmul_precision: str
    anomaly: tuple[bool, bool]  # detected, and NaN looked for
    cudnn: tuple[bool, bool, bool]  # benchmark, deterministic, allow_tf32

    @classmethod
    def here(cls) -> TorchSettings:
        """This process's."""
        import torch

        cudnn: Any = torch.backends.cudnn
        return cls(
            torch.get_default_dtype(),
            str(torch.get_default_device()),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            torch.get_float32_matmul_precision(),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        )

    def take(self) -> None:
        """They are this process's from now on."""
        import torch

        now = TorchSettings.here()
        if self.dtype != now.dtype:
            torch.set_default_dtype(self.dtype)
        if self.device != now.device:
            torch.set_default_device(self.device)
        if self.deterministic != now.deterministic:
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        if self.matmul_precision != now.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if self.anomaly != now.anomaly:
            torch.autograd.set_detect_anomaly(*self.anomaly)
        if self.cudnn != now.cudnn:
            cudnn: Any = torch.backends.cudnn
            cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = self.cudnn

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within, they are this process's."""
        before = TorchSettings.here()
        self.take()
        try:
            yield
        finally:
            before.take()


@dataclass(frozen=True)
class WithSettings(Generic[T]):
    """A program that runs on workers with the settings of who launches it."""

    program: Callable[[Worker], T]
    settings: TorchSettings | None

    @classmethod
    def of_here(cls, program: Callable[[Worker], T]) -> WithSettings[T]:
        """With this process's settings; a process without torch has none."""
        return cls(program, TorchSettings.here() if "torch" in sys.modules else None)

    def __call__(self, worker: Worker) -> T:
        if self.settings is None:
            return self.program(worker)
        with self.settings.taken():
            return self.program(worker)
