"""What a study is, resolved once: the same in the driver that declares it and in whoever opens its row."""

from __future__ import annotations

import pytest

from hpo.declaration.resolved import ResolvedStudy
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.storage.home import Home


@pytest.mark.parametrize(
    ("strategy", "pauses", "breeds", "ranks_losses"),
    [
        ("none", False, False, False),
        ("asha", False, False, True),
        ("asha-promote", True, False, True),
        ("pbt", False, True, False),
    ],
)
def test_a_strategy_is_asked_once_what_it_is(tmp_path, strategy, pauses, breeds, ranks_losses):
    resolved = declare(request_of(Home(tmp_path), reference="mlp", strategy=strategy), None, workers=1)
    assert (resolved.promotion is not None, resolved.population is not None) == (pauses, breeds)
    assert resolved.bounded == ranks_losses and resolved.strategy is resolved.strategy


def test_a_stored_study_is_the_one_that_was_declared(tmp_path):
    """A row has nothing but JSON; overrides, a tier and the strategy's options come back as they were."""
    overrides = {"train.num_epochs": 3, "train.lanes": 2}
    request = request_of(Home(tmp_path), reference="gpt", strategy="hyperband", overrides=overrides, tier=1)
    declared = declare(request, None, workers=1)
    stored = ResolvedStudy.stored(declared.spec.to_json())
    assert stored.spec == declared.spec and stored.strategy == declared.strategy
    assert stored.study.config == declared.study.config
    assert stored.study.space.describe() == declared.study.space.describe(), "that of the tier, not of all tiers"
    assert stored.study.shape == declared.study.shape
    shape = stored.study.shape
    assert (shape.epochs, shape.lanes, shape.folds, shape.ranks) == (3, 2, 1, 1)
    assert not stored.study.trains_itself


def test_what_is_tried_first_is_read_from_the_specification_alone(tmp_path):
    """A declaration whose first configurations fit the space no more can still be read."""
    file = tmp_path / "tried.py"
    text = (
        "import hpo\n\n\n@hpo.study(space={'x': hpo.Float(0.0, 1.0)}, minimize='loss', enqueue=[{'x': 0.5}])\n"
        "def tried(trial):\n    return trial.params.x\n"
    )
    file.write_text(text)
    spec = declare(request_of(Home(tmp_path), reference=f"{file}:tried"), None, workers=1).spec.to_json()
    assert spec["enqueue"] == [{"x": 0.5}]
    file.write_text(text.replace("[{'x': 0.5}]", "[{'y': 0.5}]"))
    opened = ResolvedStudy.stored(spec)
    assert opened.spec.enqueue == [{"x": 0.5}] and opened.study.trains_itself
