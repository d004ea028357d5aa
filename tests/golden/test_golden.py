"""What the product does today is what is recorded; `make golden` shows all that differs and says how to accept it."""

from __future__ import annotations

import re
from typing import Any

import golden_record
import pytest

NAMES = golden_record.recorded_names()


def assert_recorded(now: dict[str, Any]) -> None:
    """Fails with every difference, a line each; skips what only holds on one platform where the platform is another."""
    assert sorted(now) == NAMES, golden_record.ACCEPT
    platform = golden_record.platform_differences(now)
    lines = [
        line
        for name in NAMES
        if name != "platform.json"
        for line in golden_record.differences(name, golden_record.recorded(name), now[name], exact=not platform)
    ]
    assert not lines, "\n".join(["what is recorded differs:", *lines, golden_record.ACCEPT])
    if platform:
        how = f"losses agree to {golden_record.RELATIVE:.0%} or {golden_record.ABSOLUTE}"
        left_out = f"no digest of a study, of the matrix or of the home is compared, and {how}"
        pytest.skip(f"runs whole on the recorded platform; on {platform}, {left_out}")


def test_what_the_product_does_is_as_recorded(process):
    assert_recorded(golden_record.computed())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_study_and_every_cell_of_the_matrix_are_as_recorded(process):
    assert_recorded(golden_record.computed("--all"))


def test_every_recorded_run_has_a_digest_or_is_refused():
    matrix = golden_record.recorded("matrix.json")
    runs = {name: golden_record.recorded(name) for name in NAMES if name == "home.json" or name.startswith("studies/")}
    for kind, rows in matrix.items():
        runs |= {f"{kind}, {one}, {two}": cell for one, row in rows.items() for two, cell in row.items()}
    assert [title for title, run in runs.items() if not (run and {"digest", "refused"} & run.keys())] == []


def test_nothing_recorded_says_where_a_module_lies():
    modules = re.compile(r"\b(hpo|trainer)(\.[a-z_]+)+:[A-Z]|\b(hpo|trainer)/\w+\.py|<class '")
    texts = {name: (golden_record.HERE / name).read_text() for name in NAMES}
    assert {name: found[0] for name, text in texts.items() if (found := modules.search(text))} == {}


# --- How differences are told


def test_a_difference_names_its_place_and_both_values():
    before = {"digest": "a", "trials": [{"metrics": {"val/loss": [0.5, 0.25]}}], "gone": 1}
    after = {"digest": "b", "trials": [{"metrics": {"val/loss": [0.5, 0.125]}}], "more": 1}
    assert golden_record.differences("studies/x.json", before, after) == [
        "studies/x.json: digest: recorded 'a', now 'b'",
        "studies/x.json: trials[0] > metrics > val/loss[1]: recorded 0.25, now 0.125",
        "studies/x.json: gone is gone",
        "studies/x.json: more is new",
    ]


def test_a_changed_help_is_shown_by_its_lines():
    lines = golden_record.differences("help/x.txt", "Usage: x\n\n  --old\n", "Usage: x\n\n  --new\n")
    assert [line for line in lines if line[12:13] in "+-"] == ["help/x.txt: -  --old", "help/x.txt: +  --new"]


def test_on_another_platform_losses_are_compared_with_a_tolerance():
    before = {"digest": "a", "val/loss": [1.0], "val/accuracy": [0.5]}
    near, far = ({"digest": "b", "val/loss": [loss], "val/accuracy": [0.9]} for loss in (1.01, 1.1))
    assert golden_record.differences("x", before, near, exact=False) == []
    assert golden_record.differences("x", before, far, exact=False) == ["x: val/loss[0]: recorded 1.0, now 1.1"]


def test_a_last_bit_and_a_value_that_is_not_finite_are_differences():
    assert golden_record.differences("x", [0.1], [0.1 + 2**-56]) == ["x: [0]: recorded 0.1, now 0.10000000000000002"]
    assert golden_record.differences("x", [1.0], [float("nan")], exact=False) == ["x: [0]: recorded 1.0, now nan"]
    assert golden_record.differences("x", [float("nan")], [float("nan")]) == []
