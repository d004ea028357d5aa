"""Scripts that others wrote, changed as docs/guide/foreign-scripts.md prints: trained, stopped, killed and resumed.

`FOREIGN_SCRIPTS` names a directory with `mnist/` of pytorch/examples and a clone of nanoGPT, at the commits that the
guide names; trl's script is that of the installed package. Models, data and what cannot be downloaded are made here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from pages import differences, files
from places import ROOT

import hpo

pytestmark = [pytest.mark.whole, pytest.mark.slow, pytest.mark.usefixtures("process"), pytest.mark.timeout(3600)]

PAGE = ROOT / "docs" / "guide" / "foreign-scripts.md"
SCRIPTS = os.environ.get("FOREIGN_SCRIPTS")
TEXT = Path(__file__).parents[2] / "LICENSE"
TRIALS = 4

TRANSFORMS = """
class Compose:
    def __init__(self, parts): self.parts = parts
    def __call__(self, x):
        for part in self.parts: x = part(x)
        return x
class ToTensor:
    def __call__(self, x): return x
class Normalize:
    def __init__(self, mean, std): self.mean, self.std = mean[0], std[0]
    def __call__(self, x): return (x - self.mean) / self.std
"""
DATASETS = """
import torch
from sklearn.datasets import load_digits
class MNIST(torch.utils.data.Dataset):
    def __init__(self, root, train=True, download=False, transform=None):
        digits = load_digits()
        images = torch.nn.functional.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, 28)
        part = slice(0, 320) if train else slice(320, 480)
        self.images, self.targets, self.transform = images[part], torch.tensor(digits.target)[part], transform
    def __len__(self): return len(self.images)
    def __getitem__(self, i): return self.transform(self.images[i]), self.targets[i]
"""
TINY = """
import json, sys, torch
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
vocab = {c: i for i, c in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
tokens = Tokenizer(models.BPE(vocab, []))
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
own = {"eos_token": "<|end|>", "pad_token": "<|end|>", "model_max_length": 64}
PreTrainedTokenizerFast(tokenizer_object=tokens, **own).save_pretrained("tiny")
torch.manual_seed(0)
sizes = {"vocab_size": len(vocab), "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained("tiny")
"""


def mnist(place: Path) -> str:
    """With a stand-in for torchvision: scikit-learn's digits in MNIST's size."""
    shutil.copytree(Path(_scripts()) / "mnist", place / "mnist")
    package = place / "standin" / "torchvision"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("transforms", TRANSFORMS), ("datasets", DATASETS)):
        (package / f"{name}.py").write_text(text)
    return "mnist/mnist.yaml"


def nanogpt(place: Path) -> str:
    """On a small text, which the repository's own script makes tokens of."""
    shutil.copytree(Path(_scripts()) / "nanoGPT", place / "nanoGPT", ignore=shutil.ignore_patterns(".*"))
    data = place / "nanoGPT" / "data" / "shakespeare_char"
    (data / "input.txt").write_text(TEXT.read_text() * 3)
    subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True, capture_output=True)
    return "nanoGPT/gpt.yaml"


def sft(place: Path) -> str:
    """With a model of two layers, made here."""
    if not (found := find_spec("trl")) or not found.submodule_search_locations:
        pytest.skip("runs where make test has installed trl")
    pytest.importorskip("hpo.integrations.huggingface", reason="runs where make test has installed transformers")
    (place / "sft" / "data").mkdir(parents=True)
    shutil.copy(Path(found.submodule_search_locations[0]) / "scripts" / "sft.py", place / "sft")
    subprocess.run([sys.executable, "-c", TINY], cwd=place / "sft", check=True, capture_output=True)
    lines = [line.strip() for line in TEXT.read_text().splitlines() if len(line.strip()) > 30]
    for split, part in (("train", lines[:100]), ("test", lines[100:140])):
        rows = "".join(json.dumps({"text": line}) + "\n" for line in part)
        (place / "sft" / "data" / f"{split}.jsonl").write_text(rows)
    return "sft/sft.yaml"


def _scripts() -> str:
    if SCRIPTS is None:
        pytest.skip("runs with FOREIGN_SCRIPTS=DIR, a directory with copies of the scripts")
    return SCRIPTS


def changed(place: Path) -> None:
    """Write the guide's files and apply its differences to the scripts that are there."""
    for name, text in files(PAGE).items():
        if (place / name).parent.is_dir() and "/" in name:
            (place / name).write_text(text)
    for difference in differences(PAGE):
        if (place / difference.split()[1]).is_file():
            subprocess.run(["patch", "-p0"], cwd=place, input=difference, text=True, check=True, capture_output=True)


def start(place: Path, study: str, home: str, **environ: str) -> subprocess.Popen[str]:
    command = ["-m", "hpo", "run", "--study", str(place / study), "--trials", str(TRIALS), "--executor", "inline"]
    python_path = os.pathsep.join([str(place / "standin"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, *command, "--seed", "1", "--home", str(place / home)],
        env=os.environ | {"PYTHONPATH": python_path} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def reported(home: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{home / 'ledger.db'}?mode=ro", uri=True)) as ledger:
        return ledger.execute("SELECT count(*) FROM reports").fetchone()[0]


def kill_program(driver: subprocess.Popen[str], script: str, home: Path) -> None:
    """SIGKILL the script itself once it has reported again, in whichever trial lives on after that."""
    before = reported(home)
    while driver.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(driver.pid).children(recursive=True):
                if process.cmdline()[1:2] == [script] and reported(home) > before:
                    process.kill()
                    return
        time.sleep(0.05)
    raise AssertionError(f"no {script} has lived on after a report: {driver.communicate()[0]}")


@pytest.mark.parametrize("made", [mnist, nanogpt, sft], ids=lambda made: made.__name__)
def test_a_foreign_script_is_tuned_pruned_killed_and_resumed(made: Callable[[Path], str], tmp_path):
    study = made(tmp_path)
    changed(tmp_path)
    driver = start(tmp_path, study, "whole")
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    whole = hpo.open(home=tmp_path / "whole")
    assert "pruned" in output and whole.best["value"] > 0, output

    kill = {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@2"}
    driver = start(tmp_path, study, "killed", **kill)
    driver.communicate()
    assert driver.returncode == -signal.SIGKILL
    driver = start(tmp_path, study, "killed")
    kill_program(
        driver, {"mnist": "main.py", "nanogpt": "train.py", "sft": "sft.py"}[made.__name__], tmp_path / "killed"
    )
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    assert hpo.open(home=tmp_path / "killed").digest == whole.digest
    print(output)
