"""Holds what a snapshot of the process does with values that cannot be read."""

import importlib
import sys
from contextvars import Context
from types import ModuleType
from typing import Any

import pytest
import torch

from trainer.compat.fake import FakeTensorMode
from trainer.runtime import process_state
from trainer.runtime.process_entries import attributes
from trainer.runtime.process_state import Snapshot


@pytest.fixture
def answers(monkeypatch):
    """Returns the module that stands for a library, whose one setting is read by calling what it holds."""
    library = ModuleType("library_of_answers")
    library.setting = lambda: 1
    monkeypatch.setitem(sys.modules, library.__name__, library)
    entry = process_state.Entry(
        "the setting", library.__name__, lambda module: module.setting(), lambda module, value: None, True
    )
    monkeypatch.setattr(process_state, "ENTRIES", (entry, attributes("the mode", library.__name__, "mode")))
    return library


def raising(error):
    def read():
        raise error

    return read


@pytest.mark.parametrize("error", [AttributeError("half imported"), OSError("deleted"), RuntimeError("other build")])
def test_a_value_that_cannot_be_read_beforehand_is_left_alone(answers, error):
    answers.setting = raising(error)
    snapshot = Snapshot()
    answers.setting = lambda: 2
    assert snapshot.restore() == []


def test_a_value_that_can_no_longer_be_read_is_named(answers):
    snapshot = Snapshot()
    answers.setting = raising(OSError("deleted"))
    assert snapshot.restore() == ["the setting"]


def test_any_other_error_of_a_reader_is_raised(answers):
    answers.setting = raising(ZeroDivisionError("a fault of ours"))
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        Snapshot()


def test_an_import_while_torch_traces_is_followed(tmp_path, monkeypatch):
    """As inductor imports its passes when it first compiles a model: real tensors are refused there."""
    (tmp_path / "imported_while_tracing.py").write_text("import torch\ntorch.set_printoptions(precision=7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with process_state.following(snapshot := Snapshot()), FakeTensorMode():
        import imported_while_tracing  # pyright: ignore[reportMissingImports]
    assert imported_while_tracing.torch is torch and snapshot.restore() == []
    assert torch._tensor_str.PRINT_OPTS.precision == 7, "what an import sets stays"
    torch.set_printoptions(profile="default")


@pytest.mark.parametrize("library", ["dynamo", "inductor"])
def test_an_option_of_the_compiler_that_was_only_read_has_not_changed(library):
    """Torch overrides an option whose default is a container as soon as it is read."""
    config: Any = importlib.import_module(f"torch._{library}.config")

    def read_all():
        snapshot = Snapshot()
        for name in names:
            getattr(config, name)
        return snapshot.differing(Snapshot())

    names = [name for name, option in config._config.items() if isinstance(option.default, list | dict | set)]
    assert names and Context().run(read_all) == []  # in a context of its own, in which no option was read before


def test_an_option_of_the_compiler_that_was_set_is_unset_again():
    config: Any = importlib.import_module("torch._inductor.config")
    default, snapshot = config.max_autotune, Snapshot()
    config.max_autotune = not default
    assert snapshot.differing(Snapshot()) == ["options of torch's inductor"]
    assert snapshot.restore() == [] and config.max_autotune is default


@pytest.mark.parametrize("name", ["max_autotune", "pre_grad_fusion_options"])
def test_the_compilers_cache_knows_that_an_option_was_restored(name):
    """Compiled code is looked up by a hash of all options, which torch keeps until one is set."""
    config: Any = importlib.import_module("torch._inductor.config")
    before, snapshot = config.get_hash(), Snapshot()
    setattr(config, name, True if name == "max_autotune" else {"group_linear": {}})
    assert config.get_hash() != before
    assert snapshot.restore() == [] and config.get_hash() == before


def test_an_option_of_the_compiler_that_changed_in_place_is_restored():
    config: Any = importlib.import_module("torch._inductor.config")
    snapshot = Snapshot()
    config.pre_grad_fusion_options["group_linear"] = {}
    assert snapshot.differing(Snapshot()) == ["options of torch's inductor"]
    assert snapshot.restore() == [] and config.pre_grad_fusion_options == {}
