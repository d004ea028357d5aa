"""Versions of behaviour: which parts a study uses, which version it keeps, and how drift reads."""

from __future__ import annotations

import pytest

import hpo
from hpo.declaration import behaviour, bundled, content
from hpo.declaration.behaviour import CHANGES, Change, clause, parts_of, runnable, settle, version
from hpo.declaration.identity import drift
from hpo.declaration.loading import shipped
from hpo.declaration.references import load

SEARCHED = {
    *("space decoding", "search seeds", "sampler auto", "sampler freeze-thaw", "sampler tpe", "sampler grid"),
    *("sampler qmc", "strategy asha"),
}
TRAINED = {f"trainer {stage}" for stage in ("step", "data order", "seeding", "checkpoint", "losses", "metrics", "data")}
FUNCTION = """
import hpo

@hpo.study(space={"lr": hpo.Float(1e-4, 1.0, log=True)}, minimize="loss")
def train(trial):
    trial.report(1, {"loss": trial.params.lr})
"""


@pytest.fixture
def quota(monkeypatch):
    """Asha's quota as it changes in a later release, which no longer has the earlier one."""
    changed = Change("strategy asha", 2, "0.3.0", "of n trials the best ceil(n / eta) go on", keeps_previous=False)
    monkeypatch.setattr(behaviour, "CHANGES", (*CHANGES, changed))


def used(reference: str, sampler: str = "auto", strategy: str = "asha", **overrides) -> set[str]:
    study = load(reference).configure(overrides)
    return set(parts_of(study, sampler, {"name": strategy}))


def identity_of(reference: str, strategy: str, stored: dict[str, int] | None = None) -> dict:
    """The component that a study stores, as it would be settled now."""
    return {"behaviour": settle(used(reference, "random", strategy), stored)}


# --- The parts that a study uses


def test_a_bundled_study_uses_the_search_the_trainer_and_its_own_code():
    parts = used("mlp")
    assert parts >= SEARCHED | TRAINED | {"optimizer adamw", "optimizer sgd", "schedule constant", "study mlp"}
    assert not parts & {"optimizer lion", "strategy median", "study atft", "trainer ranks", "trainer lanes"}


def test_a_function_uses_nothing_of_the_trainer(tmp_path):
    (tmp_path / "own.py").write_text(FUNCTION)
    assert used(f"{tmp_path}/own.py") == SEARCHED


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("train.optim.wrap", "sam", "trainer sam"),
        ("train.optim.name", "ranger", "trainer lookahead"),
        ("train.average.name", "ema", "trainer averaging"),
        ("train.gradients.centralize", True, "trainer gradients"),
        ("train.folds", 3, "trainer folds"),
        ("train.lanes", 4, "trainer lanes"),
        ("train.schedule.name", "wsd", "schedule wsd"),
    ],
)
def test_a_field_that_is_set_adds_the_part_that_reads_it(path, value, part):
    assert part not in used("mlp") and part in used("mlp", **{path: value})


def test_a_users_file_that_imports_a_bundled_study_uses_its_version(tmp_path):
    (tmp_path / "own.py").write_text("from studies.mlp import STUDY\n")

    study = load(f"{tmp_path}/own.py")
    assert content.bundled_studies(study) == ["mlp"] and [*content.code_sha256(study)] == [""]


def test_shared_code_counts_as_each_study_where_none_is_named():
    shared, gpt = bundled._STUDIES / "_lm", bundled._STUDIES / "gpt" / "task.py"
    assert bundled.studies_in([shared]) == ["bert", "dpo", "gpt", "lora", "online", "t5"]
    assert bundled.studies_in([shared, gpt]) == ["gpt"]


def test_every_study_that_comes_along_has_a_version():
    assert shipped() == list(bundled.BUNDLED)


# --- The version that a study runs


def test_a_new_study_gets_the_newest_versions():
    assert settle(["sampler tpe", "sampler random"], None) == {"sampler tpe": 2, "sampler random": 1}


def test_a_begun_study_keeps_a_version_that_still_runs():
    assert settle(["sampler tpe"], {"sampler tpe": 1}) == {"sampler tpe": 1}


def test_a_study_of_release_0_1_has_version_1_of_each_part():
    assert settle(["sampler tpe", "strategy asha"], {}) == {"sampler tpe": 1, "strategy asha": 1}


def test_a_part_that_a_begun_study_did_not_use_gets_its_newest_version():
    assert settle(["sampler tpe", "sampler gp"], {"sampler tpe": 1}) == {"sampler tpe": 1, "sampler gp": 2}


def test_a_version_that_no_longer_runs_gives_way(quota):
    assert runnable("strategy asha") == [2] and settle(["strategy asha"], {"strategy asha": 1}) == {"strategy asha": 2}


def test_changes_count_up_by_one_in_the_order_of_the_releases():
    releases = [*behaviour.RELEASES]
    assert releases[-1] == hpo.__version__
    assert [releases.index(change.release) for change in CHANGES] == sorted(
        releases.index(change.release) for change in CHANGES
    )
    for part in {change.part for change in CHANGES}:
        steps = [change.version for change in CHANGES if change.part == part]
        assert part in behaviour.parts() and steps == list(range(2, version(part) + 1)), part


def test_an_earlier_rule_is_kept_for_one_release():
    assert {change.release for change in CHANGES if change.keeps_previous} <= {hpo.__version__}


# --- Drift


def test_a_changed_quota_drifts_the_studies_of_its_strategy_alone(quota):
    for strategy, expected in (("asha", 1), ("median", 0), ("none", 0), ("hyperband", 0)):
        begun = {"behaviour": dict.fromkeys(used("mlp", "random", strategy), 1)}
        clauses = drift(begun, identity_of("mlp", strategy, begun["behaviour"]))
        assert len(clauses) == expected, strategy
    [clause_of_asha] = drift({"behaviour": {"strategy asha": 1}}, identity_of("mlp", "asha", {"strategy asha": 1}))
    assert clause_of_asha == (
        "strategy asha changed from version 1 to 2 (since release 0.3.0 of n trials the best ceil(n / eta) go on)"
    )


def test_a_changed_loss_of_atft_drifts_atft_alone(monkeypatch):
    changed = Change("study atft", 2, "0.3.0", "its loss weighs days by their stocks", keeps_previous=False)
    monkeypatch.setattr(behaviour, "CHANGES", (*CHANGES, changed))
    clauses = {}
    for reference in ("atft", "mlp", "convnet"):
        begun = dict.fromkeys(used(reference, "random"), 1)
        clauses[reference] = drift({"behaviour": begun}, identity_of(reference, "asha", begun))
    assert clauses.pop("atft") == [
        "study atft changed from version 1 to 2 (since release 0.3.0 its loss weighs days by their stocks)"
    ]
    assert clauses == {"mlp": [], "convnet": []}


def test_a_version_of_a_later_release_is_told_as_such():
    assert clause("sampler tpe", 3, 2) == "sampler tpe has version 3, and this release knows versions up to 2"


def test_a_part_that_only_one_side_uses_is_no_drift_of_its_own():
    assert drift({"behaviour": {"strategy asha": 1}}, {"behaviour": {"strategy median": 1}}) == []
