"""A model is evaluated within its training, and trained on as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.model.eval_mode import as_evaluated


def test_neither_dropout_nor_gradients_nor_statistics_and_modes_as_before():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    net[1].eval()  # frozen
    x = torch.randn(8, 3)
    with as_evaluated(net):
        assert torch.equal(net(x), net(x)) and not net(x).requires_grad
    assert [module.training for module in net.modules()] == [True, True, False, True]
    assert net[1].num_batches_tracked == 0 and net(x).requires_grad


def test_modes_come_back_after_an_error():
    net = nn.Dropout(0.5).train()
    with pytest.raises(ZeroDivisionError), as_evaluated(net):
        raise ZeroDivisionError
    assert net.training and torch.is_grad_enabled()
