"""No password of a URL is in what `redacted` gives, wherever it stands and however badly the URL is formed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds import rounds

from hpo.errors import HpoError, StorageError
from trainer.errors import ConfigError, OutOfMemory
from trainer.redaction import redacted, redacted_url, unclear

SECRET = "tops3cr3t"


@rounds(
    ("url", "shown"),
    [
        ("postgresql+psycopg://u:tops3cr3t@h:5432/db", "postgresql+psycopg://u:***@h:5432/db"),
        ("postgresql://u:a@tops3cr3t@h/db", "postgresql://u:***@h/db"),
        ("http://u:a/tops3cr3t@h:5000", "http://u:***@h:5000"),
        ("http://u:a#tops3cr3t@h:5000", "http://u:***@h:5000"),
        ("http://u:a?tops3cr3t@h:5000", "http://***"),
        ("https://tops3cr3t@h", "https://***@h"),
        ("http://h:tops3cr3t/x", "http://h:***/x"),
        ("http://h/x?token=tops3cr3t", "http://h/x?token=***"),
        ("http://h/x?token=a@tops3cr3t", "http://***"),
        ("http://h/x#access=tops3cr3t", "http://h/x#***"),
        ("postgresql://h/db?sslmode=require&pass%77ord=tops3cr3t", "postgresql://h/db?sslmode=require&pass%77ord=***"),
        ("postgresql:/u:tops3cr3t@h", "postgresql:/u:***@h"),
        ("s3://key:tops3cr3t@bucket/x", "s3://key:***@bucket/x"),
        ("'http://u:tops3cr3t@h/?a=tops3cr3t': no", "'http://u:***@h/?a=***': no"),
        ("of http://u:tops3cr3t@h and http://v:tops3cr3t@i", "of http://u:***@h and http://v:***@i"),
    ],
)
def test_a_password_in_a_url_is_hidden(url, shown):
    assert SECRET not in redacted(url)
    assert redacted(url) == redacted(redacted(url)) == shown


@rounds("url", ["u:tops3cr3t@h/db", "postgresql//u:tops3cr3t@h", "://u:tops3cr3t@h", "http://u:a tops3cr3t@h"])
def test_what_is_given_as_a_url_and_is_none_hides_its_password_too(url):
    assert SECRET not in redacted_url(url)


@rounds(
    "text",
    [
        "http://127.0.0.1:5000).",
        "http://[::1]:5000/#/experiments/1",
        "sqlite:////home/a:b@c/ledger.db",
        "postgresql+psycopg://me@h/db?host=/run/postgresql&sslmode=require",
        "use sqlite:///PATH or postgresql+psycopg://...",
        "/home/me@host/x: no such file",
        "https://sqlalche.me/e/20/e3q8",
    ],
)
def test_what_holds_no_password_stays_as_it_is(text):
    assert redacted(text) == text


@given(
    st.sampled_from(["http", "https", "postgresql+psycopg", "mysql", "s3"]),
    st.text("aB1@:/?#%&='\"), ;.[]", min_size=0, max_size=8),
    st.text("aB1@:/?#%&='\").[]", min_size=0, max_size=8),
)
def test_no_password_is_shown_whatever_its_characters(scheme, before, after):
    url = f"{scheme}://user:{before}{SECRET}{after}@host:5000/path?mode=ro"
    assert SECRET not in redacted_url(url)
    assert " " in before or SECRET not in redacted(f"API request to {url} failed")
    assert any(c in before + after for c in "@/?# ") == unclear(url)


@given(st.text("aB1@:/?#%&='\"), .*", max_size=40))
def test_hiding_twice_is_hiding_once(text):
    for hide in (redacted, redacted_url):
        assert hide(hide(f"http://{text}")) == hide(f"http://{text}")


@pytest.mark.parametrize("kind", [HpoError, StorageError, ConfigError])
def test_an_error_never_holds_a_password(kind):
    assert SECRET not in repr(kind(f"MLflow at http://u:{SECRET}@h cannot be used"))
    assert OutOfMemory("none is left", 3).micro_batch_size == 3


def test_a_long_text_takes_no_long_time():
    text = "a" * 2_000_000 + ":/" + "b:@" * 100_000
    assert len(redacted(text)) < 2_000_010
