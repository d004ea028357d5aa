"""The next command, as a person can type it."""

import shlex

import pytest

from hpo import text


@pytest.mark.parametrize("home", ["q?x", "two words", "at@home?a=b", "it's"])
def test_the_next_command_names_the_directory_that_was_given(home):
    text.given("home", home)
    assert shlex.split(text.command("resume --study s")) == ["hpo", "resume", "--study", "s", "--home", home]


def test_a_command_of_a_page_leads_to_its_home_from_anywhere():
    text.given("home", "near")
    with text.from_anywhere("/far/home"):
        assert text.command("resume") == "hpo resume --home /far/home"
    assert text.command("resume") == "hpo resume --home near"


def test_the_next_command_is_found_where_no_path_leads_to_it(tmp_path, monkeypatch):
    """As in the terminal of one who has typed `make hpo-run` alone."""
    program = tmp_path / "an environment" / "bin" / "hpo"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o700)
    monkeypatch.setattr("sys.argv", [str(program), "run"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.split(text.command("resume")) == [str(program), "resume"]
    with text.from_anywhere("/far/home"):
        assert text.command("resume") == "hpo resume --home /far/home"
    monkeypatch.setenv("PATH", str(program.parent))
    assert text.command("resume") == "hpo resume"
    monkeypatch.setattr("sys.argv", ["my_script.py"])
    assert text.command("resume") == "hpo resume"


@pytest.mark.parametrize("url", ["postgresql://me:secret@db/ledger", "postgresql://db/ledger?password=secret"])
def test_a_url_with_a_password_is_left_to_the_environment(url):
    text.given("storage", url)
    said = text.command("resume")
    assert "secret" not in said
    assert said.startswith('hpo resume --storage "${HPO_STORAGE:?')


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.2, "0s"),
        (59.7, "1m"),
        (270.0, "4m30s"),
        (10819.0, "3h"),
        (11160.0, "3h6m"),
        (144000.0, "1d16h"),
        (86399, "1d"),
    ],
)
def test_an_expected_time_has_no_more_units_than_it_is_known_to(seconds, shown):
    assert text.roughly(seconds) == shown
