"""What a tag may be called, and what it may hold."""

from __future__ import annotations

import math

import pytest

from hpo.errors import UserError
from hpo.space import tags


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("team", "vision", "vision"), ("a/b.c-d:e f", 0.1, "0.1"), ("n", 3, "3"), ("flag", True, "True"), ("ä", "=", "=")],
)
def test_texts_and_numbers_are_tags(key, value, text):
    assert tags.checked(key, value) == (key, text)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("mlflow.runName", "x", "the tag 'mlflow.runName' is the platform's own"),
        ("hpo.state", "x", "the tag 'hpo.state' is the platform's own"),
        ("", "x", "'' cannot name a tag: use letters"),
        ("a=b\n", "x", "cannot name a tag"),
        ("../a", "x", "'../a' cannot name a tag"),
        ("/a", "x", "'/a' cannot name a tag"),
        (7, "x", "7 cannot name a tag"),
        ("k" * 251, "x", "is longer than 250 characters: shorten it"),
        ("a", "x" * 5001, "give a text of 1 to 5000 characters"),
        ("a", " ", "tag a=' ': give a text of 1 to 5000"),
        ("a", None, "tag a=None: give a text, a finite number or a boolean"),
        ("a", math.nan, "tag a=nan: give a text, a finite number"),
        ("a", ["b"], "tag a=['b']: give a text"),
    ],
)
def test_what_no_tag_can_be_is_refused_in_a_sentence(key, value, said):
    with pytest.raises(UserError) as refused:
        tags.checked(key, value)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_tags_as_they_are_typed():
    assert tags.parsed(["team=vision", "note=a=b"]) == {"team": "vision", "note": "a=b"}
    with pytest.raises(UserError, match="tag 'team' has no value: write KEY=VALUE"):
        tags.parsed(["team"])
    with pytest.raises(UserError, match="tag 'a' is given twice: leave one of '1' and '2' out"):
        tags.parsed(["a=1", "a=2"])
