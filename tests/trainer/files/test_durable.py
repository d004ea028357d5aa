"""Files that are there whole or not at all."""

from __future__ import annotations

import pytest

from trainer.files.durable import replacing


def test_a_file_whose_writing_fails_is_as_it_was(tmp_path):
    target = tmp_path / "file"
    with replacing(target) as temporary:
        temporary.write_text("before")
    with pytest.raises(ZeroDivisionError), replacing(target) as temporary:
        temporary.write_text(f"after {1 / 0}")
    with pytest.raises(ZeroDivisionError), replacing(target) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "before" and [*tmp_path.iterdir()] == [target]
