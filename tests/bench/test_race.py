"""The race: the peers' loop trains as the trainer does, in the same space, and what was reported is read as it was."""

import copy
import json
import subprocess
import sys
import time

import psutil
import pytest
import torch
from places import ROOT
from trainer_runs import MemoryReporter

from bench.race import parsed
from bench.racing import loop, show
from bench.racing.contenders import race
from bench.racing.events import events, improvements
from bench.racing.workloads import STUDIES, workload
from hpo import load
from trainer.checkpoint.store import CheckpointStore
from trainer.loop import fit

PLAIN = {"data.test": True, "train.num_epochs": 8, "train.batch_size": 2000}  # one batch, so that no order matters
OPTIONS = {
    "mlp": {
        "model.dropout": 0.0,
        "model.num_layers": 2,
        "train.optim.name": "sgd",
        "train.optim.lr": 0.5,
        "train.optim.momentum": 0.8,
        "train.optim.weight_decay": 0.3,  # so much that the loss shows whether biases decay
        "train.clip.norm": 0.02,  # below that of each step
    },
    "convnet": {
        "train.optim.wrap": "sam",
        "train.optim.sam.rho": 0.1,
        "loss.name": "focal",
        "loss.gamma": 1.5,
        "augment.flip": False,
        "augment.crop": 0,
    },
    "gpt": {"train.schedule.warmup_ratio": 0.5, "train.optim.beta2": 0.99, "model.num_layers": 1},
}


@pytest.fixture
def described(tmp_path):
    """Makes the workload of a study, with its data prepared."""

    def make(name, **overrides):
        given = workload(name, None, tmp_path)
        given["base"] |= overrides
        given["epochs"] = given["base"]["train.num_epochs"]
        loop.prepare(given, tmp_path)
        return given, loop.load(tmp_path)

    return make


@pytest.mark.parametrize("name", STUDIES)
def test_the_peers_loop_trains_as_the_trainer_does(name, described, tmp_path, monkeypatch):
    """From the same weights the trainer of hpo and the loop of the peers report the same losses after each epoch."""
    overrides = PLAIN | OPTIONS[name]
    given, data = described(name, **overrides)
    study = load(name).configure(given["overrides"] | overrides)
    task = study.task_class()(study.config)
    torch.manual_seed(1)
    start = task.model()
    task.model = lambda: copy.deepcopy(start)
    reporter = MemoryReporter()
    fit(task, study.config.train, reporter, CheckpointStore(tmp_path / "trial", 1, []))
    monkeypatch.setattr(loop, "build", lambda name, config: copy.deepcopy(start))
    for epoch, metrics in enumerate(loop.train(given, data, {}, 0, tmp_path / "peer"), start=1):
        ours = {key: reporter.values[epoch, key] for key in metrics if key.startswith(("val", "test"))}
        for key, value in ours.items():
            few = {"abs": 0.006} if key.endswith("accuracy") else {"rel": 1e-4}  # rounding moves an image or two
            assert metrics[key] == pytest.approx(value, **few), (epoch, key)
    assert epoch == 8 and len(ours) == (2 if name == "gpt" else 4)
    saved = torch.load(tmp_path / "peer" / "last.pt")
    assert saved["epoch"] == 8 and saved["optimizer"]["state"]


@pytest.mark.parametrize("name", STUDIES)
def test_the_peers_build_the_studys_model(name, described):
    given, _ = described(name)
    study = load(name).configure(given["overrides"])
    ours, theirs = study.task_class()(study.config).model(), loop.build(name, given["base"])
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}


def test_the_peers_pictures_are_shifted_mirrored_and_erased():
    config = {"augment.crop": 2, "augment.flip": True, "augment.erase": 0.0}
    x = torch.randint(1, 128, (64, 3, 16, 16), dtype=torch.uint8)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    torch.manual_seed(0)
    kinds = set()
    for image, made in zip(padded, loop.augmented(x, config), strict=True):
        views = {(i, j): image[:, i : i + 16, j : j + 16] for i in range(5) for j in range(5)}
        views |= {(*place, "flipped"): view.flip(-1) for place, view in list(views.items())}
        kinds |= {place for place, view in views.items() if torch.equal(view, made)}
    assert len(kinds) > 25 and {place[0] for place in kinds} == {place[1] for place in kinds} == set(range(5))
    erased = loop.augmented(x, config | {"augment.erase": 0.5, "augment.crop": 0, "augment.flip": False}) != x
    shares = erased.any(dim=1).float().mean(dim=(1, 2))
    assert 0.25 < (shares > 0).float().mean() < 0.75 and shares[shares > 0].min() >= 1 / 16 and shares.max() <= 1 / 4


# --- Spaces


def drawn_by_optuna(space):
    import optuna

    from bench.racing.optuna_loop import suggest

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [suggest(study.ask(), space) for _ in range(200)]


