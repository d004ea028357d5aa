"""`hpo rm`: what goes, what stays, who is refused, and that the next call finishes what a kill has cut short."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from mirrored import ENVIRONMENT, ME, Made, sync
from sqlalchemy import func, select, update
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.clock import SystemClock
from hpo.driver import removal
from hpo.errors import Busy
from hpo.ledger import leases, queries
from hpo.ledger.database import tables
from hpo.ledger.removal import check_whole
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.verify import verify
from trainer.files.s3 import Bucket


def study(home: Home, name: str, **environment: str) -> Made:
    """Two trials, of which one has failed, with checkpoints and a file, told and mirrored into the home."""
    made = Made(home, name)
    with made.ledger.write() as connection:
        row = {**ENVIRONMENT, "home": str(home.root), "tracking_uri": home.tracking_uri, "host": ME.host, **environment}
        mine = tables.studies.c.id == made.id
        connection.execute(update(tables.studies).where(mine).values(environment=row))
    for kind, values in (("complete", [0.5]), ("user_error", None)):
        made.ask()
        taken = made.claim()
        made.report(taken, 1, {"val/loss": 0.5}, epoch=1, checkpoint=made.checkpoint(taken, 1))
        made.artifact(taken, "note.txt", name)
        made.finish(taken, kind, 1, values, error="" if values else "no")
    home.mark(name, made.uid)
    made.end()
    sync(made)
    return made


@pytest.fixture
def both(home, empty_mlflow) -> Iterator[tuple[Made, Made]]:
    """A study and one derived from it, whose name begins with its own."""
    shutil.copyfile(empty_mlflow, home.create().root / "mlflow.db")
    made = study(home, "s"), study(home, "s-confirm")
    for name in ("s.20260101T000000-7.0.log", "s-confirm.20260101T000000-7.0.log"):
        (home.logs / name).parent.mkdir(exist_ok=True)
        (home.logs / name).touch()
    yield made
    for one in made:
        one.ledger.close()


def rm(home: Home, *arguments: str, name: str = "s", input: str | None = None):
    return CliRunner().invoke(app, ["rm", "--study", name, "--home", str(home.root), *arguments], input=input)


def runs(home: Home, name: str, uid: str) -> int:
    tracker = MlflowTracker(home.tracking_uri, home.artifacts)
    found = len(tracker.find(name, uid)) + len(tracker.find(name, uid, children=True))
    tracker.close()
    return found


def left(home: Home, name: str) -> list[str]:
    """What any file or directory of the home is called after the study."""
    own = (f"{name}", f"{name}.2026")
    return sorted(
        str(path.relative_to(home.root))
        for path in home.root.rglob("*")
        if path.name == own[0] or path.name.startswith(own[1])
    )


def rows(made: Made) -> dict[str, int]:
    """Rows of each table that hold anything of a study."""
    counts = {}
    with made.ledger.read() as connection:
        for table in tables.metadata.sorted_tables:
            if table.name not in ("workers", "audit", "compatibility"):
                counts[table.name] = connection.execute(select(func.count()).select_from(table)).scalar_one()
    return {name: count for name, count in counts.items() if count}


def sound(home: Home) -> None:
    report = verify(home, home.storage)
    assert (report.differences, report.behind) == ([], 0)


def test_a_study_goes_from_ledger_files_and_mlflow_and_no_other_does(both, home):
    made, derived = both
    kept = {path: path.read_bytes() for path in home.root.rglob("*") if path.is_file() and "s-confirm" in str(path)}
    digest = derived.ledger.look(lambda c: queries.digest(c, queries.study_row(c, "s-confirm")))
    said = rm(home, "--yes")
    assert said.exit_code == 0, said.output
    assert "deleted study s: 2 trials, 2 checkpoints (0.00 MB)" in said.stdout and "3 runs in MLflow" in said.stdout
    assert left(home, "s") == [] and runs(home, "s", made.uid) == 0
    assert runs(home, "s-confirm", derived.uid) == 3
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert digest == derived.ledger.look(lambda c: queries.digest(c, queries.study_row(c, "s-confirm")))
    sound(home)
    again = rm(home, "--yes")
    assert again.exit_code == 2 and "no study 's' in this ledger (it holds s-confirm)" in again.stderr
    assert rm(home, "--yes", name="s-confirm").exit_code == 0
    assert rows(made) == {}
    sound(home)
    study(home, "s").ledger.close()  # the name is free again, in MLflow too
    sound(home)


def ids(made: Made) -> list[int]:
    rows = made.ledger.look(lambda c: c.execute(select(tables.trials.c.id).where(tables.trials.c.study_id == made.id)))
    return sorted(row[0] for row in rows)


def test_numbers_of_rows_that_come_back_are_not_taken_for_the_old_ones(both, home):
    """SQLite gives a row the number of a removed one again: no run, cursor, checkpoint or artifact goes by it."""
    made, derived = both
    old = made.id, ids(made)
    assert rm(home, "--yes", name="s-confirm").exit_code == 0 and rm(home, "--yes").exit_code == 0
    new = study(home, "t")
    assert (new.id, ids(new)) == old, "the same numbers, under another name and uid"
    assert runs(home, "t", new.uid) == 3 and runs(home, "s", made.uid) == runs(home, "s", new.uid) == 0
    assert new.uid not in (made.uid, derived.uid)
    files = {path.read_text() for path in home.root.rglob("note.txt")}
    assert files == {"t"}
    sound(home)
    new.ledger.close()


def test_a_dry_run_and_an_answer_of_no_change_nothing(both, home, monkeypatch):
    made, _ = both
    before = rows(made)
    assert rm(home, "--dry-run").stdout.startswith("would delete study s: 2 trials, ")
    refused = rm(home)
    assert refused.exit_code == 2 and "give --yes to delete it" in refused.stderr
    monkeypatch.setattr("hpo.cli.removal.is_terminal", lambda: True)
    said = rm(home, input="n\n")
    assert said.exit_code == 1 and "nothing is deleted." in said.stdout
    assert rows(made) == before
    sound(home)
    assert "deleted study s" in rm(home, input="y\n").stdout


@pytest.mark.parametrize("role", ["driver", "mirror"])
def test_a_study_that_is_driven_or_mirrored_is_refused(both, home, role):
    made, _ = both
    lease = leases.acquire(made.ledger, f"{role}:{made.id}", "s", ME, SystemClock(), 30.0)
    # The lease is held by this very process, so what asks for it must be another one.
    other = replace(ME, id="f" * 32)
    before = rows(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(removal.Process, "current", lambda: other)
        with pytest.raises(Busy, match=f"already has a {role}"):
            removal.remove(made.ledger, home, "s")
    lease.release()
    assert rows(made).keys() - {"leases"} == before.keys() - {"leases"}
    sound(home)


def test_a_trial_that_a_living_worker_trains_keeps_its_study(both, home):
    made, _ = both
    made.ask()
    with made.ledger.write() as connection:
        connection.execute(update(tables.studies).where(tables.studies.c.id == made.id).values(state="open"))
    made.claim()  # by this process
    with pytest.raises(Busy, match=r"trial 2 of study 's' is being trained by host .*, pid \d+"):
        removal.remove(made.ledger, home, "s")


def test_what_another_study_begins_from_is_kept(both, home, tmp_path):
    made, derived = both
    named = next(made.home.checkpoints("s", 0).glob("step-*"))
    with made.ledger.write() as connection:
        row = queries.study_row(connection, "s-confirm")
        spec = row.spec.json | {"overrides": {"train.resume_from": str(named)}}
        connection.execute(update(tables.studies).where(tables.studies.c.id == derived.id).values(spec=spec))
    linked = tmp_path / "linked"
    linked.symlink_to(made.home.root)
    for at, flag in ((Home.at(linked), "--yes"), (home, "--dry-run")):
        assert (refused := rm(at, flag)).exit_code == 2 and "remove that study first" in refused.stderr
    said = rm(home, "--yes")
    assert said.exit_code == 2
    assert said.stderr == (
        f"error: study 's-confirm' begins from a checkpoint of study 's', {named}: remove that study first.\n"
    )
    assert rm(home, "--yes", name="s-confirm").exit_code == 0
    assert rm(home, "--yes").exit_code == 0


def test_of_a_copied_home_the_first_one_keeps_all_it_has(both, home, tmp_path):
    made, _ = both
    copy = Home.at(shutil.copytree(home.root, tmp_path / "copy"))
    assert rm(copy, "--yes").exit_code == 0
    assert verify(copy, copy.storage).differences == []
    assert left(copy, "s") == []
    sound(home)
    assert runs(home, "s", made.uid) == 3


def test_the_wrong_home_is_refused_before_anything_goes(both, home, tmp_path):
    made, _ = both
    before = rows(made)
    said = rm(Home.at(tmp_path / "other").create(), "--yes", "--storage", home.storage)
    assert said.exit_code == 2 and "is not the one study 's' is driven from" in said.stderr
    assert rows(made) == before | {"leases": before["leases"] + 1}  # the free one of the driver
    sound(home)


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("where", ["after_mark", "after_runs", "after_files"])
def test_killed_anywhere_the_next_call_finishes(both, home, where):
    made, derived = both
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"removal.{where}=kill@1"}
    line = [sys.executable, "-m", "hpo", "rm", "--study", "s", "--yes", "--home", str(home.root)]
    killed = subprocess.run(line, env=environ, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = f"`hpo rm --study s --home {home.root}`"
    for command in (["resume"], ["sync"]):
        result = CliRunner().invoke(app, [*command, "--study", "s", "--home", str(home.root)])
        assert result.exit_code == 2 and f"study 's' is half removed: {again} finishes that" in result.stderr
    [difference] = verify(home, home.storage).differences
    assert difference == "s: its removal was cut short: `hpo rm --study s` finishes it"
    assert rm(home, "--yes").exit_code == 0
    assert left(home, "s") == [] and runs(home, "s", made.uid) == 0 and runs(home, "s-confirm", derived.uid) == 3
    sound(home)


def test_a_bucket_is_freed_of_this_study_alone(home, bucket, empty_mlflow):
    shutil.copyfile(empty_mlflow, home.create().root / "mlflow.db")
    made = study(home, "s")
    row = made.ledger.look(lambda connection: queries.study_row(connection, "s"))
    with made.ledger.write() as connection:
        environment = {**row.environment, "checkpoints": bucket}
        connection.execute(update(tables.studies).values(environment=environment))
    locations.mark(home, replace(row, environment=environment))
    mine, others = f"s.{made.uid}", (f"s-confirm.{made.uid}", f"s.{'0' * 32}")
    for folder in (mine, *others):
        Bucket(bucket).below(folder).put_new("checkpoints/s/00000/step-1/manifest.json", b"{}")
    removal.remove(made.ledger, home, "s")
    assert Bucket(bucket).keys(mine) == []
    assert all(Bucket(bucket).keys(folder) for folder in others)
    made.ledger.close()


def test_a_server_that_is_gone_is_named_and_may_be_left(both, home):
    made, _ = both
    with made.ledger.write() as connection:
        row = {"tracker": "http://127.0.0.1:9", "study_id": made.id, "number": -1, "run_id": "r", "revision": 0}
        connection.execute(tables.mirrors.insert().values(row))
    said = rm(home, "--yes")
    assert said.exit_code == 1 and "MLflow at http://127.0.0.1:9 does not answer now" in said.stderr
    assert "nothing is deleted; try again once it answers, or leave the runs there by --leave-mlflow." in said.stderr
    check_whole(made.ledger.look(lambda connection: queries.study_row(connection, "s")))
    assert runs(home, "s", made.uid) == 3, "not even where it answers"
    said = rm(home, "--yes", "--leave-mlflow")
    assert said.exit_code == 0 and "; what stays: " in said.stdout
    assert left(home, "s") == ["artifacts/s"], "MLflow's, as its runs"
    sound(home)


def derive(made: Made, name: str, of: str) -> None:
    """Makes a study that of another one."""
    with made.ledger.write() as connection:
        row = queries.study_row(connection, name)
        spec = row.spec.json | {"listed_of": of}
        connection.execute(update(tables.studies).where(tables.studies.c.id == row.id).values(spec=spec))


def test_the_derived_studies_that_stay_are_named_with_what_deletes_them(both, home):
    """Also one that is derived from one of them, by a dry run and by the removal."""
    Made(home, "s-confirm-extend").ledger.close()
    derive(both[0], "s-confirm", "s")
    derive(both[0], "s-confirm-extend", "s-confirm")
    stay = "s-confirm, s-confirm-extend, derived from it, stay: "
    stay += f"`hpo rm --study s-confirm --home {home.root}` and `hpo rm --study s-confirm-extend --home"
    dry = rm(home, "--dry-run")
    assert dry.exit_code == 0 and stay in dry.stdout, dry.output
    assert json.loads(rm(home, "--dry-run", "--json").stdout)["derived"] == ["s-confirm", "s-confirm-extend"]
    assert "derived from" not in rm(home, "--dry-run", name="s-confirm-extend").stdout
    deleted = rm(home, "--yes")
    assert deleted.exit_code == 0 and stay in deleted.stdout


def test_beside_trials_the_only_study_may_be_left_out(both, home):
    """A derived study does not count as a second one; a whole study is deleted by its name alone."""
    derive(both[0], "s-confirm", "s")
    removed = CliRunner().invoke(app, ["rm", "0", "--dry-run", "--home", str(home.root)])
    assert removed.exit_code == 0 and "trial 0 of study s: " in removed.stdout, removed.output
    refused = CliRunner().invoke(app, ["rm", "--yes", "--home", str(home.root)])
    assert refused.exit_code == 2 and "give the study to delete by --study NAME" in refused.output
