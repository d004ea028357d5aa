"""`hpo export` of language models and of quantised models, on small studies that were really run."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from places import ROOT
from typer.testing import CliRunner

import hpo
from hpo.analysis.models.checkpoints import declared, trained
from hpo.cli.main import app
from hpo.ledger import Ledger
from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

CORPUS = {"data.corpus.general": 30, "data.corpus.target": 20, "train.num_epochs": 1, "samples.tokens": 0}
SMALL = CORPUS | {"model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory, process) -> Home:
    """A trial of gpt, and one of mlp."""
    home = Home.at(tmp_path_factory.mktemp("language") / "home")
    small = {"train.num_epochs": 1, "model.num_layers": 1, "model.hidden_size": 16}
    for study, overrides in (("gpt", SMALL), ("mlp", small)):
        hpo.run(study, trials=1, overrides=overrides, home=home.root, executor="inline", progress=False, finish="none")
    return home


def invoked(home: Home, study: str, *arguments: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CliRunner().invoke(app, ["export", "0", "--study", study, *arguments, "--home", str(home.root)])


def test_a_trial_of_gpt_is_a_directory_that_transformers_opens(home, tmp_path):
    transformers = pytest.importorskip("transformers", reason="runs with pip install -e '.[llm]'")
    path = tmp_path / "there"
    shown = invoked(home, "gpt", "--format", "huggingface", "--to", str(path))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(f"{path}: huggingface, ") and "opened by transformers, its logits" in shown.stdout
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "hpo.json"}
    assert {file.name for file in path.iterdir()} == names
    assert json.loads((path / "hpo.json").read_text())["trial"] == "0"
    tokens = torch.randint(257, (2, 60))
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path).eval()(tokens).logits
        ours = hpo.open("gpt", home=home.root).load_model(0)(tokens)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    again = invoked(home, "gpt", "--format", "huggingface", "--to", str(path), "--force")
    assert again.exit_code == 2 and "is not empty, and nothing in it is overwritten: name a new" in again.stderr


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_loss_of_quality_is_that_of_the_file(kind, home, tmp_path, monkeypatch):
    """The metrics before are those reported; those after are of a model that was read back as the guide has it."""
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/models.md").read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "small.safetensors"
    shown = invoked(home, "mlp", "--quantize", kind, "--to", str(path), "--json")
    assert shown.exit_code == 0, shown.output
    done, beside = json.loads(shown.stdout), json.loads((tmp_path / "small.quality.json").read_text())
    with closing(Ledger(home.storage, create=False)) as ledger, ledger.read() as connection:
        study, kept = declared(connection, "mlp"), trained(connection, home, "mlp", 0)
    assert kept is not None
    task = kept.task(study)
    task.progress, model = 1.0, task.model()
    reported = hpo.open("mlp", home=home.root).trial(0)["curves"]
    model.load_state_dict(kept.weights())
    with torch.no_grad():
        assert task.evaluate(model.eval()) == pytest.approx(done["before"], rel=1e-6)
        exec(block, {"model": model})
        assert task.evaluate(model.eval()) == pytest.approx(done["after"], rel=1e-6)
    assert done["before"]["val/loss"] == pytest.approx(reported["val/loss"][-1][2], rel=1e-6)
    assert done["after"]["val/loss"] != done["before"]["val/loss"]
    assert (beside["before"], beside["after"]) == (done["before"], done["after"])
    assert next(iter(done["before"])) == "val/accuracy" and done["layers"] == 2
    refused = invoked(home, "mlp", "--quantize", kind, "--to", str(path))
    assert refused.exit_code == 2 and "exists already: name another file, or give --force" in refused.stderr
    again = invoked(home, "mlp", "--quantize", kind, "--to", str(path), "--force")
    assert again.exit_code == 0 and f"linear layers in {kind}" in again.stdout
    assert [line.split()[0] for line in again.stdout.splitlines()[1:3]] == ["trained", "val/accuracy"]


@pytest.mark.parametrize(
    ("study", "arguments", "sentence"),
    [
        ("gpt", ("--format", "ggml", "--to", "x"), "choose one of safetensors, onnx, torch, gguf, huggingface."),
        ("mlp", ("--format", "huggingface", "--to", "x"), "MlpTask trains no language model: choose"),
        ("gpt", ("--format", "huggingface", "--to", "."), "--to . is not empty, and nothing in it is overwritten"),
        ("gpt", ("--quantize", "int3", "--to", "x.safetensors"), "--quantize int3 is not known: choose one of int8"),
        ("gpt", ("--quantize", "nf4", "--to", "x.onnx"), "--quantize nf4 is written as safetensors: name a file"),
        ("gpt", ("--quantize", "nf4", "--format", "onnx", "--to", "x"), "as safetensors: leave --format out."),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(home, study, arguments, sentence):
    shown = invoked(home, study, *arguments)
    assert shown.exit_code == 2 and sentence in shown.stderr, shown.output
    assert not Path("x").exists()


def test_a_study_has_no_weights_to_quantise(home):
    shown = CliRunner().invoke(app, ["export", "--study", "mlp", "--quantize", "nf4", "--to", "x.csv"])
    assert shown.exit_code == 2 and "--quantize nf4: only a trial's model has weights: give the" in shown.stderr


def test_the_handle_writes_what_the_command_does(home, tmp_path):
    """Each option of the command that is of a model is an argument, and messages name arguments."""
    command = typer.main.get_command(app).commands["export"]  # type: ignore[attr-defined]
    of_a_study = {"study", "name", "home", "storage", "as_json", "help"}
    arguments = {*inspect.signature(hpo.StudyHandle.export_model).parameters} - {"self"}
    assert arguments == {str(one.name) for one in command.params} - of_a_study
    found = hpo.open("mlp", home=home.root)
    done = found.export_model(tmp_path / "a.safetensors", 0, quantize="int8")
    shown = invoked(home, "mlp", "--quantize", "int8", "--to", str(tmp_path / "a.safetensors"), "--force", "--json")
    assert done == json.loads(shown.stdout)
    with pytest.raises(hpo.HpoError, match=r"to='.*a.safetensors' exists already: .* give force=True to replace it"):
        found.export_model(tmp_path / "a.safetensors", 0)
    with pytest.raises(hpo.HpoError, match="quantize='int3' is not known"):
        found.export_model(tmp_path / "b.safetensors", quantize="int3")


def test_an_onnx_file_comes_with_tensorrts_command(home, tmp_path):
    pytest.importorskip("onnxruntime", reason="runs with pip install -e '.[onnx]'")
    path = tmp_path / "model.onnx"
    shown = invoked(home, "mlp", "--to", str(path))
    assert shown.exit_code == 0, shown.output
    note = shown.stdout.splitlines()[-1]
    assert note.startswith("TensorRT, which was not tried here, makes an engine of it by `trtexec --onnx=")
    import onnxruntime

    [node] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()
    assert f"--onnx={path} --saveEngine={tmp_path / 'model.engine'}" in note
    assert f"--minShapes={node.name}:1x64 --optShapes={node.name}:8x64 --maxShapes={node.name}:64x64`." in note
