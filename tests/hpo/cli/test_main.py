"""The commands: their surface, what they print, and how they fail."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import time
from contextlib import closing
from itertools import pairwise

import pytest
from crafted import config_of, open_crafted, put_trial
from places import HARNESS
from sqlalchemy import insert, select, update
from typer.main import get_command
from typer.testing import CliRunner

from hpo.cli import driving
from hpo.cli.main import app
from hpo.driver.loop import Driver
from hpo.ledger import Ledger, queries
from hpo.ledger.database import tables
from hpo.ledger.database.tables import attempts, trials
from hpo.space.config import flatten, load_yaml, parse_override
from hpo.storage.home import Home
from hpo.tracking import mirror_process

SEVERAL = str(HARNESS / "several_study.py")

# Adding to this is a decision, taking away from it breaks somebody's script.
SURFACE = {
    "init": "name",
    "run": "declaration --study --trials --epochs --time --target --patience --stop-when --name --workers --executor "
    "--cpus-per-worker "
    "--gpus-per-worker --scheduler --sampler --strategy --order --window --seed --tier --finish --confirm --enqueue "
    "--learn-from --warm-start -o --config --home --storage --checkpoints --max-bytes --tracking-uri --tracker "
    "--alert --tag --allow-drift --outage-wait --log-format --json",
    "resume": "--study --trials --epochs --time --target --patience --stop-when --workers --executor --cpus-per-worker "
    "--gpus-per-worker "
    "--scheduler --finish --confirm --home --storage --max-bytes --tracking-uri --tracker --alert --allow-drift "
    "--outage-wait --log-format --json",
    "status": "--study --json --home --storage",
    "best": "--study --trial --json --to --force --save --home --storage",
    "show": "number --study --all --json --home --storage",
    "tag": "of given --remove --study --json --home --storage --tracking-uri",
    "compare": "--study --top --all --json --to --force --csv --parquet --home --storage",
    "watch": "--study --once --home --storage",
    "serve": "--port --host --allowed-host --root-path --mlflow --open --metrics --probes --log-format --home "
    "--storage",
    "doctor": "--json --home --storage --tracking-uri",
    "ui": "--study --port --open --optuna --home --storage --tracking-uri",
    "verify": "--study --json --home --storage --tracking-uri",
    "sync": "--study --deleted --json --home --storage --tracking-uri",
    "alert": "targets --json",
    "plot": "kinds --study --metric --to --force --save --json --home --storage --tracking-uri",
    "report": "studies --study --to --force --out --json --home --storage --tracking-uri",
    "importance": "--study --metric --evaluator --json --home --storage",
    "forecast": "--study --trials --json --home --storage",
    "confirm": "--study --top --seeds --folds --hold-out --name --workers --executor -o --config --json --home "
    "--storage --tracking-uri",
    "ablate": "--study --trial --seeds --name --workers --executor --json --home --storage --tracking-uri",
    "gc": "--study --keep-best --max-bytes --dry-run --json --home --storage --tracking-uri",
    "soup": "--study --top --trial --to --force --save --json --home --storage --tracking-uri",
    "promote": "number --name --alias --undo --dry-run --as-owner --study --json --home --storage --tracking-uri",
    "export": "--to number --format --quantize --force --study --name --json --home --storage",
    "import": "",
    "import-config": "file --ranks --to --force --json",
    "extend": "number --study --name --workers --executor -o --json --home --storage --tracking-uri",
    "rm": "trials --study --dry-run --yes --as-owner --leave-mlflow --json --home --storage --tracking-uri",
    "log": "--study --last --json --home --storage",
    "quota": "person --trials --max-bytes --none --json --home --storage",
    "schedule": "--study -o --config --steps-per-epoch --to --force --save --json --home --storage",
    "lr-find": "--study -o --config --low --high --steps --to --force --save --json --home --storage",
    "diagnose": "trial --study -o --config --steps --points --profile --print-only --to --force --save --json "
    "--home --storage --tracking-uri",
    "plan": "--study --memory -o --config --json --home --storage",
    "batch-find": "--study -o --config --steps --json --home --storage",
    "worker": "--storage --home --study --stay --outage-wait --probes --metrics --log-format",
    "node": "rendezvous --storage",
    "backup": "--to --check --keep-for --study --json --home --storage",
    "repair": "--study --dry-run --json --home --storage --tracking-uri",
    "migrate": "--storage --wait --check --force",
}


def hpo(*arguments: str, home: Home | None = None):
    flags = ["--home", str(home.root)] if home else []
    return CliRunner().invoke(app, [*arguments, *flags])


@pytest.fixture
def crafted(home: Home):
    """A ledger in `home` with one study and no trial."""
    home.create()
    ledger = open_crafted(home.root / "ledger.db")
    yield ledger
    ledger.close()


def refused(result, code: int) -> str:
    """The one sentence on stderr."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    line = result.stderr.strip()
    assert line.startswith("error: ")
    assert "\n" not in line
    assert "Traceback" not in line
    return line


