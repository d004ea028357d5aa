"""Transformers, which the networks are compared with."""

from __future__ import annotations

import warnings

import pytest

from trainer.runtime.quiet_imports import quiet_torchao


@pytest.fixture(scope="session")
def transformers():
    quiet_torchao()  # which transformers looks for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("transformers", reason="runs with pip install -e '.[llm]'")
