"""Transformers' attention in lora and dpo is torch's, without a mask."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hpo import load
from studies.dpo.task import DpoTask
from studies.lora.task import LoraTask

pytestmark = pytest.mark.whole


class Attentions(TorchFunctionMode):
    """Records the mask and whether it is causal, of each call of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((kwargs.get("attn_mask"), kwargs.get("is_causal", False)))
        return func(*args, **kwargs)


@pytest.mark.parametrize(("name", "kind"), [("lora", LoraTask), ("dpo", DpoTask)])
def test_a_flash_kernel_may_compute_it(name, kind):
    """Only a call without a mask that is causal may go to one; rows are padded at their end, which nobody looks at."""
    task = kind(load(name).config)
    model, batch = task.model().train(), task.train_set().__getitems__(range(4))
    with Attentions() as attentions:
        task.loss(model, batch)
    assert attentions.calls and set(attentions.calls) == {(None, True)}