def test_surface_is_frozen():
    commands = get_command(app).commands
    found = {
        name: [flag for option in command.params for flag in option.opts if flag != "--help"]
        for name, command in commands.items()
    }
    assert found == {name: flags.split() for name, flags in SURFACE.items()}


def test_help_names_every_sampler_strategy_order_and_executor():
    from hpo.driver.resolve import ORDERS
    from hpo.search.samplers.registry import SAMPLERS
    from hpo.search.strategies.registry import STRATEGIES
    from hpo.workers.executors.placement import EXECUTORS

    text = hpo("run", "--help").stdout
    for name in (*SAMPLERS, *STRATEGIES, *ORDERS, *EXECUTORS):
        assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuch"],
        ["run"],
        ["run", "--study", "mlp", "--trials", "0"],
        ["run", "--study", "mlp", "--trials", "many"],
        ["run", "--study", "mlp", "--trials", "1", "--workers", "none"],
        ["run", "--study", "mlp", "--trials", "1", "--nosuch"],
        ["compare", "--top", "0"],
        ["show", "first"],
    ],
)
def test_usage_errors_exit_2_with_one_line(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = hpo(*arguments)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("--help` shows what there is.") or re.search(
        r" (--\w+|NUMBER) \w+: give a whole number from \d", line
    )
    assert list(tmp_path.iterdir()) == []


def test_status_as_json(crafted, home):
    put_trial(crafted, 0, "complete", (0.1, 0.5), params={"train.optim.lr": 0.25})
    put_trial(crafted, 1, "pruned", (0.2,))
    put_trial(crafted, 2, "waiting")
    found = json.loads(hpo("status", "--json", home=home).stdout)
    with crafted.read() as connection:
        digest = queries.digest(connection, queries.study_row(connection, "crafted"))
    assert found == {
        "study": "crafted",
        "state": "interrupted",
        "requested": 10,
        "max_epochs": None,
        "max_seconds": None,
        "seconds_used": 0.0,
        "trials": {
            "waiting": 1,
            "running": 0,
            "paused": 0,
            "complete": 1,
            "pruned": 1,
            "infeasible": 0,
            "failed": 0,
        },
        "best": {
            "number": 0,
            "value": 0.5,
            "values": {"val/accuracy": 0.5},
            "params": {"train.optim.lr": 0.25},
            "seeds": None,
            "finished": None,
        },
        "front": [],
        "epochs_trained": 3,
        "replaced": 0,
        "removed": 0,
        "removed_cost": {"states": {}, "epochs": 0, "seconds": 0.0},
        "imported": None,
        "alerts": {},
        "tags": {},
        "lanes": {"trials": 0, "groups": 0},
        "forecast": None,
        "idle": None,
        "derived": [],
        "reason": "",
        "behind": 1,
        "attempts": 3,
        "digest": digest,
    }
    assert re.fullmatch("[0-9a-f]{64}", digest)


def test_status_as_text(crafted, home):
    put_trial(crafted, 0, "complete", (0.1, 0.5))
    put_trial(crafted, 1, "running")
    lines = hpo("status", "--study", "crafted", home=home).stdout.splitlines()
    assert lines[0] == "crafted: interrupted, 1 of 10 trials ended"
    assert lines[1] == "  1 to resume, 1 complete"
    assert lines[2:4] == ["  2 epochs trained in 2 attempts, 0s used", "  best: trial 0, 0.5"]


def test_a_study_without_trials_has_a_status(crafted, home):
    assert "no trials yet" in hpo("status", home=home).stdout
    assert json.loads(hpo("status", "--json", home=home).stdout)["best"] is None


def test_the_only_study_need_not_be_named_and_that_is_said(crafted, home):
    result = hpo("status", home=home)
    assert result.exit_code == 0
    assert result.stderr == f"study crafted, the only one in {home.root}\n"


def test_one_of_several_studies_must_be_named(home):
    home.create()
    ledger = open_crafted(home.root / "ledger.db", ("first", "second"))
    line = refused(hpo("best", home=home), 2)
    assert line == f"error: {home.root} holds first, second: name one with --study."
    line = refused(hpo("best", "--storage", ledger.url), 2)
    assert line == f"error: {ledger.url} holds first, second: name one with --study."
    assert hpo("status", "--study", "second", home=home).stdout.startswith("second: ")
    ledger.close()


@pytest.mark.parametrize("command", [("best",), ("show", "0"), ("compare",), ("importance",), ("gc",)], ids=" ".join)
def test_a_derived_study_never_makes_a_command_ambiguous(home, command):
    home.create()
    with closing(open_crafted(home.root / "ledger.db", ("mine", "mine-confirm", "mine-ablate"))) as ledger:
        put_trial(ledger, 0, "complete", (0.5,))
        for derived in ("mine-confirm", "mine-ablate"):
            with ledger.write() as connection:
                row = tables.studies.c.name == derived
                spec = connection.execute(select(tables.studies.c.spec).where(row)).scalar_one()
                connection.execute(update(tables.studies).where(row).values(spec=spec | {"listed_of": "mine"}))
    result = hpo(*command, home=home)
    said = f"study mine, the only one in {home.root} apart from mine-confirm, mine-ablate, derived from it"
    assert result.stderr.splitlines()[0] == said
    assert "name one with --study" not in result.stderr
    one = hpo("status", "--study", "mine", home=home).stdout
    lines = [f"{name}: interrupted, 0 of 10 trials ended\n" for name in ("mine-confirm", "mine-ablate")]
    assert hpo("status", home=home).stdout == one + "".join(lines)
    facts = json.loads(hpo("status", "--json", home=home).stdout)
    assert (facts["study"], [one["study"] for one in facts["derived"]]) == ("mine", ["mine-confirm", "mine-ablate"])
    assert facts == json.loads(hpo("status", "--study", "mine", "--json", home=home).stdout)
    alone = json.loads(hpo("status", "--study", "mine-ablate", "--json", home=home).stdout)
    assert alone == facts["derived"][1] and alone["derived"] == [] and alone.keys() == facts.keys()
    assert hpo("status", "--study", "mine-ablate", home=home).stdout.startswith("mine-ablate: ")


def test_status_without_a_name_lists_every_study(home):
    home.create()
    ledger = open_crafted(home.root / "ledger.db", ("first", "second"))
    put_trial(ledger, 0, "complete", (0.5,))
    ledger.close()
    result = hpo("status", home=home)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "first: interrupted, 1 of 10 trials ended; best: trial 0, 0.5",
        "second: interrupted, 0 of 10 trials ended",
    ]
    rows = json.loads(hpo("status", "--json", home=home).stdout)
    assert [(row["study"], row["trials"]["complete"]) for row in rows] == [("first", 1), ("second", 0)]


