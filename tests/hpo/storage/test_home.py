"""The home: what is made in it, and what of the dead is taken out of it."""

from __future__ import annotations

import os
import stat
import time

import pytest

from hpo.child_process import begin_logs, spawn
from hpo.errors import UserError
from hpo.storage.home import Home


@pytest.mark.parametrize("named", ["argument", "environment"])
def test_a_bucket_is_no_home_and_becomes_no_directory(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPO_HOME", "s3://bucket/trials")
    with pytest.raises(UserError, match=r"'s3://bucket/trials' is a URL, and a home is a directory.* --storage"):
        Home.at("s3://bucket/trials" if named == "argument" else None)
    assert not list(tmp_path.iterdir())


def test_a_marker_that_was_half_written_is_written_anew(home):
    home.create().mark("s", "first")
    area = home.checkpoints("s", 0).parent
    (area / ".study.uid.tmp").write_text("half")
    home.create().mark("s", "second")
    assert [path.name for path in area.iterdir()] == ["study.uid"]
    home.check_mark("s", "second", "here")


def test_logs_of_the_newest_runs_stay(tmp_path):
    others = ["other.20260101T000000-1.mirror.log", "s.20260101T000000-1.worker-0.log", "ui.log"]
    for name in (*others, *(f"s.202601{day:02}T000000-1.mirror.log" for day in range(1, 15))):
        (tmp_path / name).touch()
    new = begin_logs(tmp_path, "s", "mirror")
    assert new.startswith(f"s.{time.strftime('%Y')}") and new.endswith(f"-{os.getpid()}")
    mirrors = sorted(path.name[8:10] for path in tmp_path.glob("s.*.mirror.log"))
    assert mirrors == [f"{day:02}" for day in range(6, 15)]
    assert all((tmp_path / name).exists() for name in others)


def test_a_process_of_the_platform_imports_from_where_the_command_does(tmp_path, monkeypatch, process):
    """From PYTHONPATH, and not from the current directory: a study finds its modules alike under every executor."""
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert spawn("only_here", [], tmp_path / "log").wait(60) == 1
    assert "No module named only_here" in (tmp_path / "log").read_text()
    assert spawn("only_here", [], tmp_path / "log", PYTHONPATH=str(tmp_path)).wait(60) == 0


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    ("mode", "umask", "made"),
    [(None, 0o022, 0o600), (None, 0o002, 0o600), (0o755, 0o022, 0o644), (0o2770, 0o007, 0o660), (0o770, 0o077, 0o600)],
)
def test_files_are_no_more_open_than_the_home(home, mode, umask, made):
    """A new home is its owner's alone; one that was made for a team has the files that its mode and the umask allow."""
    before = os.umask(umask)
    try:
        if mode is not None:
            home.root.mkdir()
            home.root.chmod(mode)
        with home.keeping():
            home.create().mark("s", "uid")
            assert spawn("json.tool", ["--help"], home.logs / "log").wait() == 0
        (outside := home.root.parent / "table.csv").touch()
    finally:
        os.umask(before)
    assert stat.S_IMODE(home.root.stat().st_mode) == (mode or 0o700)
    files = [path for path in home.root.rglob("*") if path.is_file()]
    assert len(files) == 2 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {made}
    assert stat.S_IMODE(outside.stat().st_mode) == 0o666 & ~umask
