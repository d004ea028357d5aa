"""Values come back from JSON as they were."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from trainer.runtime.json_encoding import decoded, encoded

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text()) | st.just("$tuple")
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner), max_leaves=20
)


@given(VALUES)
def test_a_value_survives_json(value):
    assert repr(decoded(json.loads(json.dumps(encoded(value))))) == repr(value)


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner)))
def test_what_json_holds_is_written_as_it_is(value):
    assert encoded(value) == value