def test_a_ledger_without_a_study_is_refused(home):
    home.create()
    open_crafted(home.root / "ledger.db", ()).close()
    assert refused(hpo("status", home=home), 2) == f"error: {home.root} holds no study: begin one with `hpo run`."


@pytest.mark.parametrize("command", ["status", "best", "compare", "resume", "verify", "sync"])
def test_an_unknown_study_names_those_there_are(crafted, home, command):
    line = refused(hpo(command, "--study", "craftde", home=home), 2)
    assert "'craftde'" in line
    assert "(it holds crafted); did you mean 'crafted'?" in line
    other = refused(hpo(command, "--study", "x", home=home), 2)
    assert "(it holds crafted): start it with `hpo run`, or name the right --home." in other


@pytest.mark.parametrize("command", ["status", "best", "compare", "resume", "verify", "sync"])
def test_a_home_without_a_ledger_is_left_as_it_is(home, command):
    line = refused(hpo(command, home=home), 2)
    assert f"the ledger {home.root}/ledger.db does not exist" in line
    assert not home.root.exists()


def test_best_gives_its_checkpoint_and_a_command_that_says_the_same(crafted, home, tmp_path):
    from sqlalchemy import insert

    from hpo.ledger.database.tables import checkpoints

    params = {"train.optim.name": "adamw", "train.optim.lr": 1e-05, "model.sizes": [1, 2], "model.bias": True}
    put_trial(crafted, 0, "complete", (0.4,))
    trial = put_trial(crafted, 1, "complete", (0.4, 0.9), params=params)
    with crafted.write() as connection:
        for step, state, best in ((10, "deleted", 1), (20, "kept", 1), (30, "kept", 0)):
            row = {"trial_id": trial, "step": step, "epoch": 1, "path": f"step-{step}", "sha256": "", "size": 1}
            row |= {"state": state, "best": best, "metrics": {}, "fence": 1, "revision": 1, "at": 0.0}
            connection.execute(insert(checkpoints).values(row))
    config_of(crafted, trial, {"train": {"checkpoint": {"monitor": "val/accuracy", "mode": "max"}}})
    saved = tmp_path / "best.yaml"
    kept = home.checkpoints("crafted", 1) / "step-20"
    result = hpo("best", home=home)
    assert f"checkpoint: {kept} is not there any more\n" in result.stdout
    assert json.loads(hpo("best", "--json", home=home).stdout)["checkpoint"] is None
    kept.mkdir(parents=True)
    assert "metrics:" not in result.stdout
    (metrics := kept.parent / "metrics.json").touch()
    result = hpo("best", home=home)
    at = "epoch 1 of 2; kept for the largest val/accuracy"
    assert f"checkpoint: {kept} ({at})\nmetrics: {metrics}\n" in result.stdout
    command = shlex.split(result.stdout.splitlines()[-1].removeprefix("train it: "))
    assert command[:6] == ["hpo", "run", "--study", "mlp", "--name", "crafted-best"]
    assert command[-2:] == ["--home", str(home.root)]
    result = hpo("best", "--to", str(saved), home=home)
    assert f"its configuration is written to {saved}\n" in result.stderr
    assert f"--config {saved} --home {home.root}" in result.stdout.splitlines()[-1]
    given = dict(parse_override(text) for flag, text in pairwise(command) if flag == "-o")
    assert given == {path: value if isinstance(value, str) else json.dumps(value) for path, value in params.items()}
    assert flatten(load_yaml(saved)) == params
    beyond = refused(hpo("best", "--study", "crafted", "--to", str(tmp_path / "mis" / "spelt.yaml"), home=home), 2)
    assert "mis does not exist; make it" in beyond and not (tmp_path / "mis").exists()
    assert json.loads(hpo("best", "--json", home=home).stdout)["overrides"] == params


