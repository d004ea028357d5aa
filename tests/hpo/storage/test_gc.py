"""`hpo gc`: what goes, what must stay, and that the next call finishes what a kill has cut short."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from mirrored import ME, Made, sync
from rounds import rounds
from sqlalchemy import update
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.clock import SystemClock
from hpo.ledger import leases, queries
from hpo.ledger.database import tables
from hpo.storage import gc
from hpo.storage.home import Home
from hpo.storage.metrics_json import Results
from hpo.verify import verify
from trainer.report import Outcome, Report, Verdict

pytestmark = pytest.mark.whole

VALUES = [0.5, 0.2, 0.9, 0.4]  # minimised: 1, 3, 0, 2


def trained(made: Made, value: float, kind: str = "complete") -> int:
    """A trial of two checkpoints that has ended."""
    made.ask()
    taken = made.claim()
    for step in (1, 2):
        made.report(taken, step, {"val/loss": value}, epoch=step, checkpoint=made.checkpoint(taken, step))
    made.finish(taken, kind, 2, [value] if kind == "complete" else None, error="" if kind == "complete" else "no")
    return taken.number


@pytest.fixture
def made(home, empty_mlflow) -> Iterator[Made]:
    """Four complete trials and one that failed, told and mirrored."""
    shutil.copyfile(empty_mlflow, home.create().root / "mlflow.db")
    study = Made(home)
    for value in VALUES:
        trained(study, value)
    trained(study, 0.0, "user_error")
    study.end()
    sync(study)
    yield study
    study.ledger.close()


def command(made: Made, *arguments: str):
    uri = ["--tracking-uri", made.home.tracking_uri]
    return CliRunner().invoke(app, ["gc", "--study", made.name, "--home", str(made.home.root), *uri, *arguments])


def kept(made: Made) -> dict[int, int]:
    """Trial number -> how many checkpoints lie on the disk."""
    found = {number: len(list(made.home.checkpoints("s", number).glob("step-*"))) for number in range(made.count)}
    return {number: count for number, count in found.items() if count}


def on_disk(made: Made) -> int:
    """Bytes of all weights, each counted once whatever its names."""
    sizes = {path.stat().st_ino: path.stat().st_size for path in made.home.root.rglob("*.safetensors")}
    return sum(sizes.values())


def sound(made: Made) -> None:
    report = verify(made.home, made.home.storage, made.home.tracking_uri, made.name)
    assert (report.differences, report.behind) == ([], 0)


def test_all_but_the_best_go_from_the_disk_and_from_mlflow(made):
    sound(made)
    shown = command(made)
    assert shown.exit_code == 0, shown.output
    assert "s: freed 0.01 MB (8 checkpoints of 4 trials); 0.00 MB (2 checkpoints of 1 trial) stay." in shown.stdout
    assert kept(made) == {1: 2}
    assert on_disk(made) == 2 * 1000
    assert verify(made.home, made.home.storage, made.home.tracking_uri, made.name).counts["models"] == 2
    sound(made)
    assert "freed 0.00 MB (0 checkpoints of 0 trials)" in command(made).stdout
    sound(made)


def test_a_dry_run_changes_nothing(made):
    before = made.ledger.look(lambda connection: queries.digest(connection, queries.study_row(connection, "s")))
    assert "would free 0.01 MB (6 checkpoints of 3 trials)" in command(made, "--dry-run", "--keep-best", "2").stdout
    assert len(kept(made)) == 5
    sound(made)
    assert "freed 0.01 MB (6 checkpoints of 3 trials)" in command(made, "--keep-best", "2").stdout
    assert kept(made) == {1: 2, 3: 2}
    assert before == made.ledger.look(lambda connection: queries.digest(connection, queries.study_row(connection, "s")))


def test_a_bound_takes_the_worst_first_and_never_the_best(made):
    [size] = {row.size for row in gc.collect(made.ledger, made.home, "s", dry_run=True).dropped}
    assert command(made, "--max-bytes", str(7 * size)).exit_code == 0
    assert kept(made) == {0: 2, 1: 2, 3: 2}  # the failed one, and the worst of those that are complete
    shown = command(made, "--max-bytes", "1kB")
    assert kept(made) == {1: 2}
    assert "That is more than --max-bytes 1kB" in shown.stdout
    sound(made)


def test_what_others_start_from_and_what_is_open_stays(made):
    """An open trial's own, one that a restart names, and one that a study's train.resume_from names."""
    with made.ledger.write() as connection:
        row = queries.study_row(connection, "s")
        named = next(made.home.checkpoints("s", 0).glob("step-*"))
        spec = row.spec.json | {"overrides": {"train.resume_from": str(named)}}
        connection.execute(update(tables.studies).values(spec=spec, state="open"))
    made.ask(2)
    paused, restarted = made.claim(), made.claim()
    made.report(paused, 1, {"val/loss": 9.0}, epoch=1, checkpoint=made.checkpoint(paused, 1))
    made.finish(paused, "paused", 1)
    source = next(made.home.checkpoints("s", 2).glob("step-00000002*"))
    verdict = Verdict("restart_from", 1, "exploit", f"2/{source.name}", {})
    decided(made, restarted, verdict)
    gc.collect(made.ledger, made.home, "s")
    assert kept(made) == {0: 2, 1: 2, 2: 2, 5: 1}


def test_what_a_study_was_declared_to_begin_from_stays(made):
    """No override names it, and the trials' configurations do."""
    named = next(made.home.checkpoints("s", 0).glob("step-*"))
    other = Made(made.home, "other")
    other.ask(train={"resume_from": str(named)})
    gc.collect(made.ledger, made.home, "s")
    assert kept(made) == {0: 2, 1: 2}


