"""torch's private names stand in trainer/compat alone, each with the version in which it was seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from places import ROOT

from trainer.compat.private import SEEN, private
from trainer.errors import TrainerError

COMPAT = ROOT / "trainer" / "compat"
# Of modules, parameters, storages, tensors and optimizers, which an expression does not tell from other objects.
OF_OBJECTS = {
    *("_buffers", "_parameters", "_modules", "_non_persistent_buffers_set", "_load_state_dict_pre_hooks"),
    *("_cdata", "_version", "_base", "_indices", "_get_ddp_logging_data", "_dynamo_marked_constant"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_is_profiler_enabled", "_step_supports_amp_scaling"),
}
OTHERS = ("self", "before")  # `before` holds a process's modules
# Lists libraries' state by module and name, and leaves out what an installed release lacks.
BY_NAME = ROOT / "trainer" / "runtime" / "process_libraries.py"


def hidden(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with; none of any other expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names(source: str) -> Iterator[str]:
    """Private names of torch that a module imports or reaches by what it has imported."""
    tree, of_torch = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        for full, bound in names:
            if full.partition(".")[0] in ("torch", "torchao"):
                of_torch.add(bound)
                yield from [full] if hidden(full) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_object = node.attr in OF_OBJECTS and ast.unparse(node.value) not in OTHERS
            if of_object or (hidden(node.attr) and _root(node) in of_torch):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield from (text.value for text in node.args if isinstance(text, ast.Constant) and text.value in OF_OBJECTS)


def test_private_names_are_found():
    source = "import torch\nfrom torch import nn\nfrom torch._dynamo import config\nnn.modules._x.y\nmodel._buffers\n"
    assert [*private_names(source)] == ["torch._dynamo.config", "model._buffers", "nn.modules._x"]


def test_no_private_name_of_torch_stands_elsewhere():
    files = [path for path in sorted((ROOT / "trainer").rglob("*.py")) if COMPAT not in path.parents]
    elsewhere = {
        str(path.relative_to(ROOT)): names
        for path in files
        if path != BY_NAME and (names := sorted({*private_names(path.read_text())}))
    }
    assert elsewhere == {}


def test_each_name_was_seen_in_a_version_and_is_there():
    """Names that a function asks for are asked for here, too: a new torch that lacks one fails this test."""
    import_module("torch.nn.attention.varlen")  # which registers its operator
    for path in sorted(COMPAT.glob("*.py")):
        import_module(f"trainer.compat.{path.stem}" if path.stem != "__init__" else "trainer.compat")
    calls = [
        node
        for path in COMPAT.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "private" and isinstance(node.args[0], ast.Constant)
    ]
    names = {ast.literal_eval(call.args[0]): ast.literal_eval(call.keywords[0].value) for call in calls}

    for name, seen in names.items():
        assert private(name, seen=seen) is not None
    assert SEEN.items() >= names.items() and len(names) > 40


def test_a_name_that_torch_lacks_is_one_sentence():
    lacking = rf"^torch {re.escape(torch.__version__)} has no torch\._nothing, which was seen in torch 2\.13 last"
    with pytest.raises(TrainerError, match=lacking):
        private("torch:_nothing", seen="2.13")
