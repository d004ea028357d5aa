"""Secrets out of files."""

from __future__ import annotations

import pytest

from hpo.cli.secret_files import SECRETS, read_into
from hpo.errors import UserError


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_comes_from_its_file_which_children_are_not_told_of(tmp_path, name):
    (tmp_path / "secret").write_text("of several words: ä\n")
    environ = {f"{name}_FILE": str(tmp_path / "secret"), "HOME": "/home"}
    read_into(environ)
    assert environ == {name: "of several words: ä", "HOME": "/home"}


def test_without_files_nothing_changes():
    environ = {"HPO_STORAGE": "sqlite:///x", "HPO_STORAGE_FILE": "", "OTHER_FILE": "/nowhere"}
    read_into(environ)
    assert environ == {"HPO_STORAGE": "sqlite:///x", "OTHER_FILE": "/nowhere"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"cannot be read \(No such file or directory\)"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"one\ntwo\n", "holds 2 lines"),
        (b"\xff\xfe", "is not text"),
    ],
)
def test_what_a_file_does_not_hold_is_said_with_its_setting_and_the_fix(tmp_path, content, said):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^HPO_STORAGE_FILE: {path} {said}: write the value of HPO_STORAGE into that"):
        read_into({"HPO_STORAGE_FILE": str(path)})


def test_a_directory_is_no_secret(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_into({"HPO_STORAGE_FILE": str(tmp_path)})


def test_both_are_refused(tmp_path):
    (tmp_path / "secret").write_text("a")
    with pytest.raises(UserError, match=r"^HPO_STORAGE and HPO_STORAGE_FILE are both set"):
        read_into({"HPO_STORAGE": "b", "HPO_STORAGE_FILE": str(tmp_path / "secret")})