def test_what_is_begun_from_stays_by_whatever_name_of_the_home(made, tmp_path):
    named = next(made.home.checkpoints("s", 0).glob("step-*"))
    Made(made.home, "other").ask(train={"resume_from": str(named)})
    link = tmp_path / "link"
    link.symlink_to(made.home.root)
    gc.collect(made.ledger, Home.at(link), "s")
    assert kept(made) == {0: 2, 1: 2}


def test_a_driver_looks_only_at_the_files_that_go(made, monkeypatch):
    """It asks at each end of a trial: of ten thousand, a look at all of them would take seconds each time."""
    swept = list[str]()
    sweep = gc.CheckpointStore.sweep
    monkeypatch.setattr(
        gc.CheckpointStore, "sweep", lambda self, kept: swept.append(self.directory.name) or sweep(self, kept)
    )
    lease = leases.acquire(made.ledger, "driver:1", "s", ME, SystemClock(), 30.0)
    [size] = {row.size for row in gc.collect(made.ledger, made.home, "s", dry_run=True).dropped}
    for most, expected in ((10 * size, []), (9 * size, ["00004"]), (9 * size, []), (7 * size, ["00000", "00002"])):
        swept.clear()
        gc.keep_within(made.ledger, made.home, "s", lease, most, {}, finish=False)
        assert sorted(swept) == expected
    gc.keep_within(made.ledger, made.home, "s", lease, 10 * size, {}, finish=True)
    assert len(swept) == 2 + made.count, "what a killed driver has left may lie with any trial"
    assert kept(made) == {0: 1, 1: 2, 2: 1, 3: 2, 4: 1}
    lease.release()


def decided(made: Made, taken, verdict: Verdict) -> None:
    from hpo.ledger import transactions

    report = Report(1, {"val/loss": 8.0}, epoch=1)
    told = transactions.TrialReport(taken, report, lambda connection: verdict, strategy="pbt")
    made.ledger.transact(lambda connection: transactions.commit(connection, [told]))
    outcome = Outcome("restarted", 1)
    made.ledger.transact(lambda connection: transactions.finish(connection, taken, outcome, None))


def test_what_checkpoints_of_a_trial_share_is_counted_once(made):
    """As `trainer.checkpoint` shares what is not trained."""
    before = command(made, "--dry-run").stdout
    for number in range(5):
        one, other = sorted(made.home.checkpoints("s", number).glob("step-*"))
        (one / "model-frozen.safetensors").write_bytes(bytes(1_000_000))
        os.link(one / "model-frozen.safetensors", other / "model-frozen.safetensors")
    assert "would free 0.01 MB (8 checkpoints of 4 trials); 0.00 MB (2" in before
    assert "would free 4.01 MB (8 checkpoints of 4 trials); 1.00 MB (2" in command(made, "--dry-run").stdout
    assert "freed 3.01 MB (6 checkpoints of 3 trials); 2.00 MB (4" in command(made, "--max-bytes", "2.5MB").stdout
    assert on_disk(made) == 2 * (1_000_000 + 2 * 1000)


def test_it_refuses_beside_a_driver(made):
    lease = leases.acquire(made.ledger, f"driver:{made.id}", "s", ME.__class__.current(), SystemClock(), 5)
    shown = command(made)
    assert shown.exit_code == 3 and "already has a driver" in shown.stderr
    assert len(kept(made)) == 5
    lease.release()


@rounds("text", ["ten", "10XB", "-1"])
def test_a_bound_that_is_no_size_is_refused(made, text):
    shown = command(made, f"--max-bytes={text}")
    assert shown.exit_code == 2 and "give a number of bytes, or such as 500MB" in shown.stderr


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    "point",
    [
        "retention.after_files@2",
        pytest.param("retention.after_row@1", marks=pytest.mark.slow),
        pytest.param("mirror.after_send@1", marks=pytest.mark.slow),
    ],
)
def test_a_kill_in_the_middle_is_finished_by_the_next_call(made, point):
    name, hit = point.split("@")
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{name}=kill@{hit}"}
    flags = ["--home", str(made.home.root), "--tracking-uri", made.home.tracking_uri]
    killed = subprocess.run([sys.executable, "-m", "hpo", "gc", *flags], env=environ, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    best = next(made.home.checkpoints("s", 1).glob("step-00000002*"))
    assert {path.name for path in best.iterdir()} == {"manifest.json", "model.safetensors"}
    for difference in verify(made.home, made.home.storage, made.home.tracking_uri, "s").differences:
        fixes = ("`hpo repair", "`hpo gc", "`hpo resume", "`hpo sync", "MLflow")
        assert any(fix in difference for fix in fixes), difference
    assert command(made).exit_code == 0
    assert kept(made) == {1: 2} and on_disk(made) == 2 * 1000
    sound(made)


def test_metrics_json_says_that_there_is_none_left(made):
    command(made)
    assert '"best": null' in (made.home.checkpoints("s", 2) / "metrics.json").read_text()
    Results(made.ledger, "s", made.home).write()
    sound(made)
