"""The base of the kinds under which a rank holds parts of parameters, as DTensors."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from trainer.checkpoint.stored import Stored
from trainer.config import OptimConfig
from trainer.distributed.group import Several
from trainer.errors import ConfigError
from trainer.optim import build as optim
from trainer.runtime.window import Window
from trainer.task import Loss


class Parts(Several):
    """Each rank saves its parts, and reads its own of the state of a whole model, however that was saved."""

    sharded = True
    _shards: Mapping[str, DTensor]  # by the parameter's name

    def _holds(self, model: nn.Module) -> nn.Module:
        self._shards = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        return model

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        optim.check(config, model)
        return optim.maker(config, sharded=True)(alike(optim.param_groups(model, config)))

    def passes(self, batches: Sequence[Any], loss_of: Callable[[int, Any], Loss]) -> Iterator[Loss]:
        with plan_explained():
            yield from super().passes(batches, loss_of)

    @torch.no_grad()
    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        self.reduce(params, window.count)
        found = super().total(window, params)
        return found.on(torch.device("cpu")) if self.config.offload else found

    def reduce(self, params: Sequence[nn.Parameter], count: float | Tensor) -> None:
        """FSDP has divided the gradients by the number of replicas; what counts is their sum, over the global count."""
        self.beat()
        if self.config.shard == "none":
            for p in params:
                if isinstance(p, DTensor) and isinstance(p.grad, DTensor):  # of a norm, from a part of the sequence
                    p.grad = p.grad.redistribute(placements=p.placements)
            self.sum_over_replicas(self._gradients(params))
        else:
            torch._foreach_mul_(self._gradients(params), self.shares)

    def _gradients(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        return self.local([p.grad for p in params if p.grad is not None])

    def backward(self, last: bool) -> AbstractContextManager[object]:
        self.beat()
        return nullcontext()

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]

    def mine(self, tensor: Tensor) -> tuple[Tensor | None, Sequence[int] | None]:
        """Of what several ranks hold alike, the first of them saves it. Raises ConfigError for addends, which are no
        part of anything: such as the `amax` of a divided tensor over the dimension along which it is divided."""
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError(
                f"what is to be saved, an optimizer's state say, has a tensor of shape {[*tensor.shape]} that is not "
                f"reduced yet ({', '.join(map(str, tensor.placements))}): keep its full_tensor(), or train with shard "
                "none or zero1 and tensor 1."
            )
        if tensor.is_meta:
            return super().mine(tensor)
        first = all(self.mesh.get_local_rank(dim) == 0 for dim in ("data", "tensor") if not _divided(tensor, dim))
        if not isinstance(tensor, DTensor):
            return (tensor if first else None), None
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return (tensor.to_local() if first and 0 not in shape else None), offset

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """What several ranks hold of one parameter adds up; what each of them holds in full counts once."""
        self.beat()
        squares = torch.stack(torch._foreach_norm(self.local([*gradients]))).double().square()
        for dim in ("data", "tensor"):
            if divided := [i for i, g in enumerate(gradients) if _divided(g, dim)]:
                sums = squares[divided]
                dist.all_reduce(sums, group=self.mesh.get_group(dim))
                squares[divided] = sums
        return squares.sqrt().to(gradients[0].dtype)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(self.norms(gradients)) if gradients else torch.zeros(())

    def take(self, path: tuple[str, ...], stored: Stored) -> Tensor:
        """Below a parameter's name, of a tensor of its shape this rank's part."""
        like = next((self._shards[key] for key in reversed(path) if key in self._shards), None)
        if like is None or stored.shape != like.shape:
            return stored.read()
        mesh, placements = like.device_mesh, like.placements
        shape, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
        mine = stored.read([slice(o, o + n) for o, n in zip(offset, shape, strict=True)]).to(self.device)
        parts = DTensor.from_local(mine, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
        return parts.to(like.device)  # the host's memory, where they are offloaded


def alike(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same parameters in groups of those that are divided alike: torch's kernels take no mixture."""
    found = []
    for group in groups:
        by_mesh: dict[Any, list[Any]] = {}
        for p in group["params"]:
            by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        found += [{**group, "params": params} for params in by_mesh.values()]
    return found


@contextmanager
def plan_explained() -> Iterator[None]:
    """Say of a `parallel_plan` that mixes divided and whole tensors what is to be named in it."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ConfigError(
            "parallel_plan leaves an operation with one tensor that is divided along the sequence and one that is "
            "not: name 'scatter' the module after which the sequence is divided, 'gather' the one before which it "
            "is made whole, 'sequence' the norms between them, and 'rowwise_scatter' the layers by rows."
        ) from error


def _divided(tensor: Tensor, dim: str) -> bool:
    """Whether the ranks along this dimension of the mesh hold different parts of it."""
    if not isinstance(tensor, DTensor):
        return False
    placements = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    return dim in placements and not placements[dim].is_replicate()