def test_a_checkpoint_stands_with_its_own_epoch_and_values(crafted, home):
    """The value is the last epoch's, the checkpoint the first one's: neither may be read as the other."""
    from sqlalchemy import insert

    from hpo.ledger.database.tables import checkpoints

    measured = {1: {"val/accuracy": 0.7, "val/loss": 0.4}, 2: {"val/accuracy": 0.9, "val/loss": 0.6}}
    trial = put_trial(crafted, 0, "complete", (0.7, 0.9), metrics={"val/loss": (0.4, 0.6)})
    config_of(crafted, trial, {"train": {"checkpoint": {"monitor": "val/loss", "mode": "min"}}})
    for epoch, metrics in measured.items():
        row = {"trial_id": trial, "step": 10 * epoch, "epoch": epoch, "path": f"step-{epoch}", "sha256": "", "size": 1}
        row |= {"state": "kept", "best": epoch == 1, "metrics": metrics, "fence": 1, "revision": 1, "at": 0.0}
        with crafted.write() as connection:
            connection.execute(insert(checkpoints).values(row))
        (home.checkpoints("crafted", 0) / f"step-{epoch}").mkdir(parents=True)
    best = hpo("best", home=home).stdout.splitlines()
    assert best[0] == "crafted, trial 0: val/accuracy 0.9 (epoch 2 of 2)"
    [line] = [line for line in best if line.startswith("checkpoint: ")]
    assert line.endswith("/step-1 (epoch 1 of 2: val/loss 0.4, val/accuracy 0.7; kept for the least val/loss)")
    at = json.loads(hpo("best", "--json", home=home).stdout)["checkpoint_at"]
    assert (at["epoch"], at["epochs"], at["metrics"]) == (1, 2, measured[1])
    shown = hpo("show", "0", home=home).stdout
    assert "val/accuracy 0.9 (epoch 2 of 2)\n" in shown
    assert "step 10  epoch 1 of 2: val/loss 0.4, val/accuracy 0.7; kept for the least val/loss  kept" in shown
    assert re.search(r"step 20  epoch 2 of 2: val/loss 0.6, val/accuracy 0.9 +kept", shown)