def drawn_by_ray(space):
    from bench.racing.ray_tune import space_of

    made = space_of(space)
    return [loop.active(space, {path: domain.sample() for path, domain in made.items()}) for _ in range(200)]


def drawn_by_syne_tune(space):
    pytest.importorskip("syne_tune", reason="runs where syne-tune is installed, in an environment of its own")
    from bench.racing.syne_tune_asha import space_of

    made = space_of(space)
    return [loop.active(space, {path: domain.sample() for path, domain in made.items()}) for _ in range(200)]


@pytest.mark.parametrize("drawn", [drawn_by_optuna, drawn_by_ray, drawn_by_syne_tune])
@pytest.mark.parametrize("name", STUDIES)
def test_each_tool_draws_the_points_of_the_studys_space(name, drawn, described):
    """Every point is one of the study's, both ends of a dimension are reached, and so is each choice."""
    given, _ = described(name)
    study = load(name)
    points = drawn(given["space"])
    assert not {study.space.fault(point, given["base"]) for point in points} - {""}
    for path, dimension in study.space.dimensions.items():
        seen = sorted({point[path] for point in points if path in point}, key=str)
        if len(seen) > 20:
            places = [dimension.to_unit(value) for value in seen]
            assert min(places) < 0.1 and max(places) > 0.9, path
        else:
            assert seen == sorted(getattr(dimension, "options", None) or dimension.allowed(), key=str), path


def test_optuna_tries_the_first_points_of_a_study_first(described, tmp_path):
    import optuna

    from bench.racing.optuna_loop import first_point, suggest

    for name in ("convnet", "gpt"):
        given, _ = described(name)
        study = optuna.create_study()
        study.enqueue_trial(first_point(given["enqueue"][0], given["space"]))
        assert suggest(study.ask(), given["space"]) == given["enqueue"][0]


# --- What was reported, and when


METRICS = {"metric": "val/loss", "held_out": "train/loss", "mode": "minimize"}


def test_epochs_are_read_from_the_ledger_with_their_times(tmp_path):
    from bench import many_trials
    from hpo.storage.home import Home

    many_trials.write(Home.at(tmp_path / "home"), 10).close()
    found = events(tmp_path, METRICS, 0.0, 1e12)
    assert len({event.trial for event in found}) > 5 and all(event.held_out is not None for event in found)
    assert [event.seconds for event in found] == sorted(event.seconds for event in found)
    middle = found[len(found) // 2].seconds
    assert [e for e in found if e.seconds <= middle] == events(tmp_path, METRICS, 0.0, middle)
    assert events(tmp_path, METRICS, 10.0, 1e12)[0].seconds == found[0].seconds - 10


def test_epochs_are_read_from_mlflow_with_their_times(tmp_path):
    import mlflow
    from mlflow.entities import Metric

    assert events(tmp_path, METRICS, 0.0, 9.0) == []  # a contender that was killed before it had a database
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.create_run(client.create_experiment("race", str(tmp_path))).info.run_id
    for epoch, value in enumerate([3.0, float("nan"), 1.0, 2.0, 0.5], start=1):
        points = [Metric("val/loss", value, 1000 * epoch, epoch), Metric("train/loss", -value, 1000 * epoch, epoch)]
        client.log_batch(run, points)
    found = events(tmp_path, METRICS, 0.5, 4.0)
    assert [(e.seconds, e.epoch, e.value, e.held_out) for e in found] == [
        (0.5, 1, 3.0, -3.0),
        (2.5, 3, 1.0, -1.0),
        (3.5, 4, 2.0, -2.0),
    ]
    assert improvements(found, "minimize") == [(0.5, 3.0, -3.0), (2.5, 1.0, -1.0)]
    assert improvements(found, "maximize") == [(0.5, 3.0, -3.0)]


@pytest.mark.usefixtures("process")
def test_the_kill_reaches_sessions_of_their_own(tmp_path):
    """As those of Ray's cluster; and a contender that ends by itself is told from one that was killed."""
    script = "setsid sleep 1000 & echo $! > {0}/new; mv {0}/new {0}/pid; sleep 1000"
    for budget in (0.5, 4.0, 32.0, 256.0):
        begun = time.time()
        started, code = race(["sh", "-c", script.format(tmp_path)], tmp_path, budget)
        assert begun <= started and code is None
        if (tmp_path / "pid").exists():
            break
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert race(["sh", "-c", "exit 3"], tmp_path, 1000.0)[1] == 3


@pytest.mark.usefixtures("process")
def test_a_race_that_is_killed_leaves_no_contender(tmp_path):
    script = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 1000"
    code = "import sys; from pathlib import Path; from bench.racing.contenders import race; "
    code += "race(['sh', '-c', sys.argv[1]], Path(sys.argv[2]), 1000.0)"
    harness = subprocess.Popen([sys.executable, "-c", code, script, str(tmp_path)], cwd=ROOT)
    while not (tmp_path / "pid").exists():
        time.sleep(0.05)
    contender = psutil.Process(int((tmp_path / "pid").read_text()))
    harness.kill()
    harness.wait()
    assert not psutil.wait_procs([contender], timeout=60)[1]


# --- What is shown


def row(contender, seed, curve, epochs=100, mode="maximize", workload="mlp"):
    of = {"workload": workload, "contender": contender, "seed": seed, "budget": 10.0, "processes": 2, "load": 0.5}
    return of | {"curve": curve, "epochs": epochs, "trials": 10, "metric": "val/accuracy", "mode": mode}


ROWS = [
    row("hpo", 0, [[2.0, 0.5, 0.4], [4.0, 0.9, 0.8]], 300),
    row("hpo", 1, [[1.0, 0.7, 0.6]], 500),
    row("other", 0, [[3.0, 0.9, 0.7]]),
    row("other", 1, [[5.0, 0.7, 0.6]]),
]


def test_the_table_says_who_is_ahead_at_each_tenth():
    text = show.table(ROWS, "mlp")
    cells = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in text.splitlines() if line.startswith("|")
    }
    assert cells["hpo"][:5] == ["", "0.6000", "0.6000", "0.8000", "0.8000"] and cells["other"][:5] == 4 * [""] + [
        "0.8000"
    ]
    assert cells["hpo"][10:14] == ["0.7000", "1.5", "3600", "144000"]
    assert "against other: ahead at 20 %, 30 %, 40 %; even at 50 %, 60 %, 70 %, 80 %, 90 %, 100 %" in text
    assert "hpo has 4.00 times those of the best peer, other" in text


