"""Each version of each part does what is recorded of it, and nothing else may be recorded under the same version."""

from __future__ import annotations

import golden_behaviour
import golden_record
import pytest

from hpo.declaration import behaviour

RECORDED = golden_record.recorded("behaviour.json")


def test_every_part_behaves_as_recorded(process):
    """The bundled studies' digests are those of studies/*.json, which test_golden.py compares."""
    now = golden_record.computed("--behaviour")
    lines = golden_record.differences("behaviour.json", RECORDED, now["behaviour.json"])
    if lines and (platform := golden_record.platform_differences(now)):
        pytest.skip(f"runs on the recorded platform, whose digests these are; here on {platform}")
    assert not lines, "\n".join([*lines, "undo that, or raise the part's version in hpo/declaration/behaviour.py"])


def test_every_version_that_runs_has_a_digest():
    recorded = {part: [*map(int, versions)] for part, versions in RECORDED.items()}
    assert recorded == {part: behaviour.runnable(part) for part in sorted(behaviour.parts())}
    lacking = {(part, int(version)) for part in RECORDED for version in RECORDED[part] if not RECORDED[part][version]}
    assert lacking == golden_behaviour.BY_PROCESSOR


def test_two_versions_of_a_part_differ_or_say_why():
    for part, versions in RECORDED.items():
        newest = max(versions, key=int)
        earlier = [digest for version, digest in versions.items() if version != newest]
        assert versions[newest] not in earlier or (part, int(newest)) in golden_behaviour.SAME_DIGEST, part


# --- What may be recorded


def refused(before: dict, now: dict) -> list[str]:
    return [sentence.partition(":")[0] for sentence in golden_behaviour.refusals(before, now)]


def test_another_digest_under_the_same_version_is_refused():
    [sentence] = golden_behaviour.refusals({"strategy asha": {"1": "a"}}, {"strategy asha": {"1": "b"}})
    assert sentence == (
        "strategy asha, version 1, does something else than was recorded: undo that, or raise its version by a Change "
        "in hpo/declaration/behaviour.py."
    )
    assert refused({"strategy asha": {"1": "a"}}, {"strategy asha": {"1": "a"}}) == []


def test_a_raised_version_needs_another_digest_or_a_reason(monkeypatch):
    before, same, other = {"study mlp": {"1": "a"}}, {"study mlp": {"2": "a"}}, {"study mlp": {"2": "b"}}
    assert refused(before, other) == []
    [sentence] = golden_behaviour.refusals(before, same)
    assert sentence.startswith("study mlp: version 2 does what version 1 did: say why")
    monkeypatch.setitem(golden_behaviour.SAME_DIGEST, ("study mlp", 2), "a rule that no golden run meets")
    assert refused(before, same) == []


def test_a_digest_may_change_with_a_part_that_it_is_computed_with():
    before = {"trainer step": {"1": "a"}, "study mlp": {"1": "a"}, "optimizer sgd": {"1": "a"}}
    now = {"trainer step": {"1": "a", "2": "b"}, "study mlp": {"1": "b"}, "optimizer sgd": {"1": "b"}}
    assert refused(before, now) == ["optimizer sgd, version 1, does something else than was recorded"]


def test_an_earlier_version_may_not_change_with_its_part():
    before = {"strategy asha": {"1": "a"}}
    assert refused(before, {"strategy asha": {"1": "b", "2": "c"}}) != []


def test_a_digest_that_was_not_computed_is_no_change():
    assert refused({"study lora": {"1": "a"}}, {"study lora": {"1": None}}) == []