def test_best_of_nothing_complete_is_refused(crafted, home):
    put_trial(crafted, 0, "pruned", (0.4,))
    assert "has no complete trial: " in refused(hpo("best", "--study", "crafted", home=home), 1)


def test_show_tells_all_about_a_trial(crafted, home):
    put_trial(
        crafted, 0, "failed", (0.1, 0.3), error="ValueError: no", traceback="Traceback:\n  here\nValueError: no\n"
    )
    text = hpo("show", "0", home=home).stdout
    assert text.splitlines()[:3] == [
        "crafted, trial 0: failed",
        "epoch 2, step 20, 1:30 from its start to its end",
        "error: ValueError: no",
    ]
    assert re.search(r"train\.optim\.lr +0\.1 +default null", text)
    assert re.search(r"val/accuracy +▁█ +last 0\.3 +min 0\.1 +max 0\.3", text)
    assert re.search(r"1 +box:41 +steps 0 to 20 +running", text)
    assert text.endswith("\nTraceback:\n  here\nValueError: no\n")
    found = json.loads(hpo("show", "0", "--json", home=home).stdout)
    assert found["curves"]["val/accuracy"] == [[10, 1, 0.1], [20, 2, 0.3]]


def test_show_does_without_a_declaration_that_is_gone(home, tmp_path):
    home.create()
    ledger = open_crafted(home.root / "ledger.db", reference=str(tmp_path / "gone.py"))
    put_trial(ledger, 0, "complete", (0.1,))
    ledger.close()
    text = hpo("show", "0", home=home).stdout
    assert "train.optim.lr  0.1" in text
    assert "(the study's own configuration cannot be read: study file" in text


def test_show_of_a_trial_there_is_not(crafted, home):
    assert refused(hpo("show", "0", "--study", "crafted", home=home), 2).endswith("no trial 0: it has none yet.")
    put_trial(crafted, 0, "waiting")
    line = refused(hpo("show", "7", "--study", "crafted", home=home), 2)
    assert line == "error: study 'crafted' has no trial 7: it has trials 0 to 0."


def test_compare_prints_and_writes(crafted, home, tmp_path):
    for number in range(4):
        put_trial(crafted, number, "complete", (number / 10,))
    text = hpo("compare", "--top", "2", home=home).stdout
    assert [line.split()[0] for line in text.splitlines()] == ["number", "3", "2", "the", "the"]
    assert text.splitlines()[-1] == "the same in all: state complete, epoch 1, seconds 90"
    assert [row["number"] for row in json.loads(hpo("compare", "--json", home=home).stdout)] == [3, 2, 1, 0]
    for file in (tmp_path / "a.csv", tmp_path / "a.parquet"):
        result = hpo("compare", "--to", str(file), home=home)
        assert result.stdout == f"4 trials written to {file}\n" and file.stat().st_size


