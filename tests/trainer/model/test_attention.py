"""Attention within documents against a float64 loop over them, FlexAttention's mask, and a GPU's kernel."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

import trainer.model.attention
from studies.gpt.model import Llama
from studies.gpt.task import Kernels
from trainer.config import ActivationConfig
from trainer.data.packing import offsets
from trainer.errors import DataError
from trainer.model.attention import attention, document_mask, has_kernel, within
from trainer.model.checkpointing import checkpointed
from trainer.runtime.second_order import twice

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, -1], [0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, -1, -1, -1, -1]])


def by_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Token by token, each over the keys of its own document up to itself; padding over padding."""
    out, shared = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for row, head, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        keys = [j for j in range(i + 1) if documents[row, j] == documents[row, i]]
        scores = k[row, head // shared, keys] @ q[row, head, i] / math.sqrt(q.shape[-1])
        out[row, head, i] = scores.softmax(0) @ v[row, head // shared, keys]
    return out


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_is_a_loop_over_documents_in_value_and_gradient(kv_heads):
    torch.manual_seed(0)
    q = torch.randn(3, 4, 8, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(3, kv_heads, 8, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours, oracle = attention(q, k, v, within(DOCUMENTS, 6)), by_loop(q, k, v, DOCUMENTS)
    slope = torch.randn_like(ours)
    torch.testing.assert_close(ours, oracle, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (q, k, v), slope), torch.autograd.grad(oracle, (q, k, v), slope), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    whole = torch.zeros(3, 8, dtype=torch.int64)
    torch.testing.assert_close(attention(q, k, v), by_loop(q, k, v, whole), rtol=1e-12, atol=1e-12)


def test_the_mask_is_flex_attentions_pair_by_pair():
    def sees(batch, head, i, j):
        return (DOCUMENTS[batch, i] == DOCUMENTS[batch, j]) & (j <= i)

    assert torch.equal(document_mask(DOCUMENTS), create_mask(sees, 3, 1, 8, 8, device="cpu"))


def test_offsets_are_where_documents_begin():
    begins = offsets(DOCUMENTS)
    assert begins.dtype == torch.int32
    assert begins.tolist() == [0, 3, 5, 7, 8, 9, 16, 20, 24]  # eight documents, padding among them, and the end
    assert offsets(DOCUMENTS, 9).tolist() == [*begins.tolist(), *[24] * 8]


def test_batches_of_many_documents_and_of_few_have_one_shape():
    few, many = torch.zeros(2, 8, dtype=torch.int64), torch.arange(4).repeat_interleave(2).expand(2, 8)
    assert offsets(few, 8).shape == offsets(many, 8).shape


@pytest.mark.parametrize("row", [[0, 1, 0, 0], [1, 0, 0, 0], [0, -1, 0, -1], [0, 0, 2, 1]])
def test_documents_out_of_order_are_refused(row):
    """The mask would join what the kernel keeps apart."""
    with pytest.raises(DataError, match="number them 0, 1"):
        offsets(torch.tensor([row]))


class Layer(nn.Module):
    """Attends, and computes something that is cheap."""

    def __init__(self, begins: torch.Tensor) -> None:
        super().__init__()
        self.begins, self.scale = begins, nn.Parameter(torch.empty((), dtype=torch.bfloat16, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x, self.begins).sin() * self.scale


class Calls(TorchDispatchMode):
    """Records the name of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found += [t.shape for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result


def test_the_kernel_makes_nothing_of_length_by_length():
    """On the meta device, which computes shapes alone; four heads share one of the keys, which is not repeated."""
    documents, length = torch.arange(4).repeat_interleave(128)[None], 512
    begins = offsets(documents).to("meta")
    q = torch.empty(1, 4, length, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    k, v = (torch.empty(1, 1, length, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
    with Shapes() as shapes:
        attention(q, k, v, begins).float().sum().backward()
    assert shapes.found
    assert max(math.prod(shape) for shape in shapes.found) == math.prod(q.shape)
    with Shapes() as shapes:  # and the plain way does
        attention(q, k, v, document_mask(documents.to("meta")))
    assert any(shape[-2:] == (length, length) for shape in shapes.found)


def test_what_has_no_kernel_takes_the_mask():
    gpu, half = torch.device("cuda"), torch.bfloat16
    assert not has_kernel(torch.device("cpu"), half, 64)
    with twice("optim.name=sophia", "choose another"):
        assert not has_kernel(gpu, half, 64)
    found = []
    torch.vmap(lambda x: found.append(has_kernel(gpu, half, 64)) or x)(torch.ones(2))
    assert found == [False]
    assert not has_kernel(gpu, torch.float32, 64)
    assert not has_kernel(gpu, half, 60)
    assert not has_kernel(gpu, half, 264)


@pytest.mark.parametrize("begins", [offsets(DOCUMENTS), torch.empty(0, dtype=torch.int32)], ids=["packed", "whole"])
def test_a_model_with_the_kernel_compiles_as_one_graph(begins, monkeypatch):
    """What a GPU would compile, up to its kernels, which are not run: the graph is handed zeros as its results."""
    monkeypatch.setattr(trainer.model.attention, "has_kernel", lambda *_: True)
    graphs = []

    def captured(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        [outputs] = graph.graph.find_nodes(op="output")
        shapes = [node.meta["example_value"] for node in outputs.args[0]]
        return lambda *_: [torch.zeros(fake.shape, dtype=fake.dtype) for fake in shapes]

    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 48}
    model = torch.compile(Llama(50, **sizes, kernels=Kernels), backend=captured, fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros_like(DOCUMENTS), DOCUMENTS, begins=begins)
    [names] = graphs
    assert sum("varlen" in name for name in names) == (2 if len(begins) else 0)
    assert sum("scaled_dot_product" in name for name in names) == (0 if len(begins) else 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where torch finds a GPU, by make test-gpu")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_gpus_kernel_agrees_with_the_mask_and_is_the_flash_kernel(kv_heads):
    """Both are bf16 sums of products of numbers of about 1, within 2^-5 of float64's; and a second pass is equal."""
    torch.manual_seed(0)
    documents = torch.tensor([[0] * 100 + [1] * 150 + [-1] * 6, [0] * 256])
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    slope = torch.randn_like(q)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    oracle = attention(*exact, document_mask(documents.cuda()))
    with torch.autocast("cuda", torch.bfloat16):
        places = within(documents.cuda(), 64, offsets(documents).cuda())
    assert places is not None and places.dtype == torch.int32
    with torch.profiler.profile() as seen:
        ours = attention(q, k, v, places)
        gradients = torch.autograd.grad(ours, (q, k, v), slope)
    torch.testing.assert_close(ours.double(), oracle, rtol=0, atol=2**-5)
    for mine, theirs in zip(gradients, torch.autograd.grad(oracle, exact, slope.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-5, atol=2**-5)
    again = torch.autograd.grad(attention(q, k, v, places), (q, k, v), slope)
    assert all(map(torch.equal, gradients, again))
    names = {event.key for event in seen.key_averages()}
    assert any("flash_fwd" in name for name in names) and any("flash_bwd" in name for name in names)


def test_selective_checkpointing_keeps_what_the_kernel_computes():
    """Counted on the meta device: the second pass computes the layer again, but not its attention."""
    importlib.import_module("torch.nn.attention.varlen")  # as `within` does where it chooses the kernel
    begins = offsets(DOCUMENTS).to("meta")
    model = nn.Sequential(Layer(begins))
    checkpointed(model, ActivationConfig(checkpoint="selective"))
    with Calls() as calls:
        model(torch.empty(3, 4, 8, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)).sum().backward()
    assert calls.names.count("torch_attn._varlen_attn.default") == 1
    assert calls.names.count("aten.sin.default") == 2
