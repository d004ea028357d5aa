"""What a checkpoint holds of an optimizer; that a fit resumes by it exactly is in tests/trainer/test_resume.py."""

from __future__ import annotations

import pytest
import torch
from own_optimizers import Counts, Double, Groups, Own, Signs
from torch import nn
from torch.utils._pytree import tree_map

from trainer.checkpoint import files
from trainer.errors import ConfigError
from trainer.optim.optimizer_state import Kept


def kept(make: type[torch.optim.Optimizer], **options) -> tuple[nn.Module, torch.optim.Optimizer, Kept]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = make(net.parameters(), **options)
    return net, optimizer, Kept(optimizer, optimizer, {p: name for name, p in net.named_parameters()})


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        for p in net.parameters():
            p.grad = torch.full_like(p, 0.3 - 0.2 * step)
        optimizer.step()


def by_disk(state: dict, directory) -> dict:
    directory.mkdir()
    files.write(directory, {"optimizer": state}, {"step": 1, "epoch": 0})
    return files.read(directory, None)[0]["optimizer"]


def plain(optimizer: torch.optim.Optimizer) -> str:
    """All that it keeps, with types and every digit."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    others = [key for key in optimizer.state if isinstance(key, str)]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = ([optimizer.state.get(key) for key in (*parameters, *others)], groups)
    return repr(tree_map(lambda x: (x.dtype, x.tolist()) if isinstance(x, torch.Tensor) else x, state))


@pytest.mark.parametrize("make", [Double, Signs, Counts, Groups, torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD])
def test_all_of_it_comes_back_in_its_own_type(make, tmp_path):
    net, optimizer, saved = kept(make)
    stepped(net, optimizer)
    _, fresh, loading = kept(make)
    loading.load(by_disk(saved.state(), tmp_path / "it"))
    assert plain(fresh) == plain(optimizer)


def test_counters_are_the_checkpoints_and_the_rest_the_configurations(tmp_path):
    net, optimizer, saved = kept(Groups, weight_decay=0.1)
    stepped(net, optimizer)
    state = by_disk(saved.state(), tmp_path / "it")
    assert {*state["groups"]["weight"]["entries"]} == {"k", "d"}
    _, other, loading = kept(Groups, weight_decay=0.3)
    loading.load(state)
    assert (other.param_groups[0]["weight_decay"], other.param_groups[0]["k"]) == (0.3, 3)


def test_a_rollback_takes_counters_back_too(tmp_path):
    net, optimizer, saved = kept(Groups)
    before = by_disk(saved.state(), tmp_path / "it")
    stepped(net, optimizer)
    saved.load(before)
    assert optimizer.param_groups[0]["k"] == 0 and "d" not in optimizer.param_groups[0]


def test_groups_that_ranks_divide_take_the_entries_of_the_whole(tmp_path):
    net, optimizer, saved = kept(Groups)
    stepped(net, optimizer)
    other = nn.Linear(3, 2)
    parts = Groups([{"params": [other.weight]}, {"params": [other.bias]}])
    Kept(parts, parts, {other.weight: "weight", other.bias: "bias"}).load(by_disk(saved.state(), tmp_path / "it"))
    assert [group["k"] for group in parts.param_groups] == [3, 3]


def test_an_optimizer_without_counters_is_saved_as_before(tmp_path):
    """So that earlier releases read it, and this one reads theirs."""
    net, optimizer, saved = kept(torch.optim.Adam)
    stepped(net, optimizer)
    assert saved.state().keys() == {"of", "state"}
    assert saved.state()["state"]["bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_what_json_cannot_hold_is_refused_by_its_place(tmp_path):
    class Odd(Own):
        def step(self, closure=None):
            self.param_groups[0]["k"] = object()

    net, optimizer, saved = kept(Odd)
    stepped(net, optimizer)
    with pytest.raises(TypeError, match=r"state\['optimizer'\]\['groups'\]\['weight'\]\['entries'\]\['k'\], a object,"):
        by_disk(saved.state(), tmp_path / "it")


def test_another_optimizer_is_refused():
    _, _, saved = kept(Double)
    _, _, loading = kept(Signs)
    with pytest.raises(ConfigError, match=r"holds the state of Double, and train.optim asks for Signs"):
        loading.load(saved.state())