def test_ctrl_c_is_130(crafted, home, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(queries, "status", interrupt)
    result = hpo("status", "--study", "crafted", home=home)
    assert result.exit_code == 130
    assert result.stderr == "interrupted.\n"


@pytest.mark.usefixtures("process")
def test_ctrl_c_at_the_very_end_still_says_how_the_study_ended(tmp_path, monkeypatch):
    release = Driver.release

    def interrupted(driver):
        release(driver)
        raise KeyboardInterrupt

    monkeypatch.setattr(Driver, "release", interrupted)
    flags = ("--study", SEVERAL, "--trials", "2", "--executor", "inline", "--sampler", "random")
    ended = hpo("run", *flags, home=Home(tmp_path))
    assert ended.exit_code == 0, "as that of any study that has ended"
    assert "several: complete, 2 of 2 trials ended" in ended.stdout and "interrupted." not in ended.stderr


@pytest.mark.usefixtures("process")
def test_ctrl_c_while_the_end_is_told_changes_nothing(tmp_path, monkeypatch):
    from hpo.display import summary as display

    summary = display.summary

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return summary(*arguments)

    monkeypatch.setattr(display, "summary", interrupted)
    flags = ("--study", SEVERAL, "--trials", "2", "--executor", "inline", "--sampler", "random")
    ended = hpo("run", *flags, home=Home(tmp_path))
    assert ended.exit_code == 0 and "several: complete, 2 of 2 trials ended" in ended.stdout


def test_ctrl_c_before_the_mirror_begins_says_how_much_mlflow_lacks(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(mirror_process, "spawn", interrupted)
    flags = ("--study", SEVERAL, "--trials", "2", "--executor", "inline", "--sampler", "random")
    ended = hpo("run", *flags, home=Home(tmp_path))
    assert ended.exit_code == 130
    ledger = Ledger(Home(tmp_path).storage, create=False)
    behind = mirror_process.behind(ledger, Home(tmp_path).tracking_uri, "several")
    ledger.close()
    assert behind > 0 and f"MLflow is behind by {behind} transaction" in ended.stdout


@pytest.mark.usefixtures("process")
def test_a_damaged_mlflow_database_is_told_of_by_each_command(tmp_path):
    """Also before anything was ever sent to it, with one sentence, which names the remedy."""
    home = Home.at(tmp_path / "home").create()
    database = home.root / "mlflow.db"
    database.write_bytes(b"xx")
    flags = ("--study", SEVERAL, "--trials", "2", "--executor", "inline", "--sampler", "random")
    remedy = f"MLflow's database {database} is damaged (file is not a database): move it away, with its -wal and -shm"
    ended = hpo("run", *flags, home=home)
    assert ended.exit_code == 0 and f" transactions: {remedy}" in ended.stdout
    for words in (("verify",), ("doctor",), ("ui", "--port", "5990"), ("sync",)):
        told = hpo(*words, home=home)
        assert (told.exit_code, (told.stdout + told.stderr).count(remedy)) == (1, 1), words
    assert "sends what is missing" not in hpo("verify", home=home).stdout


def test_what_takes_long_to_begin_says_so_on_a_terminal_and_takes_it_back():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    slow, quick, quiet = Terminal(), Terminal(), io.StringIO()
    with driving.starting("reading ...", slow, after=0.0) as begun:
        deadline = time.monotonic() + 30
        while not slow.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        begun()
        assert slow.getvalue() == "reading ...\r\x1b[K"
    with driving.starting("reading ...", quick, after=60.0):
        pass
    with driving.starting("reading ...", quiet, after=0.0):
        time.sleep(0.05)
    assert slow.getvalue() == "reading ...\r\x1b[K" and not quick.getvalue() and not quiet.getvalue()
    with driving.starting("reading ...", quiet, piped_after=0.0):
        deadline = time.monotonic() + 30
        while not quiet.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert quiet.getvalue() == "reading ...\n", "in a file it stays, and is one line"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--trials", "0"), "--trials 0: give a whole number from 1 to 2147483647."),
        (("run", "--trials", "1e3"), "--trials 1e3: give a whole number from 1 to 2147483647."),
        (("run", "--epochs", "1" + "0" * 20), f"--epochs 1{'0' * 20}: give a whole number from 1 to 2147483647."),
        (("run", "--gpus-per-worker", "x"), "--gpus-per-worker x: give a number from 0."),
        (("show", "x"), "NUMBER x: give a whole number from 0 to 2147483647."),
        (("run", "--trials", "1", "--tier", "99"), "tier 99 has no dimension: the highest of this space is 2."),
        (
            ("run", "--trials", "1", "-o", "train.num_epochs=1" + "0" * 20),
            f"train.num_epochs=1{'0' * 20}: the ledger counts epochs in 32 bits, so give 2147483647 or less.",
        ),
        (
            ("run", "--trials", "1", "-o", "train.folds=100000"),
            "train.folds=100000: each fold trains a model from the beginning, so give 1000 or less.",
        ),
        (("run", "--trials", "3", "--strategy", "pbt"), "--trials 3: pbt needs --trials 80, 8 members in 10"),
        (
            ("export", "0", "--to", "a/b/c.onnx"),
            "--to a/b/c.onnx: directory a/b does not exist; make it, or name another file.",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_sentence_with_the_value_and_the_fix(home, words, said):
    given = ("--study", "mlp") if words[0] == "run" else ()
    result = hpo(words[0], *given, *words[1:], home=home)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {said}"), result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not home.root.exists() or not any(home.root.iterdir()), "nothing is written"


@pytest.mark.usefixtures("process")
def test_a_study_of_the_home_is_meant_by_its_name_there(tmp_path):
    home = Home(tmp_path)
    flags = ("--name", "mine", "-o", "train.optim.lr=0.25", "-o", "train.optim.name=sgd", "-o", "train.num_epochs=1")
    assert hpo("run", "--study", "mlp", *flags, "--trials", "1", "--executor", "inline", home=home).exit_code == 0
    shown = hpo("schedule", "--study", "mine", "--steps-per-epoch", "30", home=home)
    assert shown.exit_code == 0 and "0.25" in shown.stdout, shown.output
    assert hpo("schedule", "--study", "his", home=home).exit_code == 2


def test_a_schedule_of_ones_own_that_raises_is_named_by_its_line(tmp_path, monkeypatch):
    (tmp_path / "falls.py").write_text("def down(config, run):\n    return lambda step: 1 / (step - step)\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = ("-o", "train.schedule.name=falls:down", "--steps-per-epoch", "5")
    said = refused(hpo("schedule", "--study", "mlp", *named), 2)
    assert said == "error: falls.py:2, in <lambda>: ZeroDivisionError: division by zero"


def test_how_long_a_trial_trained_is_told_from_how_long_it_took(crafted, home):
    put_trial(crafted, 0, "complete", (0.5,))
    with crafted.write() as connection:
        at = {"trial_id": 1, "step": 1, "from_step": 0, "renewals": 0, "worker_id": "w"}
        connection.execute(attempts.delete())
        for fence, began, ended in ((1, 0.0, 60.0), (2, 3600.0, 3630.0)):
            own = {"fence": fence, "started_at": began, "ended_at": ended, "outcome": "preempted"}
            connection.execute(insert(attempts), at | own)
        connection.execute(update(trials).values(started_at=0.0, ended_at=3630.0))
    shown = hpo("show", "0", home=home).stdout
    assert "trained for 1:30, 1:00:30 from its start to its end" in shown
    found = json.loads(hpo("show", "0", "--json", home=home).stdout)
    assert (found["seconds_trained"], found["seconds"]) == (90.0, 3630.0)


def test_a_bug_is_never_dressed_up_as_a_users_mistake(crafted, home, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(queries, "status", fail)
    assert isinstance(hpo("status", "--study", "crafted", home=home).exception, ZeroDivisionError)


@pytest.mark.parametrize(("given", "code"), [("ConfigError", 2), ("DataError", 2), ("CheckpointError", 1)])
def test_errors_of_the_trainer_have_exit_codes_too(crafted, home, monkeypatch, given, code):
    from trainer import errors

    def fail(*_):
        raise getattr(errors, given)("the reason.")

    monkeypatch.setattr(queries, "status", fail)
    assert refused(hpo("status", "--study", "crafted", home=home), code) == "error: the reason."
