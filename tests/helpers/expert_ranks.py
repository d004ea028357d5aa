"""What the ranks of a test do: compute a layer of experts and its gradients, each of its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from studies.gpt.experts import Experts
from trainer.config import ParallelConfig, TrainConfig
from trainer.distributed.join import join
from trainer.task import Task

HIDDEN, LENGTH, EXPERTS, ROWS = 6, 8, 4, 8


class Layer(Task):
    def expert_plan(self, model: nn.Module) -> Sequence[nn.Module]:
        return [model]


def layer(wanted: int | None, **options: Any) -> Experts:
    """Returns a layer in float64; with `wanted`, its router sends every token to that expert and the next."""
    torch.manual_seed(0)
    experts = Experts(HIDDEN, 10, experts=EXPERTS, top_k=2, **options).double()
    if wanted is not None:
        with torch.no_grad():
            experts.router.weight.zero_()
            experts.router.weight[wanted, 0], experts.router.weight[wanted + 1, 0] = 50.0, 40.0
    return experts


def rows() -> Tensor:
    x = torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[..., 0] = 1 + x[..., 0].abs()
    return x


def computed(parallel: ParallelConfig, wanted: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Returns this rank's outputs, its rows' gradients, and the parameters' summed over all ranks."""
    ranks = join(parallel, torch.device("cpu"))
    model = ranks.prepare(layer(wanted, **options), Layer(TrainConfig(num_epochs=1, batch_size=ROWS)))
    x = rows().chunk(ranks.shares)[ranks.share].clone().requires_grad_()
    out = model(x)
    (out * torch.arange(1.0, HIDDEN + 1).double()).square().sum().backward()
    params = [*model.parameters()]
    norm = float("nan")
    if ranks.ranks > 1:
        ranks.reduce(params, 1.0)
        norm = float(ranks.norm([p.grad for p in params if p.grad is not None]))
    gradients = {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).tolist()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert x.grad is not None
    return {"out": out.tolist(), "rows": x.grad.tolist(), "gradients": gradients, "norm": norm}


def layers(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [computed(ParallelConfig(**job["parallel"]), wanted, options) for wanted, options in job["cases"]]
