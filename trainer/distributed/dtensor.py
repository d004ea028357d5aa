"""Holds the base of the kinds of ranks that hold parts of parameters as DTensors."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.checkpoint.stored_tensors import Stored
from trainer.compat import foreach
from trainer.compat.parallel import shape_and_offset
from trainer.config import OptimConfig
from trainer.distributed.group import Several
from trainer.errors import ConfigError
from trainer.optim import build as optim
from trainer.runtime.window import Window
from trainer.task import Loss


class Parts(Several):
    """A rank that saves its parts, and reads its own from a whole model's state, however that was saved."""

    sharded = True
    _dims: tuple[str, ...] = ("data", "tensor")  # of `layout`, along which ranks hold a tensor in parts or alike
    _shards: Mapping[str, DTensor]  # by the parameter's name

    @property
    def layout(self) -> DeviceMesh:
        """Returns the mesh by whose dimensions ranks hold the parameters."""
        return self.mesh

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
        total = super().total(window, params)
        return total.on(torch.device("cpu")) if self.config.offload else total

    def reduce(self, params: Sequence[nn.Parameter], count: float | Tensor) -> None:
        """Turns the gradients into their sum over the global count; FSDP has divided them by the number of replicas."""
        self.beat()
        if self.config.shard == "none":
            for p in params:
                if isinstance(p, DTensor) and isinstance(p.grad, DTensor):  # a norm, from a part of the sequence
                    p.grad = p.grad.redistribute(placements=p.placements)
            self.sum_over_replicas(self._gradients(params))
        else:
            foreach.mul_(self._gradients(params), self.shares)

    def _gradients(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        return self.local([p.grad for p in params if p.grad is not None])

    def backward(self, last: bool) -> AbstractContextManager[object]:
        self.beat()
        return nullcontext()

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]

    def mine(self, tensor: Tensor) -> tuple[Tensor | None, Sequence[int] | None]:
        """Returns this rank's part of the tensor to save, with its offset.

        A part that several ranks hold alike is saved by the first. Raises ConfigError for a tensor that is not reduced
        yet, such as the `amax` of a divided tensor over the dimension along which it is divided: its addends are not
        parts of it.
        """
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError(
                f"what is to be saved, an optimizer's state say, has a tensor of shape {[*tensor.shape]} that is not "
                f"reduced yet ({', '.join(map(str, tensor.placements))}): keep its full_tensor(), or train with shard "
                "none or zero1 and tensor 1."
            )
        if tensor.is_meta:
            return super().mine(tensor)
        first = all(self.layout.get_local_rank(dim) == 0 for dim in self._dims if not _divided(tensor, dim))
        if not isinstance(tensor, DTensor):
            return (tensor if first else None), None
        shape, offset = shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return (tensor.to_local() if first and 0 not in shape else None), offset

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns the norms of the gradients.

        Parts on several ranks add up; a gradient that each rank holds whole counts once.
        """
        self.beat()
        squares = torch.stack(foreach.norm(self.local([*gradients]))).double().square()
        for dim in self._dims:
            if divided := [i for i, g in enumerate(gradients) if _divided(g, dim)]:
                sums = squares[divided]
                dist.all_reduce(sums, group=self.layout.get_group(dim))
                squares[divided] = sums
        return squares.sqrt().to(gradients[0].dtype)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(self.norms(gradients)) if gradients else torch.zeros(())

    def take(self, path: tuple[str, ...], stored: Stored) -> Tensor:
        """Returns a stored tensor; of one with a parameter's name and shape, this rank's part."""
        like = next((self._shards[key] for key in reversed(path) if key in self._shards), None)
        if like is None or stored.shape != like.shape:
            return stored.read()
        mesh, placements = like.device_mesh, like.placements
        shape, offset = shape_and_offset(like.shape, mesh, placements)
        local = stored.read([slice(o, o + n) for o, n in zip(offset, shape, strict=True)]).to(self.device)
        parts = DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
        return parts.to(like.device)  # host memory where they are offloaded


def alike(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups, split so that the parameters of each are divided alike, since torch's kernels accept no
    mixture."""
    split = []
    for group in groups:
        by_mesh: dict[Any, list[Any]] = {}
        for p in group["params"]:
            by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        split += [{**group, "params": params} for params in by_mesh.values()]
    return split


@contextmanager
def plan_explained() -> Iterator[None]:
    """Raises ConfigError with advice for a `parallel_plan` that mixes divided and whole tensors."""
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
    """Returns True if the ranks along this dimension of the mesh hold different parts of the tensor."""
    if not isinstance(tensor, DTensor):
        return False
    placements = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    return dim in placements and not placements[dim].is_replicate()
