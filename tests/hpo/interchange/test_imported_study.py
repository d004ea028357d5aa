"""What an imported study is to the commands: looked at like any other, never driven, a beginning for one that is."""

from __future__ import annotations

import json
from contextlib import closing

import optuna
import pytest
from sqlalchemy import func, select
from study_runs import hpo, refused

import hpo as platform
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import UserError
from hpo.interchange import study as studies
from hpo.interchange.record import ImportedStudy, ImportedTrial, Point
from hpo.interchange.rows import row
from hpo.ledger import Ledger, imports, queries
from hpo.ledger.database.tables import reports, trials
from hpo.ledger.database.tables import studies as study_table
from hpo.space.objective import Objective

LOSS = (Objective("val/loss", "minimize"),)


def found(count: int = 3, label: str = "sweep", **given) -> ImportedStudy:
    """A study of trials that are the better the higher their number."""
    made = [
        ImportedTrial(
            f"t{n}",
            "complete",
            {"train.optim.lr": 0.01 / (n + 1), "model.hidden_size": 16},
            [1.0 / (n + 1)],
            curves={"val/loss": [Point(1, 2.0), Point(2, 1.0 / (n + 1))]},
            started=1000.0 + n,
            ended=1001.0 + n,
        )
        for n in range(count)
    ]
    return ImportedStudy("wandb", label, "/runs", LOSS, made, **given)


def written(home, study: ImportedStudy, name: str | None = None) -> studies.Imported:
    name, study = studies.checked(study, name)
    with closing(Ledger(home.create().storage)) as ledger:
        return studies.import_study(study, ledger, home, home.tracking_uri, name)


@pytest.mark.whole
def test_every_command_takes_an_imported_study(asset, home):
    """From the import by the command to its removal; the ledger, MLflow and the home agree in between."""
    database = str(asset("optuna-5.0.0.db.xz"))
    said = hpo("import", "optuna", database, home=home)
    assert said.exit_code == 0 and "study digits-sweep: 12 new trials of 12" in said.output
    assert (
        "not carried: 1 trial in state RUNNING, which may end yet" in said.output and "MLflow shows it" in said.output
    )
    assert "imported from optuna 'digits sweep' of" in hpo("status", home=home).stdout
    best = hpo("best", home=home).stdout
    assert "search on from it: hpo run --study STUDY --warm-start digits-sweep" in best and "train it" not in best
    shown = hpo("show", "8", home=home).stdout
    assert "imported from optuna 'digits sweep', where it is 8 " in shown and 'note: {"seen": [8, null]}' in shown
    assert len(json.loads(hpo("compare", "--json", "--top", "50", home=home).stdout)) == 12
    drawn = hpo("plot", "history", "slice", "curves", "--to", str(home.root / "p"), home=home)
    assert drawn.exit_code == 0 and (home.root / "p" / "slice.png").is_file()
    assert hpo("importance", home=home).exit_code == 0
    assert hpo("verify", home=home).stdout.startswith("0 differences; checked 1 study, 12 trials")
    again = hpo("import", "optuna", database, home=home)
    assert "study digits-sweep: 0 new trials of 12" in again.output
    assert hpo("export", "--to", str(home.root.parent / "out.json"), home=home).exit_code == 0
    for words in (("resume",), ("soup",), ("export", "0", "--to", "x.onnx"), ("confirm",), ("ablate",)):
        assert "was imported and has no code to train by, so it is never resumed" in refused(hpo(*words, home=home), 2)
    assert hpo("rm", "--study", "digits-sweep", "--yes", home=home).exit_code == 0
    assert hpo("verify", home=home).stdout.startswith("0 differences")


