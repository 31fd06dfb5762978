"""What the scripts record for the tests: parameters after each step, rates, and what they print."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 20
found: dict[str, list[Any]] = {}


def options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """The script's arguments, and --double, --no-noise and --dump; recording begins."""
    parser = argparse.ArgumentParser(description=description)
    for name, value in defaults.items():
        if isinstance(value, bool):
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--double", action="store_true", help="float64")
    parser.add_argument("--no-noise", action="store_true", help="no dropout, no noise")
    parser.add_argument("--dump", help="a file for what is recorded")
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    found.clear()
    found.update(parameters=[], rates=[], printed=[], evaluated=[])
    hook = register_optimizer_step_post_hook(_stepped)
    args.save = lambda: (hook.remove(), torch.save(found, args.dump) if args.dump else None)
    return args


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if len(found["parameters"]) < STEPS:
        own = [p.detach().reshape(-1).clone() for group in optimizer.param_groups for p in group["params"]]
        found["parameters"].append(torch.cat(own))
        found["rates"].append([group["lr"] for group in optimizer.param_groups])


def printed(text: str, value: float) -> None:
    """A number that the script prints while it trains."""
    found["printed"].append(value)
    print(text.format(value))


def evaluated(text: str, value: float) -> None:
    """A number of an evaluation."""
    found["evaluated"].append(value)
    print(text.format(value))


def dropout(p: float, args: argparse.Namespace) -> nn.Module:
    return nn.Dropout(0.0 if args.no_noise else p)


def images(rows: int, side: int, seed: int = 0) -> Tensor:
    """[rows, 1, side, side] in [0, 1]"""
    return torch.rand(rows, 1, side, side, generator=torch.Generator().manual_seed(seed))
