"""Holds weighted sums of losses, with weights that are set or trained, and a penalty on gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from trainer.errors import TrainerError
from trainer.task import Loss


def weighted_sum(losses: Mapping[str, Loss], weights: Mapping[str, float]) -> Loss:
    """Returns sum_k w_k mean_k over the losses that have a weight, with the count n of the first of them.

    If all counts are the same, accumulation over micro-batches is exact. A loss of another count n_k enters as its
    sum times n / n_k, the mean of its own micro-batch. The terms are `loss_<name>` of each loss, before its weight, and
    the terms of the losses; the parts are the weighted losses. Raises TrainerError for a weight without a loss, and if
    there are no weights.
    """
    if unknown := weights.keys() - losses.keys():
        raise TrainerError(f"weight of {min(unknown)!r}, which is none of the losses {', '.join(losses)}: remove it.")
    if not weights:
        raise TrainerError("a weighted sum needs a weight for at least one loss.")
    first = losses[next(iter(weights))]
    means = {name: over(first.count, losses[name]) for name in weights}
    parts = {name: weights[name] * mean for name, mean in means.items()}
    return Loss(sum(parts.values(), first.sum.new_zeros(())), first.count, _terms(losses, means), parts)


def uncertainty_sum(losses: Mapping[str, Loss], log_variances: Tensor, *, squared: Collection[str] = ()) -> Loss:
    """Returns sum_k (w_k mean_k + s_k / 2), where w_k is exp(-s_k), or exp(-s_k) / 2 for the losses in `squared`.

    Kendall, Gal & Cipolla 2018, arXiv 1705.07115, eq. 7 and 10 with s_k = log sigma_k^2: `squared` names the squared
    errors, which are likelihoods of a Gaussian; the other losses are cross-entropies.

    log_variances: s [losses], in the order of `losses`; a parameter of the model, so that it is trained and saved with
    the model. The count and the terms are those of `weighted_sum`, and `weight_<name>` is w_k. Raises TrainerError for
    a name that is none of the losses, and for another number of variances than losses.
    """
    if unknown := set(squared) - losses.keys():
        raise TrainerError(
            f"squared names {min(unknown)!r}, which is none of the losses {', '.join(losses)}: remove it."
        )
    if log_variances.shape != (len(losses),) or not losses:
        raise TrainerError(
            f"the log-variances have the shape {list(log_variances.shape)}, and there are {len(losses)} losses: make "
            f"them torch.nn.Parameter(torch.zeros({len(losses)}))."
        )
    first = next(iter(losses.values()))
    means = {name: over(first.count, loss) for name, loss in losses.items()}
    spread = dict(zip(losses, log_variances, strict=True))
    weights = {name: torch.exp(-s) * (0.5 if name in squared else 1.0) for name, s in spread.items()}
    parts = {name: weights[name] * mean + first.count * spread[name] / 2 for name, mean in means.items()}
    terms = _terms(losses, means) | {f"weight_{name}": (w * first.count).detach() for name, w in weights.items()}
    return Loss(sum(parts.values(), first.sum.new_zeros(())), first.count, terms, parts)


def _terms(losses: Mapping[str, Loss], means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    terms = {name: term for key in means for name, term in losses[key].terms.items()}
    return terms | {f"loss_{name}": mean.detach() for name, mean in means.items()}


def over(count: float | Tensor, loss: Loss) -> Tensor:
    """Returns the loss's sum scaled so that, divided by `count`, it is the loss's mean."""
    if loss.count is count:
        return loss.sum
    counted = torch.as_tensor(loss.count, device=loss.sum.device)
    return loss.sum * torch.where(counted > 0, count / counted.clamp(min=1e-12), 0.0)


def gradient_penalty(outputs: Tensor, inputs: Tensor | Sequence[Tensor], *, norm: float = 1.0) -> Loss:
    """Returns the loss (|d output_i / d input_i| - norm)^2 of each sample.

    This is Gulrajani et al. 2017, arXiv 1704.00028, eq. 3; with norm 0 it is the R1 penalty without its gamma/2
    (Mescheder et al. 2018, arXiv 1801.04406, eq. 9).

    outputs: [batch, ...], or their sum, computed from `inputs` [batch, ...], which require a gradient; the norm is over
    all inputs together. The loss is a sum over samples as long as no layer mixes them (batch norm does). Raises
    TrainerError if inputs differ in their number of samples.
    """
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if len(counts := sorted({len(x) if x.ndim else 0 for x in tensors})) != 1 or not all(x.ndim for x in tensors):
        raise TrainerError(f"a gradient penalty got inputs of {counts} samples: let all have the same first dimension.")
    slopes = torch.autograd.grad(outputs.sum(), tensors, create_graph=True, materialize_grads=True)
    square = sum((slope.flatten(1).square().sum(dim=1) for slope in slopes), slopes[0].new_zeros(()))
    # The root has no slope at 0: there the penalty is flat, like torch's norm.
    length = torch.where(square > 0, square, 1.0).sqrt() * (square > 0)
    return Loss((square if norm == 0 else (length - norm).square()).sum(), counts[0])