def test_an_exported_file_is_replaced_only_by_force(home, tmp_path):
    written(home, found(), "mlp")
    for ending in ("json", "csv", "parquet"):
        file = tmp_path / f"mine.{ending}"
        file.write_text("mine")
        said = refused(hpo("export", "--to", str(file), home=home), 2)
        assert said == f"error: --to {file} exists already: name another file, or give --force to replace it.\n"
        assert file.read_text() == "mine"
        assert hpo("export", "--to", str(file), "--force", home=home).exit_code == 0
        assert file.read_bytes() != b"mine"
    database = ("export", "--to", str(tmp_path / "mine.db"))
    assert "is never replaced: give another --name" in refused(hpo(*database, "--force", home=home), 2)
    for name in ("one", "two"):  # a storage takes more than one study
        assert hpo(*database, "--name", name, home=home).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--to s3://bucket/trials.csv", "--to s3://bucket/trials.csv: export writes to no such URL: name a file that"),
        ("--to s3://key:secret@bucket/trials", "--to s3://key:***@bucket/trials: export writes to no such URL"),
        ("--to file:///srv/trials.csv", "or a database, such as sqlite:///study.db or postgresql+psycopg://HOST/NAME."),
        ("--to postgresql+nosuch://host/name", "export writes to no such URL"),
        ("--to postgresql://host:port/name", "export writes to no such URL"),
        ("--to ://name", "--to ://name: export writes to no such URL"),
        ("--to sqlite://", "--to sqlite://: export writes to no such URL"),  # in memory, and gone with the command
        ("--to s3://bucket/trials --format csv", "--to s3://bucket/trials: csv goes to no URL: name a file."),
        ("0 --to s3://bucket/model.onnx", "--to s3://bucket/model.onnx: this command writes to no URL; name a file."),
    ],
)
def test_a_url_that_takes_no_export_is_refused_before_the_study_is_opened(home, words, said):
    error = refused(hpo("export", *words.split(), home=home), 2)
    assert said in error and len(error.splitlines()) == 1 and not home.root.exists()


def test_a_run_by_the_name_of_an_imported_study_is_refused(home):
    written(home, found(), "mlp")
    with closing(Ledger(home.storage)) as ledger, pytest.raises(UserError, match="was imported"):
        declare(request_of(home, reference="mlp", trials=1), ledger, workers=1)


MINE = """
import hpo

@hpo.study(space={"lr": hpo.Float(1e-4, 1.0, log=True)}, minimize="val/loss", strategy="none")
def mine(trial):
    trial.report(1, {"val/loss": trial.params.lr})
"""


