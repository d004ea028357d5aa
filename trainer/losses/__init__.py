"""Losses as sums and counts, computed in at least float32 also under autocast; see docs/guide/losses.md."""

from collections.abc import Callable

from trainer.losses.combine import gradient_penalty, uncertainty_sum, weighted_sum
from trainer.losses.contrastive import causal_contrastive
from trainer.losses.pointwise import cross_entropy, ctc, focal, huber, mse, quantile
from trainer.losses.preference import dpo, ipo, kto, sequence_log_probs
from trainer.losses.ranking import cs_ic, rank_ic, sharpe
from trainer.task import Loss

LOSSES: dict[str, Callable[..., Loss]] = {
    "mse": mse,
    "huber": huber,
    "quantile": quantile,
    "cross_entropy": cross_entropy,
    "focal": focal,
    "ctc": ctc,
    "rank_ic": rank_ic,
    "cs_ic": cs_ic,
    "sharpe": sharpe,
    "causal_contrastive": causal_contrastive,
    "dpo": dpo,
    "ipo": ipo,
    "kto": kto,
}

__all__ = [
    "LOSSES",
    "causal_contrastive",
    "cross_entropy",
    "cs_ic",
    "ctc",
    "dpo",
    "focal",
    "gradient_penalty",
    "huber",
    "ipo",
    "kto",
    "mse",
    "quantile",
    "rank_ic",
    "sequence_log_probs",
    "sharpe",
    "uncertainty_sum",
    "weighted_sum",
]
