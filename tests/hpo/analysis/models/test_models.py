"""`hpo soup` and `hpo export` on a small study that was really run."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
import torch
from places import HARNESS
from safetensors import safe_open
from safetensors.torch import load_file
from sqlalchemy import select, update
from typer.testing import CliRunner

import hpo
from hpo.analysis.models import soup
from hpo.analysis.models.checkpoints import declared, trained
from hpo.cli.main import app
from hpo.driver.request import request_of
from hpo.driver.run import run
from hpo.errors import HomeError, UserError
from hpo.ledger import Ledger, answer, queries
from hpo.ledger.database import tables
from hpo.storage import gc
from hpo.storage.home import Home
from hpo.verify import verify
from trainer.checkpoint.manifest import weights
from trainer.checkpoint.store import load
from trainer.errors import CheckpointError

pytestmark = pytest.mark.whole

PINNED = {"model.num_layers": 1, "train.num_epochs": 3, "train.optim.name": "adamw", "train.batch_size": 64}


def searched(home: Home, trials: int, overrides: dict) -> Home:
    request = request_of(
        home=home, reference="mlp", trials=trials, executor="inline", sampler="random", overrides=overrides
    )
    assert run(request, lambda ledger, name, workers: lambda notice="": None).state == "complete"
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory, process) -> Home:
    """Five trials: two of them with an average of the weights, of two sizes of model."""
    return searched(Home.at(tmp_path_factory.mktemp("models") / "home"), 5, PINNED | {"train.average.name": "ema"})


def invoked(home: Home, *arguments: str):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root), "--tracking-uri", home.tracking_uri])


@pytest.fixture(scope="module")
def alike(tmp_path_factory, process) -> Home:
    return searched(Home.at(tmp_path_factory.mktemp("alike") / "home"), 4, PINNED | {"model.hidden_size": 16})


def test_a_soup_is_judged_beside_the_best_and_opens_as_a_model(alike, tmp_path):
    shown = invoked(alike, "soup", "--top", "4", "--to", str(tmp_path / "soup"))
    assert shown.exit_code == 0, shown.output
    header, *rows = shown.stdout.splitlines()
    assert header.split()[0] == "val/accuracy"
    values = {row[:12].strip(): float(row[12:].split()[0]) for row in rows[:3]}
    ledger = Ledger(alike.storage, create=False)
    with ledger.read() as connection:
        [best] = answer.bests(connection, queries.study_row(connection, "mlp"))
    assert values["best trial"] == pytest.approx(best.value, abs=1e-6), "evaluated as its own run was"
    assert values["greedy soup"] >= values["best trial"]
    found = soup.soup(ledger, alike, "mlp", 4)
    ledger.close()
    model = hpo.load("mlp").load_model(tmp_path / "soup")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in found.best.weights.items())
    report = verify(alike, alike.storage, alike.tracking_uri)
    assert (report.differences, report.behind) == ([], 0)
    [shown_there] = alike.artifacts.rglob("soup.json")
    assert json.loads(shown_there.read_text())["uniform soup"]["trials"] == found.mixtures[2].trials
    again = invoked(alike, "soup", "--to", str(tmp_path / "soup"))
    assert again.exit_code == 2 and "exists already" in again.stderr and again.stdout == ""


def test_a_trials_own_checkpoints_are_averaged(alike, tmp_path):
    shown = invoked(alike, "soup", "--trial", "0", "--top", "9", "--to", str(tmp_path / "soup"))
    assert shown.exit_code == 0, shown.output
    header, *rows = shown.stdout.splitlines()
    assert header.split()[-1] == "steps" and rows[0].startswith("best checkpoint")
    kept = sorted(alike.checkpoints("mlp", 0).glob("step-*"))
    steps = [int(path.name[5:13]) for path in kept]
    assert sorted(map(int, rows[2].split("  ")[-1].split(", "))) == steps and len(steps) > 1
    ledger = Ledger(alike.storage, create=False)
    uniform = soup.of_one_trial(ledger, alike, "mlp", 0, 9).mixtures[2]
    ledger.close()
    for name, tensor in uniform.weights.items():
        mean = sum(load(path)["model"][name].double() for path in kept) / len(kept)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)
    hpo.load("mlp").load_model(tmp_path / "soup")
    with pytest.raises(UserError, match="trial 0 of study 'mlp' has no checkpoint any more: what the study keeps, or"):
        emptied(alike)


def test_a_soup_that_cannot_be_saved_leaves_nothing(alike, tmp_path):
    with closing(Ledger(alike.storage, create=False)) as ledger:
        found = soup.of_one_trial(ledger, alike, "mlp", 0, 9)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(HomeError, match=r"soup cannot be written .*: name another directory"):
            soup.save(found, tmp_path / "deep" / "soup")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*(tmp_path / "deep").iterdir()] == []


def emptied(home: Home) -> None:
    """The same of a trial that keeps nothing: in a copy, whose files stay."""
    with tempfile.TemporaryDirectory() as place:
        copy = Home.at(shutil.copytree(home.root, Path(place) / "home"))
        with closing(Ledger(copy.storage, create=False)) as ledger:
            with ledger.write() as connection:
                connection.execute(update(tables.checkpoints).values(state="deleted"))
            soup.of_one_trial(ledger, copy, "mlp", 0, 9)


def test_checkpoints_that_are_gone_are_not_blamed_on_models(alike, tmp_path):
    copy = Home.at(shutil.copytree(alike.root, tmp_path / "home"))
    with closing(Ledger(copy.storage, create=False)) as ledger, ledger.write() as connection:
        first = queries.ranked(connection, queries.study_row(connection, "mlp"))[0]
        kept = select(tables.trials.c.id).where(tables.trials.c.number == first)
        gone = update(tables.checkpoints).where(tables.checkpoints.c.trial_id.not_in(kept))
        connection.execute(gone.values(state="deleted"))
    said = invoked(copy, "soup")
    assert said.exit_code == 2 and "1 can be used (without a checkpoint: trials" in said.stderr
    assert said.stderr.endswith("train those whose checkpoint is gone again.\n")


def test_trials_of_another_architecture_are_named_and_left_out(home):
    ledger = Ledger(home.storage, create=False)
    with ledger.read() as connection:
        rows = {row.number: row.params for row in queries.trial_rows(connection, 1)}
        order = queries.ranked(connection, queries.study_row(connection, "mlp"))
    ledger.close()
    sizes = [rows[number]["model.hidden_size"] for number in order]
    others = [str(number) for number, size in zip(order, sizes, strict=True) if size != sizes[0]]
    shown = invoked(home, "soup", "--top", "5")
    assert f"of another architecture than trial {order[0]}: trials {', '.join(others)}" in shown.output
    if len(order) - len(others) < 2:
        assert shown.exit_code == 2 and "a soup is made of at least two trials" in shown.stderr


def test_a_model_of_an_averaged_trial_has_the_weights_that_were_evaluated(home, tmp_path):
    """From its directory, its run's artifacts and MLflow's model: all give the metrics reported beside them."""
    study, ledger = hpo.load("mlp"), Ledger(home.storage, create=False)
    with ledger.read() as connection:
        found = trained(connection, home, "mlp", 1)
    ledger.close()
    config = study.rebuild(found.config, found.config_hash)
    shown = json.loads(CliRunner().invoke(app, ["show", "1", "--json", "--home", str(home.root)]).stdout)
    reported = {(step, key): value for key in ("val/loss", "val/accuracy") for step, _, value in shown["curves"][key]}
    client = mlflow.MlflowClient(home.tracking_uri)
    experiment = client.get_experiment_by_name("mlp").experiment_id
    filters = f"tags.`hpo.trial` = '1' AND tags.`hpo.step` = '{found.step}'"
    [made] = client.search_logged_models([experiment], filters)
    mlflow.set_tracking_uri(home.tracking_uri)
    model = Path(mlflow.artifacts.download_artifacts(f"models:/{made.model_id}", dst_path=str(tmp_path)))
    assert {one.name for one in model.iterdir()} == {"average.safetensors", "manifest.json", "config.json"}
    run = Path(client.get_run(made.source_run_id).info.artifact_uri) / f"checkpoints/step-{found.step:08d}"
    for opened in (study.load_model(model), study.load_model(run), study.load_model(found.path, config)):
        with torch.no_grad():
            metrics = study.task_class()(config).evaluate(opened)
        assert [metrics[key] for key in ("val/loss", "val/accuracy")] == [
            reported[found.step, key] for key in ("val/loss", "val/accuracy")
        ]
    raw = study.task_class()(config).model()
    raw.load_state_dict(load_file(found.path / "model.safetensors"))
    assert any(not torch.equal(p, opened.state_dict()[name]) for name, p in raw.state_dict().items())
    (model / "average.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"average.safetensors is missing"):
        study.load_model(model)


def test_what_was_evaluated_is_the_average_once_something_has_entered_it():
    average = {"updates": 0, "model": {}}
    assert weights({"model": {"w": 0}, "average": average}) == {"w": 0}
    assert weights({"model": {"w": 0}, "average": average | {"updates": 3, "model": {"w": 1}}}) == {"w": 1}
    skipped = {"updates": 0, "model": {"w": 1}}  # its windows were not finite, which a device alone knew
    assert weights({"model": {"w": 0}, "average": skipped}) == {"w": 1}
    assert weights({"model": {"w": 0}, "average": None}) == weights({"model": {"w": 0}}) == {"w": 0}
    assert weights({"model": {"w": 0}, "average": [1.0]}) == {"w": 0}, "an item of a loop of one's own"


PARTS = HARNESS / "parts_study.py"


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("zero3", ["data=2", "shard=zero3"]),
        pytest.param("tensor", ["tensor=2"], marks=pytest.mark.slow),
    ],
)
def test_what_ranks_have_saved_in_parts_is_mixed_exported_and_opened(kind, fields, tmp_path):
    """A study of two ranks a trial, from the command on; every value is the one that the ranks have reported."""
    home = Home.at(tmp_path / "home")
    at = ["--home", str(home.root)]
    overrides = [word for field in fields for word in ("-o", f"train.parallel.{field}")]
    words = ["run", "--study", str(PARTS), "--trials", "2", "--workers", "1", "--seed", "3", *overrides, *at]
    done = subprocess.run([sys.executable, "-m", "hpo", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = Ledger(home.storage, create=False)
    with ledger.read() as connection:
        [of_all] = answer.bests(connection, queries.study_row(connection, "parts"))
        number, best = of_all.number, of_all.value
        study, found = declared(connection, "parts"), trained(connection, home, "parts", number)
    ledger.close()
    assert len([*found.path.glob("model-*-of-00002.safetensors")]) == 2
    task = found.task(study)
    assert task.evaluate(task_model(task, found.weights())) == {"val/loss": pytest.approx(best, rel=1e-5)}
    opened = study.load_model(found.path, study.rebuild(found.config, found.config_hash))
    plain = load(found.path)["model"]
    assert all(torch.equal(tensor, plain[name]) for name, tensor in opened.state_dict().items())

    shown = invoked(home, "soup", "--study", "parts", "--top", "2", "--to", str(tmp_path / "soup"))
    assert shown.exit_code == 0, shown.output
    values = [float(row[12:].split()[0]) for row in shown.stdout.splitlines()[1:4]]
    assert values[0] == pytest.approx(best, rel=1e-5)
    better = task.evaluate(study.load_model(tmp_path / "soup"))["val/loss"]
    assert better == pytest.approx(min(values[1:]), rel=1e-5)

    shown = invoked_quietly(home, "export", str(number), "--study", "parts", "--to", str(tmp_path / "m.safetensors"))
    assert shown.exit_code == 0, shown.output
    assert task.evaluate(task_model(task, load_file(tmp_path / "m.safetensors")))["val/loss"] == pytest.approx(best)
    report = verify(home, home.storage, home.tracking_uri)
    assert (report.differences, report.behind) == ([], 0)


@pytest.mark.usefixtures("process")
def test_a_frozen_base_lies_on_the_disk_once_for_a_trial(tmp_path):
    """In the home as in MLflow's artifacts and models; each checkpoint opens, and `hpo gc` frees what it says."""

    def bases() -> list[Path]:
        return sorted(home.root.rglob("model-frozen.safetensors"))

    home = Home.at(tmp_path / "home")
    overrides = {"frozen": True, "train.num_epochs": 3, "train.checkpoint.keep_last": 3}
    request = request_of(
        home=home, reference=str(PARTS), trials=2, executor="inline", sampler="random", overrides=overrides
    )
    assert run(request, lambda ledger, name, workers: lambda notice="": None).state == "complete"
    study = hpo.load(str(PARTS)).configure(overrides)
    checkpoints = [path.parent for path in bases() if "checkpoints/parts" in str(path)]
    assert len(checkpoints) == 2 * 3 and len(bases()) > 2 * len(checkpoints)
    assert len({path.stat().st_ino for path in bases()}) == 2
    for path in bases():
        config = None if (path.parent / "config.json").exists() else study.config
        assert study.load_model(path.parent, config).state_dict()["2.weight"].shape == (512, 512)
    shown = invoked(home, "gc", "--study", "parts")
    assert "freed 1.2" in shown.stdout or "freed 1.1" in shown.stdout, shown.output
    assert len({path.stat().st_ino for path in bases()}) == 1
    report = verify(home, home.storage, home.tracking_uri)
    assert (report.differences, report.behind) == ([], 0)