@pytest.mark.whole
def test_a_study_begins_with_what_an_imported_one_has_found(home, tmp_path):
    """An imported study teaches by default too, by the values of its parameters."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    written(home, studies.renamed(found(5), {"train.optim.lr": "lr"}))
    with closing(Ledger(home.storage)) as ledger:
        specs = [
            declare(request_of(home, reference=str(file), learn_from=learn_from, sampler="tpe"), ledger, workers=1).spec
            for learn_from in ("auto", "sweep")
        ]
    assert specs[0] == specs[1] and specs[0].learn_from == ["sweep"]
    assert specs[0].knowledge["portfolio"] == [{"study": "sweep", "params": {"lr": 0.01 / 5}}], "of the least loss"
    assert specs[0].knowledge["studies"][0]["trials"] == 5
    written(home, studies.renamed(found(5), {"train.optim.lr": "other"}), "unlike")
    with (
        closing(Ledger(home.storage)) as ledger,
        pytest.raises(UserError, match="it has searched none of this study's dimensions"),
    ):
        declare(request_of(home, reference=str(file), warm_start="unlike", sampler="tpe"), ledger, workers=1)
    said = hpo("run", "--study", str(file), "--warm-start", "sweep", "--trials", "1", "--executor", "inline", home=home)
    assert said.exit_code == 0 and "learned from sweep (5 trials): the search tries 1 configuration" in said.output


def test_another_study_of_the_name_is_not_added_to(home):
    written(home, found())
    with pytest.raises(UserError, match=r"was imported from wandb 'sweep', and not from wandb 'other': .*--name\.$"):
        written(home, found(label="other"), "sweep")
    changed = ImportedStudy("wandb", "sweep", "/runs", (Objective("val/loss", "maximize"),), found().trials)
    with pytest.raises(UserError, match="is judged by minimize val/loss, and this import by maximize val/loss"):
        written(home, changed)
    assert len(platform.open("sweep", home=home.root).trials()) == 3


def test_a_native_study_is_not_added_to(home, made):
    with pytest.raises(UserError, match="study 's' of this home was not imported: give the import another name"):
        written(home, found(), "s")


@pytest.fixture
def made(home):
    from mirrored import Made

    return Made(home)


def test_an_import_that_fails_half_way_leaves_nothing(home, monkeypatch):
    """One transaction: neither the study nor the trials before the one that fails."""
    insert, left = imports._insert, [2]

    def failing(*given):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the power is gone")
        insert(*given)

    monkeypatch.setattr(imports, "_insert", failing)
    with pytest.raises(RuntimeError):
        written(home, found())
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        for table in (study_table, trials, reports):
            assert connection.execute(select(func.count()).select_from(table)).scalar_one() == 0


def test_two_imports_at_once_never_write_a_trial_twice(home):
    """The second, whose view of the study is older, is asked to read again."""
    written(home, found(2))
    more = found(4)
    with closing(Ledger(home.storage)) as ledger:
        with ledger.read() as connection:
            stale = dict(connection.execute(study_table.select()).mappings().one())
        written(home, found(3))
        spec = {**stale["spec"], "metrics": ["other"]}
        rows = [row(one, "wandb", LOSS, (), 0.0) for one in more.trials]
        with pytest.raises(UserError, match="has been changed while it was read: import it again"):
            ledger.transact(lambda connection: imports.add(connection, stale | {"spec": spec}, rows, spec))
    assert written(home, more).added == 1 and len(platform.open("sweep", home=home.root).trials()) == 4


def test_what_was_stopped_before_it_had_reported_is_infeasible(home):
    """It has nothing to be judged by; and neither has what is complete with a value that is none."""
    odd = [
        ImportedTrial("a", "pruned", {"x": 1}),
        ImportedTrial("b", "complete", {"x": 2}, [float("inf")]),
        ImportedTrial("c", "pruned", {"x": 3}, curves={"val/loss": [Point(4, 0.5)]}),
        ImportedTrial("d", "complete", {"x": 4}, [0.1], constraints={"constraint/latency": 2.0}),
        ImportedTrial("e", "complete", {"x": 5}, [0.2], constraints={"constraint/latency": -2.0}),
    ]
    written(home, ImportedStudy("wandb", "odd", "/runs", LOSS, odd))
    handle = platform.open("odd", home=home.root)
    frame = handle.trials()
    assert list(frame["state"]) == ["infeasible", "infeasible", "pruned", "infeasible", "complete"]
    assert frame["value"].iloc[2] == 0.5 and handle.best["number"] == 4
    assert handle.trial(2)["decisions"][0]["reason"] == "wandb stopped it"
    states = [trial.state for trial in handle.to_optuna().trials]
    assert states[3] is optuna.trial.TrialState.COMPLETE and states[2] is optuna.trial.TrialState.PRUNED


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_the_ledgers_of_both_kinds_hold_what_is_imported(home, database, request):
    """Names, texts and numbers that one of them would refuse."""
    odd = {"a.b": "nul \0", "sürprise": [1, {"x": None}], "big": 10**18, "n": float("nan")}
    trial = ImportedTrial("k\0", "complete", odd, [1.0], attributes={"odd": [float("nan"), "\0", "\ud800"]})
    url = home.storage if database == "sqlite" else request.getfixturevalue("postgres_database")()
    home.create()
    with closing(Ledger(url)) as ledger:
        name, study = studies.checked(ImportedStudy("csv", "odd", "/t", LOSS, [trial]), None)
        assert studies.import_study(study, ledger, home, home.tracking_uri, name).added == 1
        assert studies.import_study(study, ledger, home, home.tracking_uri, name).added == 0
        with ledger.read() as connection:
            [only] = queries.trial_rows(connection, queries.study_row(connection, "odd").id)
    assert only.params["n"] == "nan" and only.params["big"] == 10**18


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("csv", "t.csv", "--metric", "loss", "--rename", "lr"),
            "--rename lr: write OLD=NEW, for example --rename lr=",
        ),
        (("csv", "t.csv", "--metric", "loss", "--rename", "lr=n"), "two names of trial 0 of t.csv would be one"),
        (("csv", "t.csv", "--metric", "loss", "--name", "a b"), "study name 'a b' cannot be used"),
        (("csv", "nowhere.csv", "--metric", "loss"), "nowhere.csv is not a file"),
        (("csv", "t.csv", "--metric", "loss", "--tracking-uri", "nowhere"), "--tracking-uri 'nowhere' cannot be used"),
        (("ray", "nowhere", "--metric", "loss"), "nowhere is not a directory"),
        (("nothing", "x"), "No such command 'nothing'"),
    ],
)
def test_a_mistyped_import_is_one_sentence(home, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("lr,n,loss\n0.1,1,2\n")
    assert said in refused(hpo("import", *words, home=home), 2)
    assert not (home.root / "ledger.db").exists()


def test_the_space_grows_with_what_is_imported(home):
    written(home, found(2))
    grown = written(home, found(4))
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        spec = queries.study_row(connection, "sweep").spec
    assert spec.imported["space"]["train.optim.lr"]["low"] == 0.01 / 4
    assert grown.guessed == ["the space of train.optim.lr, model.hidden_size from the values that were tried"]


def test_a_report_of_an_imported_study_offers_what_can_be_done(home, tmp_path):
    written(home, found(5))
    out = tmp_path / "page.html"
    told = hpo("report", "--to", str(out), home=home)
    assert told.exit_code == 0, told.output
    page = out.read_text(encoding="utf-8")
    assert "hpo run --study STUDY --warm-start sweep" in page
    assert "hpo confirm --study" not in page and "hpo ablate --study" not in page