@pytest.mark.parametrize(
    ("ours", "theirs", "mode", "word"),
    [
        (1.0, 2.0, "minimize", "ahead"),
        (1.0, 2.0, "maximize", "behind"),
        (1.0, 1.0, "minimize", "even"),
        (float("nan"), 2.0, "minimize", "behind"),
        (9.0, float("nan"), "minimize", "ahead"),
        (float("nan"), float("nan"), "minimize", ""),
    ],
)
def test_who_has_no_value_yet_is_behind(ours, theirs, mode, word):
    assert show.standing(ours, theirs, mode) == word


def test_the_figure_has_a_panel_for_each_workload(tmp_path):
    gpt = [row("hpo", 0, [[1.0, 3.0, 3.0]], mode="minimize", workload="gpt")]
    show.plot(ROWS + gpt, ["mlp", "gpt"], tmp_path / "race.svg")
    text = (tmp_path / "race.svg").read_text()
    assert text.count("<!-- seconds since the command -->") == 2 and "<!-- other -->" in text


def bench(*words):
    return subprocess.run([sys.executable, "bench/race.py", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.usefixtures("process")
def test_the_command_shows_what_its_cache_has(tmp_path):
    cache = tmp_path / "cells.jsonl"
    cache.write_text("".join(json.dumps(one) + "\n" for one in ROWS if one["contender"] == "hpo"))
    given = ["--cache", str(cache), "--workloads", "mlp", "--budget", "10", "--seeds", "2", "--contenders"]
    ended = bench(*given, "hpo")
    assert ended.returncode == 0 and "0.6000" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--contenders", "no"], "--contenders 'no': give some of hpo;"),
        (["--text", "no"], "--text no is not there"),
        (["--workloads", "mpl"], "--workloads 'mpl': give some of mlp"),
        (["--budget", "mpl=4"], "'mpl=4': give seconds, or such as"),
        (["--budget", "0"], "'0': give seconds, or such as"),
    ],
)
def test_a_mistake_at_the_command_is_one_sentence(words, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["race.py", "--cache", "cells", *words])
    with pytest.raises(SystemExit) as ended:
        parsed()
    assert ended.value.code == 2 and says in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("process")
def test_hpo_and_the_hand_written_loop_race(tmp_path):
    """Both report epochs, of which a plot is made; the budget grows until a busy machine has let both begin."""
    cache, figure = tmp_path / "cells.jsonl", tmp_path / "race.png"
    given = ["--cache", str(cache), "--workloads", "mlp", "--seeds", "1", "--plot", str(figure)]
    for budget in (15, 60, 240):
        ended = bench(*given, "--budget", str(budget), "--contenders", "hpo;Optuna, TPE and median")
        assert ended.returncode == 0, ended.stdout
        rows = [json.loads(line) for line in cache.read_text().splitlines()][-2:]
        if all(one["epochs"] > 20 for one in rows):
            break
    assert {one["contender"] for one in rows} == {"hpo", "Optuna, TPE and median"} and figure.stat().st_size > 10_000
    assert all(0.5 < one["curve"][-1][1] <= 1.0 and one["curve"][-1][0] <= budget for one in rows)
