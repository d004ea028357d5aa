"""What a trial has reported against its targets."""

from __future__ import annotations

import pytest

from trainer.diagnose.targets import findings


@pytest.mark.parametrize(
    ("norms", "busy", "verdicts", "values"),
    [
        ([90.0, 1.0, 2.0, 3.0], [81.0, 85.0], ["healthy", "healthy"], [3.0, 83.0]),
        ([1.0] * 6 + [12.0, 9.0, 9.0], [80.0], ["high", "low"], [10.0, 80.0]),
        ([float("nan")], [0.0], ["high", "low"], [None, 0.0]),
        ([], [], ["not measured", "not measured"], [None, None]),
    ],
)
def test_norm_and_utilisation_are_held_against_their_targets(norms, busy, verdicts, values):
    """The norm is to be under 10 over the last third of the epochs, the GPU busy for over 80 % of the time."""
    found = findings({"train/grad_norm": norms, "train/gpu_util": busy})
    assert [one.check for one in found] == ["gradient norm", "gpu utilisation"]
    assert [one.verdict for one in found] == verdicts
    for one, value in zip(found, values, strict=True):
        assert value is None or one.value == pytest.approx(value)
        assert bool(one.advice) == (one.verdict in ("high", "low"))
    assert all("(under 10)" in f.figure or "was reported" in f.figure for f in found[:1])
