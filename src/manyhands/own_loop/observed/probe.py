"""A probe's backward is over on all workers: whether its loss is a mean or a sum over rows."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.comm.group import Group
from manyhands.own_loop import loss_graph
from manyhands.own_loop.backward_watch import Roots
from manyhands.own_loop.observed.loops import Scale
from manyhands.own_loop.observed.loss_scale import EXACT, LOW_PRECISION, Unclear, loss_scale


def judged(group: Group, gradients: list[Tensor], roots: Roots, rows: float, noisy: bool) -> Scale | Unclear:
    """The same answer on all ranks; a collective.

    gradients: of the whole batch on rank 0, of a part of it on each other. rows: what the loss counts here. noisy:
    whether gradients may differ by what was drawn here, or by the parts themselves.

    The predictions are those of `loss_scale.predictions`, by two sums over the other ranks, in two further gradients'
    memory, whatever the number of ranks.
    """
    loss = float(roots.loss.detach()) if roots.loss is not None else 0.0
    low = any(part.dtype in (torch.float16, torch.bfloat16) for part in gradients)
    low = low or loss_graph.has_casts(roots.tensors[0])
    everyone = group.all_gather_json([loss, rows, noisy, low])
    total, parts = everyone[0][1], everyone[1:]
    covered = sum(one[1] for one in parts)
    predicted = []  # if it is a mean, and if it is a sum
    for counted in (rows, total):
        factor = counted / covered if group.rank and rows and covered else 0.0
        predicted.append([part * factor for part in gradients])
        for part in predicted[-1]:
            group.all_reduce_(part)
    found: Scale | Unclear | None = None
    if group.rank == 0:
        whole, mean, added = (torch.cat([part.reshape(-1) for part in one]) for one in (gradients, *predicted))
        found = loss_scale(
            whole,
            mean,
            added,
            rows=[one[1] for one in parts],
            total=total,
            losses=(loss, [one[0] for one in parts]),
            noisy=any(one[2] for one in everyone),
            exact=LOW_PRECISION if any(one[3] for one in everyone) else EXACT,
        )
    packed = found.value if isinstance(found, Scale) else None if found is None else vars(found)
    told = group.all_gather_json(packed)[0]
    return Scale(told) if isinstance(told, str) else Unclear(**told)
