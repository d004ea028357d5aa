"""`--to`: what it takes, what it leaves alone, and the flags that it replaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from crafted import open_crafted, put_trial
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.cli.targets import PICTURES, target
from hpo.errors import UserError
from hpo.space.config import load_yaml
from hpo.storage.home import Home
from hpo.storage.target import check_free

# command -> a name that `--to` takes, and the old flag
WRITING = {
    "best": ("out.yaml", "--save"),
    "compare": ("out.csv", "--csv"),
    "plot history": ("out.png", "--save"),
    "plot": ("out", "--save"),
    "report": ("out.html", "--out"),
    "schedule --study mlp": ("out.svg", "--save"),
    "lr-find --study mlp": ("out.png", "--save"),
    "diagnose --study mlp": ("out", "--save"),
    "soup": ("out", "--save"),
    "export": ("out.json", None),
    "export 0": ("out.onnx", None),
}
CASES = [pytest.param(command, *rest, id=command) for command, rest in WRITING.items()]


def hpo(command: str, *words: str, home: Home):
    return CliRunner().invoke(app, [*command.split(), *words, "--home", str(home.root)])


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "name", "old"), CASES)
def test_what_is_there_is_left_alone_before_the_study_is_opened(command, name, old, here, home):
    taken = here / name
    kept = taken if taken.suffix else taken / "of mine"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    result = hpo(command, "--to", name, home=home)
    assert result.exit_code == 2 and result.stdout == "" and not home.root.exists()
    assert result.stderr.startswith(f"error: --to {name} exists already: name another ")
    assert "give --force to" in result.stderr and len(result.stderr.splitlines()) == 1
    assert kept.read_text() == "mine"


@pytest.mark.parametrize(("command", "name", "old"), CASES)
def test_what_cannot_be_written_is_refused_before_the_study_is_opened(command, name, old, here, home):
    missing = hpo(command, "--to", f"mis/spelt/{name}", home=home)
    assert missing.exit_code == 2 and "directory mis/spelt does not exist; make it, or name another" in missing.stderr
    unknown = hpo(command, "--to", "out.doc", home=home)
    assert unknown.exit_code == 2 and "--to out.doc: " in unknown.stderr
    assert Path(name).suffix in unknown.stderr or "a directory" in unknown.stderr
    assert not [*here.iterdir()]


@pytest.mark.parametrize(("command", "name", "old"), [case for case in CASES if case.values[2]])
def test_an_old_flag_says_what_it_is_called_now_and_is_in_no_help(command, name, old, here, home):
    said = hpo(command, old, name, home=home).stderr.splitlines()[0]
    assert said == f"{old} is now --to, which replaces nothing without --force; {old} ends with release 0.2."
    both = hpo(command, old, name, "--to", name, home=home)
    assert both.exit_code == 2 and f"--to {name} and its old name are both given" in both.stderr
    shown = CliRunner().invoke(app, [command.split()[0], "--help"]).stdout
    assert old not in shown and "--to" in shown and "--force" in shown


def test_an_old_flag_writes_as_it_did_over_what_is_there(here, home):
    home.create()
    ledger = open_crafted(home.root / "ledger.db")
    put_trial(ledger, 0, "complete", (0.5,), params={"train.optim.lr": 0.25})
    ledger.close()
    for _ in range(2):
        assert hpo("best", "--save", "best.txt", home=home).exit_code == 0
        assert hpo("compare", "--csv", "a", "--parquet", "b.txt", home=home).exit_code == 0
    assert load_yaml("best.txt") == {"train": {"optim": {"lr": 0.25}}}
    assert Path("a").read_text().startswith("number,state,") and Path("b.txt").read_bytes()[:4] == b"PAR1"
    for _ in range(2):
        assert hpo("best", "--to", "best.yaml", "--force", home=home).exit_code == 0
        assert hpo("compare", "--to", "all.parquet", "--force", home=home).exit_code == 0
    assert load_yaml("best.yaml") == load_yaml("best.txt")
    assert Path("all.parquet").read_bytes() == Path("b.txt").read_bytes()


def test_force_without_to_is_refused(here, home):
    result = hpo("best", "--force", home=home)
    assert result.exit_code == 2 and result.stderr == "error: --force replaces what --to names: give --to too.\n"


def test_a_report_of_several_studies_replaces_no_file_either(here, home):
    Path("a-b-report.html").write_text("mine")
    result = hpo("report a b", home=home)
    assert result.exit_code == 2 and "--to a-b-report.html exists already" in result.stderr


@pytest.mark.parametrize(
    ("to", "options", "words"),
    [
        ("a.jpg", {"endings": PICTURES}, "give a file that ends in .png, .pdf or .svg."),
        ("a", {"endings": (".csv",)}, "give a file that ends in .csv."),
        ("", {"endings": (".csv",)}, "give a file that ends in .csv."),
        ("a.pt", {"directory": True}, "give a directory: a name without an ending, or one that ends in /."),
        ("a.pt", {"directory": True, "endings": (".png",)}, "give a file that ends in .png, or a directory: a name"),
        ("s3://bucket/a.csv", {"endings": (".csv",)}, "this command writes to no URL; give a file that ends in .csv."),
        ("file/a.csv", {"endings": (".csv",)}, "directory file does not exist"),
        ("file", {"directory": True}, "is a file: name a directory."),
        ("held.csv", {"endings": (".csv",)}, "is a directory: name a file."),
        ("a" * 300 + ".csv", {"endings": (".csv",)}, "cannot be written (File name too long): name another file."),
        ("a" * 300, {"directory": True}, "cannot be written (File name too long): name another directory."),
    ],
)
def test_what_to_does_not_take_is_one_sentence(here, to, options, words):
    Path("file").touch()
    Path("held.csv").mkdir()
    for force in (False, True):
        with pytest.raises(UserError) as refused:
            target(to, force=force, **options)
        assert str(refused.value).startswith(f"--to {to}") and words in str(refused.value)


def test_what_is_free_is_taken(here):
    Path("empty").mkdir()
    Path("v1.5").mkdir()
    for to in ("empty", "v1.5", "new", "new.v2/"):
        assert target(to, directory=True, force=False) == Path(to)
    assert target("UP.CSV", endings=(".csv",), force=False) == Path("UP.CSV")
    assert target("~/a.csv", endings=(".csv",), force=True) == Path.home() / "a.csv"
    assert target(None, force=False) is None
    check_free(os.devnull, force=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as another user than root, who may write anywhere")
def test_a_directory_that_takes_no_files_is_refused(here):
    Path("closed").mkdir(mode=0o500)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        check_free("closed/a.csv", force=False)
