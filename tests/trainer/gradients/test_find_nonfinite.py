"""Where numbers went bad: the module that is named is the one that was made to spoil them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.gradients.find_nonfinite import first_nonfinite


class _Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[0] * float("inf")


class Fault(nn.Module):
    """A linear layer that can spoil what it gives forward, back, or to its own weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.eye(4))
        self.how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "forward":
            x = x / 0.0
        if self.how == "backward":
            x = _Spoilt.apply(x)
        return x @ (_Spoilt.apply(self.weight) if self.how == "weight" else self.weight).T


class Block(nn.Module):
    """Two branches over one input, beside a residual path; an activation that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(Fault(), nn.ReLU(inplace=True), Fault())
        self.right = nn.Sequential(nn.LayerNorm(4), Fault())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.left(x) + self.right(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Fault()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.ModuleDict({"out": Fault()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head["out"](x)


FAULTS = [name for name, module in Net().named_modules() if isinstance(module, Fault)]


def found(net: nn.Module, loss=lambda out: out.square().sum()) -> str:
    def run() -> None:
        net.zero_grad()
        loss(net(torch.linspace(0.1, 1, 12).view(3, 4))).backward()

    return first_nonfinite(net, run)


@pytest.mark.parametrize("name", FAULTS)
def test_the_module_that_spoils_the_forward_pass_is_named(name):
    net = Net()
    net.get_submodule(name).how = "forward"
    assert found(net) == f"the output of module {name} is the first that is not finite"


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in FAULTS for how in ("backward", "weight") if (name, how) != ("stem", "backward")],
)  # the stem's input has no gradient to be spoilt
def test_the_module_that_spoils_the_backward_pass_is_named(name, how):
    net = Net()
    net.get_submodule(name).how = how
    assert f"the gradient that module {name} gives is the first that is not finite" in found(net)


def test_what_a_module_does_between_its_parts_is_its_own():
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(_Spoilt.apply(self.a(x)))

    net = nn.Sequential(nn.Linear(4, 4), Between(), nn.Linear(4, 4))
    assert "the gradient that module 1 gives" in found(net)


def test_a_module_called_twice_is_named_if_the_later_call_is_at_fault():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = nn.Linear(4, 4), Fault()

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.again(self.first(x)))

    net = Twice()
    net.again.how = "backward"
    assert "the gradient that module again gives" in found(net)


def test_a_loss_that_is_at_fault_is_not_blamed_on_a_module():
    assert "the loss gives a gradient that is not finite" in found(Net(), lambda out: _Spoilt.apply(out).sum())
    assert found(Net(), lambda out: (out.sum() - out.sum().detach()) + torch.tensor(float("inf"))) == (
        "the model's outputs are finite, the loss is not"
    )


def test_a_parameter_comes_before_all_else_and_no_hook_is_left():
    net = Net()
    found(net)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    with torch.no_grad():
        net.blocks[1].left[0].weight[2, 2] = float("nan")
    assert found(net) == "parameter blocks.1.left.0.weight is not finite"
    first_nonfinite(net, lambda: pytest.fail("no pass is needed to see that"))
