"""The pause between two tries."""

from __future__ import annotations

from hpo.clock import Backoff


def test_a_pause_doubles_to_its_longest_and_begins_again():
    backoff = Backoff(0.5, 3.0)
    pauses = []
    for _ in range(5):
        pauses.append(backoff.seconds)
        backoff.grow()
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.seconds == 0.5
