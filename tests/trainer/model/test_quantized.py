"""Quantised weights against the formulas in float64, against bitsandbytes, and the file that holds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.stats import norm
from torch import nn

from trainer.errors import ConfigError, DataError
from trainer.model.quantized import KINDS, LEVELS, load_quantized, save_quantized

SHAPES = [(6, 64), (5, 7), (3, 65), (1, 1)]  # whole blocks, part of a block, an odd number of weights


def weights(shape: tuple[int, int]) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    weight[0] *= 50  # an outlier takes the levels of its row or block alone
    return weight


def by_formula(kind: str, weight: torch.Tensor) -> np.ndarray:
    """Each weight as it is read, one by one in float64."""
    wide = weight.double().numpy()
    if kind == "int8":
        scale = np.abs(wide).max(axis=1, keepdims=True)
        return np.round(127 * wide / scale) * scale / 127
    flat, read = wide.ravel(), []
    for start in range(0, flat.size, 64):
        block = flat[start : start + 64]
        scale = max(abs(block))
        read += [min(LEVELS, key=lambda level, w=w: abs(level - w / scale)) * scale for w in block]
    return np.array(read).reshape(wide.shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [*KINDS])
def test_a_weight_is_read_as_the_formula_has_it(kind, shape, tmp_path):
    layer = nn.Linear(shape[1], shape[0])
    with torch.no_grad():
        layer.weight.copy_(weights(shape))
    assert save_quantized(layer, kind, tmp_path / "a.safetensors", {}) == 1
    read = load_quantized(tmp_path / "a.safetensors")
    np.testing.assert_allclose(read["weight"].numpy(), by_formula(kind, layer.weight.detach()), rtol=1e-6)
    assert read["weight"].dtype == torch.float32 and torch.equal(read["bias"], layer.bias)


def test_the_levels_are_quantiles_of_a_normal_distribution():
    """Appendix E of the paper: 8 of the negative and 9 of the positive side, which share 0, over the largest."""
    offset = 1 - (1 / 32 + 1 / 30) / 2
    sides = [norm.ppf(np.linspace(0.5, offset, count)) for count in (8, 9)]
    levels = np.array([*-sides[0][::-1], *sides[1][1:]]) / sides[1][-1]
    np.testing.assert_allclose(levels, LEVELS, atol=1e-6)


def test_four_bits_lie_as_bitsandbytes_lays_them(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional", reason="runs with pip install -e '.[llm]'")
    for width in (96, 128):
        layer = nn.Linear(width, 32, bias=False)
        save_quantized(layer, "nf4", tmp_path / "a.safetensors", {})
        packed, state = functional.quantize_4bit(layer.weight.data, blocksize=64, quant_type="nf4")
        with safe_open(tmp_path / "a.safetensors", "pt") as file:
            assert torch.equal(file.get_tensor("weight"), packed.flatten())
            assert torch.equal(file.get_tensor("weight.scale"), state.absmax)
        ours = load_quantized(tmp_path / "a.safetensors")["weight"]
        places = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten().long()
        levels = (state.code[places].view(-1, 64) * state.absmax[:, None]).view_as(ours)
        torch.testing.assert_close(ours, levels, rtol=1e-6, atol=1e-7)
        if width % 64 == 0:  # where a block goes on in the next row, its kernel for AVX-512 takes another scale
            theirs = functional.dequantize_4bit(packed, state)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


class Tied(nn.Module):
    """A model whose embedding is its head, with another layer and a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(10, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        with torch.no_grad():
            self.middle.weight[2] = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(tokens)))


@pytest.mark.parametrize(("kind", "part", "error"), [("int8", 0.27, 0.01), ("nf4", 0.16, 0.15)])
@torch.no_grad()
def test_a_file_is_a_models_state_again(kind, part, error, tmp_path):
    """The tied embedding stays whole, and is stored once; the file is as much smaller as the formats are."""
    model, path = Tied(), tmp_path / "a.safetensors"
    assert save_quantized(model, kind, path, {"study": "s"}) == 1
    other = Tied()
    other.load_state_dict(load_quantized(path))
    assert torch.equal(other.embed.weight, model.embed.weight) and other.head.weight is other.embed.weight
    assert torch.equal(other.middle.weight[2], torch.zeros(64)) and other.steps == 3
    tokens = torch.arange(10)
    expected = model(tokens)
    assert 0 < (other(tokens) - expected).norm() / expected.norm() < error
    with safe_open(path, "pt") as file:
        stored = [file.get_tensor(name) for name in file.keys() if name.startswith("middle.weight")]  # noqa: SIM118
        assert file.metadata()["study"] == "s" and "head.weight" not in file.keys()  # noqa: SIM118
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    assert size <= part * model.middle.weight.numel() * 4
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def _without_first(module: nn.Module, state: dict[str, torch.Tensor], *rest: object) -> None:
    del state["0.weight"]


def test_what_cannot_be_quantised_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ConfigError, match="--quantize 'int3' is not known: choose one of int8, nf4"):
        save_quantized(Tied(), "int3", path, {})
    with pytest.raises(ConfigError, match="Embedding has no linear layer to quantise"):
        save_quantized(nn.Embedding(2, 2), "nf4", path, {})
    partial = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    partial.register_state_dict_post_hook(_without_first)
    with pytest.raises(ConfigError, match=r"Sequential is stored without '0.weight', as adapters are"):
        save_quantized(partial, "nf4", path, {})
    assert not path.exists()
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(DataError, match=r"a.safetensors has no quantised weights"):
        load_quantized(path)
    path.write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        load_quantized(path)