@torch.no_grad()
def task_model(task, weights) -> torch.nn.Module:
    model = task.model()
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.parametrize(
    ("format", "file", "given"),
    [
        ("safetensors", "model.safetensors", ()),
        ("torch", "model.PT2", ()),
        ("torch", "model.torch", ("--format", "torch")),
        ("onnx", "model.onnx", ()),
    ],
)
def test_an_export_gives_what_the_model_gives(home, tmp_path, format, file, given):
    if format == "onnx":
        pytest.importorskip("onnxruntime", reason="runs with pip install -e '.[onnx]'")
    path = tmp_path / file
    path.write_text("before")
    refusal = invoked_quietly(home, "export", "1", *given, "--to", str(path))
    assert (refusal.exit_code, path.read_text()) == (2, "before")
    assert f"--to {path} exists already: name another file, or give --force to replace it." in refusal.stderr
    shown = invoked_quietly(home, "export", "1", *given, "--to", str(path), "--force")
    assert shown.exit_code == 0, shown.output
    assert float(shown.stdout.split("differ by ")[1].split()[0]) < 1e-4
    assert path.is_file() and [one.name for one in tmp_path.iterdir()] == [path.name]
    x = torch.rand(5, 64)  # another batch size than that it was made with
    with torch.no_grad():
        expected = reference(home)(x)
        got = outputs(path, format, x, expected)
    assert torch.allclose(got, expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def invoked_quietly(home: Home, *arguments: str):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


def reference(home: Home) -> torch.nn.Module:
    """The average of the weights, which the trial was evaluated with, in a model of its configuration."""
    ledger = Ledger(home.storage, create=False)
    with ledger.read() as connection:
        study, found = declared(connection, "mlp"), trained(connection, home, "mlp", 1)
    ledger.close()
    model = found.task(study).model()
    model.load_state_dict(load(found.path)["average"]["model"])
    return model.eval()


def outputs(path: Path, format: str, x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if format == "torch":
        with open(path, "rb") as file:
            return torch.export.load(file).module()(x)
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    with safe_open(path, "pt") as file:
        assert {"study", "trial", "step", "config"} <= file.metadata().keys()
        first, last = (sorted(name for name in file.keys() if name.endswith(kind)) for kind in ("weight", "bias"))  # noqa: SIM118
        hidden = torch.nn.functional.gelu(x @ file.get_tensor(first[0]).T + file.get_tensor(last[0]))
        return hidden @ file.get_tensor(first[1]).T + file.get_tensor(last[1])


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["export", "9", "--to", "x.onnx"], 2, "has no trial 9: it has trials 0 to 4"),
        (["export", "1", "--format", "ggml", "--to", "x"], 2, "is not known: choose one of safetensors, onnx, torch,"),
        (["export", "1", "--to", "/proc/none/x.pt2"], 2, "directory /proc/none does not exist"),
        (["export", "1", "--to", "x"], 2, "give --format, or a file that ends in .safetensors, .onnx, .pt2, .gguf."),
        (["export", "1", "--to", "x.csv"], 2, "--to x.csv: a trial's model is exported as safetensors, onnx, "),
    ],
)
def test_what_cannot_be_exported_is_refused_in_a_sentence(home, arguments, code, sentence):
    shown = invoked_quietly(home, *arguments)
    assert shown.exit_code == code and sentence in shown.stderr
    assert not Path("x").exists()


def test_without_the_extra_it_is_named(home, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    shown = invoked_quietly(home, "export", "1", "--format", "onnx", "--to", str(tmp_path / "m.onnx"))
    assert shown.exit_code == 2 and "needs onnxruntime: pip install 'hpo[onnx]'" in shown.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_gc_has_taken_cannot_be_exported(alike, tmp_path):
    alike = Home.at(shutil.copytree(alike.root, tmp_path / "home"))  # what others read stays
    ledger = Ledger(alike.storage, create=False)
    gone = {row.number for row in gc.collect(ledger, alike, "mlp").dropped}
    ledger.close()
    shown = invoked_quietly(alike, "export", str(min(gone)), "--to", "x.onnx")
    assert shown.exit_code == 2 and "has no checkpoint any more" in shown.stderr
    shown = invoked(alike, "soup")
    assert shown.exit_code == 2 and "without a checkpoint: trials" in shown.stderr
