"""Whatever a user gets wrong, and whatever breaks under it: one clear sentence, an exit code, and nothing lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from crafted import open_crafted, put_trial
from places import ROOT
from pydantic import BaseModel
from sqlalchemy import select, update
from typer.testing import CliRunner

from hpo import Choice, Int, Objective, Study
from hpo.cli.commands import Commands
from hpo.cli.main import app
from hpo.declaration import preflight
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.errors import HomeError, UserError
from hpo.ledger import Ledger
from hpo.ledger.database import store, tables
from hpo.storage.home import Home
from hpo.tracking.mlflow import damage
from hpo.tracking.mlflow import tracker as mlflow
from studies.mlp.config import Config as MlpConfig

pytestmark = pytest.mark.whole

HEADER = "date,code,open,high,low,close,volume\n"
FLAGS = ("--study", "mlp", "--trials", "2", "--executor", "inline", "--sampler", "random", "-o", "train.num_epochs=4")

STUDY = """
from hpo import Bool, Choice, Float, Int, Objective, Study
from studies.mlp.config import Config

STUDY = Study("mine", Config(), "studies.mlp.task:MlpTask", {space}, [Objective("val/loss")])
"""


class Loop:
    """A task that would train itself."""

    def fit(self, reporter, checkpoints):
        raise NotImplementedError


def hpo(*arguments: str, home: Home):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


def refused(result, code: int = 2) -> str:
    """The one sentence on stderr."""
    assert result.exit_code == code, (result.output, result.exception)
    # What takes its time, as a test beside much else may, says so first.
    lines = result.stderr.removeprefix("reading the study and its data ...\n").strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def never_started(home: Home) -> None:
    """No study was written, no process started."""
    assert not (home.root / "logs").exists()
    assert not (home.root / "mlflow.db").exists()
    assert not (home.root / "ledger.db").exists()


def spec_of(study: Study) -> StudySpec:
    judged = {"objectives": [one.to_json() for one in study.objectives], "metrics": []}
    return StudySpec(reference="own", name="own", sampler="tpe", strategy={"name": "none"}, window=1, **judged)


def run(*arguments: str, home: Home) -> str:
    sentence = refused(hpo("run", "--trials", "1", *arguments, home=home))
    never_started(home)
    return sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--study", "mpl"], ["unknown study 'mpl'", "did you mean 'mlp'?"]),
        (["--study", "nowhere.py"], ["nowhere.py cannot be read", "No such file"]),
        (
            ["--study", "mlp", "--executor", "inline", "--workers", "2"],
            ["--workers 2: the inline executor"],
        ),
        (["--study", "mlp", "--name", "../x"], ["'../x' cannot be used", "letters, digits"]),
        (["--study", "mlp", "--name", "con"], ["'con' cannot be used"]),
        (["--study", "mlp", "--name", "a" * 65], ["cannot be used", "63"]),
        (["--study", "mlp", "-o", "train.optm.lr=1"], ["'train.optm.lr'", "did you mean 'train.optim.lr'?"]),
        (["--study", "mlp", "-o", "train.optim.lr=fast"], ["train.optim.lr='fast'", "number"]),
        (["--study", "mlp", "-o", "train.optim.lr=nan"], ["train.optim.lr='nan'", "valid number"]),
        (["--study", "mlp", "-o", "train.num_epochs=0"], ["train.num_epochs='0'", "greater than or equal to 1"]),
        (["--study", "mlp", "-o", "train.num_epochs=1.5"], ["train.num_epochs='1.5'", "integer"]),
        (["--study", "mlp", "-o", "train.optim.name=adan"], ["train.optim.name='adan'", "'adamw'"]),
        (["--study", "mlp", "-o", "train.num_epochs"], ["'train.num_epochs'", "-o path=value"]),
        (["--study", "mlp", "-o", "preset=fll"], ["unknown preset 'fll'", "did you mean 'full'?"]),
        (["--study", "mlp", "--name", ""], ["study name '' cannot be used"]),
        (["--study", "mlp", "--time", "soon"], ["--time 'soon'", "90m, 2h"]),
        (["--study", "atft", "-o", "data.path="], ["-o data.path= gives no value", "data.path=null"]),
        (["--study", "mlp", "-o", "train.device=cuda"], ["train.device is 'cuda'", "no CUDA device"]),
        (["--study", "mlp", "-o", "train.early_stopping.monitor=loss"], [".monitor='loss' is none of the metrics"]),
        (["--study", "mlp", "-o", "train.checkpoint.monitor=vall/accuracy"], ["'val/accuracy'"]),
        (["--study", "mlp", "-o", "train.resume_from=/nowhere"], ["train.resume_from='/nowhere' is not a directory"]),
        (["--study", "mlp", "--sampler", "tpp"], ["'tpp'", "tpe, random, qmc, grid"]),
        (["--study", "mlp", "--strategy", "medain"], ["'medain'", "did you mean 'median'?"]),
        (["--study", "mlp", "--executor", "cloud"], ["'cloud'", "inline, local"]),
        (["--study", "mlp", "--gpus-per-worker", "1"], ["2 workers with 1 GPUs each need 2", "this host shows 0"]),
        (["--study", "mlp", "--order", "random"], ["'random'", "ordered, async"]),
        (["--study", "mlp", "--config", "nowhere.yaml"], ["nowhere.yaml cannot be read", "No such file"]),
        (["--study", "mlp", "--storage", "mysql://me:secret@host/db"], ["mysql://me:***@host/db", "sqlite:///"]),
        (["--study", "mlp", "--storage", "nonsense"], ["'nonsense'", "sqlite:///"]),
        (["--study", "mlp", "--storage", "sqlite://"], ["sqlite:///PATH"]),
        (
            ["--study", "mlp", "-o", "train.optim.name=no_such:SignSGD"],
            ["module 'no_such' does not exist", "PYTHONPATH"],
        ),
        (
            ["--study", "mlp", "-o", "train.schedule.name=json:down"],
            ["train.schedule.name='json:down'", "has no 'down'"],
        ),
        (["--study", "mlp", "-o", "train.optim.sam.rho=0.1"], ["train.optim.wrap is 'none'", "to sam, or leave"]),
        (
            ["--study", "mlp", "-o", "train.optim.lookahead.k=3"],
            ["train.optim.lookahead.k is set", "'none', which does not read it", "to lookahead, or leave"],
        ),
        (
            ["--study", "mlp", "-o", "train.optim.name=ranger", "-o", "train.optim.wrap=lookahead"],
            ["train.optim.wrap is 'lookahead'", "'ranger', which is RAdam within Lookahead"],
        ),
        (
            ["--study", "mlp", "-o", "train.rollback.max_rollbacks=3"],
            ["train.rollback.max_rollbacks is set", "set train.rollback.enabled to true, or"],
        ),
        (
            ["--study", "mlp", "-o", "train.loss_scale.init=8"],
            ["train.loss_scale.init is set", "train.precision is 'auto'", "to fp16, or leave"],
        ),
        (
            ["--study", "mlp", "-o", "train.prefetch=8"],
            ["train.prefetch is set, and train.num_workers is 0", "to 1 or more, or leave"],
        ),
        (
            ["--study", "mlp", "-o", "train.early_stopping.patience=2"],
            ["early_stopping.patience=2 is read only with early_stopping.monitor: set that, or leave"],
        ),
        (
            ["--study", "mlp", "-o", "train.micro_batch_size=auto", "-o", "train.device=cpu"],
            ["train.micro_batch_size=auto needs a bound on a CPU", "train.memory_limit"],
        ),
        (["--study", "mlp", "-o", "train.micro_batch_size=auto"], ["train.micro_batch_size=auto needs a bound"]),
        (
            ["--study", "mlp", "-o", "train.average.decay=0.5", "-o", "train.average.name=swa"],
            ["train.average.decay is set, and train.average.name is 'swa'", "to ema, or leave"],
        ),
        (["--trials", "2"], ["no study is named: `hpo run FILE.py --trials 20", "` searches one, and `hpo run --help"]),
        (["--study", "none.yaml"], ["none.yaml cannot be read: No such file or directory; name another file."]),
        (["--study", "mlp", "-o", "nothing=1"], ["Config has no field 'nothing'; it has "]),
        (["--study", "mlp", "-o", f"train.num_epochs={'9' * 5000}"], ["train.num_epochs='9", "(5002 characters)"]),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else None,
)
def test_flags(home, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sentence = run(*arguments, home=home)
    for word in words:
        assert word in sentence


OF_ONES_OWN = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay, beta=0.9):
        raise RuntimeError("nothing is made of it yet")

def of_the_step(step):
    return 0.1

a_number = 3
"""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"optim.name": "given_of_mine:Signs", "optim.options.betta": "0.5"},
            ["train.optim.name='given_of_mine:Signs'", "'betta'): let it take lr, weight_decay, betta, or change"],
        ),
        ({"optim.name": "given_of_mine:a_number"}, ["is 3, which cannot be called"]),
        (
            {"schedule.name": "given_of_mine:of_the_step"},
            ["train.schedule.name='given_of_mine:of_the_step'", "two arguments, the configuration and the run"],
        ),
        ({"schedule.name": "given_of_mine:a_number"}, ["is 3, which cannot be called"]),
    ],
)
def test_what_ones_own_part_does_not_take_is_told_at_once(home, tmp_path, monkeypatch, given, words):
    (tmp_path / "given_of_mine.py").write_text(OF_ONES_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sentence = run("--study", "mlp", *(f"-otrain.{path}={value}" for path, value in given.items()), home=home)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize("searched", ["train.optim.name", "train.optim.wrap"])
def test_what_some_trial_reads_may_be_set(searched):
    """Lookahead's steps where Ranger is among the optimizers, or Lookahead among the wraps; not where neither is."""
    options = {"train.optim.name": ["adamw", "ranger"], "train.optim.wrap": ["none", "lookahead"]}
    for choices, refused in ((options[searched], False), (options[searched][:1], True)):
        space = {searched: Choice([*choices, *(["sgd"] if searched == "train.optim.name" else ["sam"])])}
        declared = Study("own", MlpConfig(), Loop, space, [Objective("val/loss")])
        with pytest.raises(UserError, match=r"lookahead\.k is set") if refused else nullcontext():
            study = declared.configure(given := {"train.optim.lookahead.k": 3})
            preflight.check(ResolvedStudy(study, spec_of(study)), options=given)


def test_a_memory_bound_is_not_asked_for_where_workers_are_elsewhere():
    declared = Study("own", MlpConfig(), Loop, {"train.seed": Int(1, 4)}, [Objective("val/loss")])
    study = declared.configure({"train.micro_batch_size": "auto"})
    preflight.check(ResolvedStudy(study, spec_of(study)), here=False)


@pytest.mark.parametrize(
    ("module", "package", "arguments", "words"),
    [
        (
            "hpo.declaration.preflight",
            "torchao",
            ["--study", "mlp", "-o", "train.precision=fp8"],
            "needs torchao: pip install 'hpo[fp8]'",
        ),
        (
            "hpo.declaration.preflight",
            "torch",
            ["--study", "mlp", "--sampler", "random"],
            "study 'mlp' trains with PyTorch, which is not installed: pip install 'hpo[train]'.",
        ),
        (
            "studies._lm.check",
            "tokenizers",
            ["--study", "gpt", "-o", "data.tokenizer=bpe", "-o", "data.vocab_size=300"],
            "data.tokenizer='bpe' needs tokenizers: pip install 'hpo[text]'",
        ),
    ],
)
def test_a_missing_package_is_named_before_a_study_is_written(home, monkeypatch, module, package, arguments, words):
    monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name == package else find_spec(name))
    assert words in run(*arguments, home=home)


def test_without_torch_auto_goes_on_only_where_its_study_was_begun_so(monkeypatch):
    study = Study("own", MlpConfig(), Loop, {"train.seed": Int(1, 4)}, [Objective("val/loss")])
    monkeypatch.setattr("hpo.declaration.preflight.find_spec", lambda name: None)
    begun = spec_of(study).model_copy(update={"sampler": "auto"})
    preflight.check(ResolvedStudy(study, begun.model_copy(update={"planned": {"tpe": 0}})))
    with pytest.raises(UserError, match=r"sampler 'auto' of study 'own' computes with PyTorch, .*'hpo\[train\]'"):
        preflight.check(ResolvedStudy(study, begun))


@pytest.mark.parametrize(
    "arguments",
    [["--trials", "99999999999999999999"], ["--window", "99999999999999999999"], ["--seed", "99999999999999999999"]],
)
def test_numbers_beyond_all_bounds(home, arguments):
    result = hpo("run", "--study", "mlp", "--trials", "1", *arguments, home=home)
    assert result.exit_code == 2
    assert re.search(rf"error: {arguments[0]} 9+: give a whole number from \d to \d+\.$", result.stderr)
    assert not home.root.exists()


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (None, "manifest.json is missing"),
        ("{", "manifest.json cannot be understood"),
        ({"format": 1, "files": {"model.safetensors": {"sha256": "0", "size": 1}}}, "model.safetensors is missing"),
        ({"format": 1, "files": {}, "epoch": 10}, "has trained 10 epochs and train.num_epochs is"),
    ],
)
def test_a_checkpoint_that_cannot_be_started_from(home, tmp_path, manifest, words):
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    flags = ["-o", f"train.resume_from={tmp_path}", "-o", "train.num_epochs=10"]
    sentence = run("--study", "mlp", *flags, home=home)
    assert f"train.resume_from='{tmp_path}'" in sentence
    assert words in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  num_epochs: 1\n  num_epochs: 2\n", [":3:", "'num_epochs'", "line 2"]),
        ("train:\n  num_epochz: 1\n", ["'train.num_epochz'", "did you mean 'train.num_epochs'?"]),
        ("train: {num_epochs: [1}\n", [":1:"]),
        ("- 1\n- 2\n", ["mapping"]),
        ("train: !!python/object/apply:os.system ['true']\n", [":1:", "not allowed"]),
        ("a: &a [1]\n" + "".join(f"k{i}: *a\n" for i in range(20)), ["aliases"]),
        ("train: &all\n  optim: *all\n", [":2:", "alias 'all' stands within what it names"]),
        (f"train: {{num_epochs: {'9' * 5000}}}\n", [":1:", "a number of 5000 digits"]),
        (b"train:\n  device: \xff\n", ["not UTF-8", "byte 17"]),
        (b"#" * (1 << 21), ["larger than"]),
    ],
)
def test_configuration_files(home, tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    sentence = run("--study", "mlp", "--config", str(file), home=home)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\nraise RuntimeError('boom\\nand more')\n", ["bad.py:2: RuntimeError: boom and more"]),
        ("def f(:\n", ["bad.py:1: SyntaxError"]),
        ("import nonexistent_package\n", ["bad.py:1: ModuleNotFoundError", "nonexistent_package"]),
        ("import sys\nsys.exit(0)\n", ["bad.py:2: SystemExit"]),
        ("x = 1\n", ["has no STUDY"]),
        ("STUDY = 3\n", ["STUDY in", "is a int"]),
        (STUDY.format(space="{'train.optim.lr': Float(1.0, 0.1)}"), ["train.optim.lr: low=1.0 is above high=0.1"]),
        (STUDY.format(space="{'train.optm.lr': Float(0.1, 1.0)}"), ["'train.optm.lr'", "'train.optim.lr'"]),
        (STUDY.format(space="{'train.batch_size': Int(3, 8, powers_of_two=True)}"), ["low=3 is not a power of two"]),
        (STUDY.format(space="{'train.optim.name': Choice(['adamw', 'adan'])}"), ["train.optim.name", "adan"]),
        (STUDY.format(space="{'model.dropout': Float(0.0, 2.0)}"), ["model.dropout", "2.0"]),
    ],
)
def test_study_files(home, tmp_path, text, words):
    file = tmp_path / "bad.py"
    file.write_text(text)
    sentence = run("--study", str(file), home=home)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"", ["a.csv is empty"]),
        ("a.csv", b"\x00\x01\x02", ["a.csv"]),
        (
            "a.csv",
            HEADER.encode() + b"2020-01-01,A,1,1\n",
            ["row 2 (the header is row 1) is ragged (expected 7 columns, got 4)"],
        ),
        ("a.csv", HEADER.encode() + b"2020-01-01,\xff,1,1,1,1,1\n", ["line 2 is not UTF-8"]),
        ("a.csv", HEADER.encode() + b"2020-01-01,A,one,1,1,1,1\n", ["open", "one"]),
        ("a.csv", HEADER.encode() + b"yesterday,A,1,1,1,1,1\n", ["date", "yesterday"]),
        ("a.csv", HEADER.replace("close", "last").encode(), ["no column 'close'"]),
        ("a.parquet", b"PAR1 and nothing more", ["a.parquet cannot be read as Parquet"]),
        ("a.txt", b"hello", ["a.txt"]),
    ],
)
def test_panels(home, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    sentence = run("--study", "atft", "-o", f"data.path={tmp_path / name}", home=home)
    assert str(tmp_path / name) in sentence
    for word in words:
        assert word in sentence


def test_parquet_without_a_needed_column(home, tmp_path):
    columns = [name for name in HEADER.strip().split(",") if name != "volume"]
    pq.write_table(pa.table({name: [1.0] for name in columns}), tmp_path / "a.parquet")
    sentence = run("--study", "atft", "-o", f"data.path={tmp_path / 'a.parquet'}", home=home)
    assert "has no column 'volume'" in sentence


@pytest.mark.parametrize("where", ["file/home", "/proc/hpo"])
def test_a_home_that_cannot_be_written(tmp_path, where):
    (tmp_path / "file").write_text("mine")
    home = Home.at(tmp_path / where)
    sentence = refused(hpo("run", *FLAGS, home=home), 2)
    assert f"home {home.root} cannot be written" in sentence
    assert "--home or HPO_HOME" in sentence
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "command", [["run", *FLAGS], ["status"], ["verify"], ["doctor"]], ids=lambda command: command[0]
)
def test_a_home_whose_name_is_too_long(tmp_path, command):
    sentence = refused(hpo(*command, home=Home(tmp_path / ("h" * 300))))
    assert "(File name too long): choose another with --home" in sentence


def test_a_line_end_in_a_name_leaves_the_error_in_one_line(tmp_path):
    result = CliRunner().invoke(app, ["best", "--home", str(tmp_path / "a\nb")])
    assert str(tmp_path / r"a\nb") in refused(result)


@pytest.fixture
def crafted(home) -> Home:
    home.create()
    ledger = open_crafted(home.root / "ledger.db")
    for number in range(3):
        put_trial(ledger, number, "complete", (0.5,), params={"a": number} | {f"key-{i}": "é" * 50 for i in range(300)})
    ledger.close()
    return home


def spoken(command: str, home: Home, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """What a shell line does in which `hpo` is the command, on `home`."""
    line = f'hpo() {{ {sys.executable} -m hpo "$@" --home "{home.root}"; }}; set -o pipefail; {command}'
    names = {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(["bash", "-c", line], env=os.environ | names, capture_output=True, timeout=60)


@pytest.mark.usefixtures("process")
def test_a_reader_that_leaves_ends_the_command_as_a_signal_would(crafted):
    ran = spoken("hpo show 0 --study crafted | head -1", crafted)
    assert (ran.returncode, ran.stdout, ran.stderr) == (141, b"crafted, trial 0: complete\n", b"")


@pytest.mark.usefixtures("process")
def test_output_that_cannot_be_written(crafted):
    ran = spoken("hpo show 0 --study crafted > /dev/full", crafted)
    assert ran.returncode == 1
    assert ran.stderr == b"error: standard output cannot be written ([Errno 28] No space left on device).\n"


def test_a_pipe_to_another_process_that_breaks_is_no_silent_end():
    """Typer ends with 1 and without a word on any EPIPE, as if standard output had lost its reader."""
    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
    app.callback()(lambda: None)

    @app.command()
    def write() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb", buffering=0) as pipe:
            pipe.write(b"request")

    ended = CliRunner().invoke(app, ["write"])
    assert isinstance(ended.exception, RuntimeError) and isinstance(ended.exception.__cause__, BrokenPipeError)


@pytest.mark.usefixtures("process")
def test_a_working_directory_that_is_gone(crafted, tmp_path):
    ran = spoken(f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && hpo status", crafted)
    assert ran.returncode == 2
    assert ran.stderr == b"error: the working directory is gone: change to one that exists.\n"


@pytest.mark.usefixtures("process")
def test_a_terminal_that_knows_ascii_only(crafted):
    ran = spoken("hpo show 0 --study crafted", crafted, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"val/accuracy  ?  last 0.5" in ran.stdout  # a curve of one point


INTERRUPTING = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == interrupted:
            os.kill(os.getpid(), number)
interrupted, number = sys.argv.pop(1), int(sys.argv.pop(1))
sys.meta_path.insert(0, Interrupt())
runpy.run_module("hpo", run_name="__main__")
"""


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    ("number", "module"),
    [
        *((signal.SIGINT, name) for name in ("hpo.cli.main", "typer", "hpo.driver.run", "hpo.driver.loop", "optuna")),
        *((number, name) for number in (signal.SIGTERM, signal.SIGHUP) for name in ("typer", "hpo.driver.run")),
    ],
)
def test_a_signal_before_anything_has_begun_is_one_word(home, number, module):
    """However early: while the commands themselves are loaded, or what one needs."""
    line = [sys.executable, "-c", INTERRUPTING, module, str(int(number)), "run", *FLAGS, "--sampler", "tpe"]
    ran = subprocess.run([*line, "--home", str(home.root)], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (128 + number, "interrupted.\n")


# A home that may be read and not written. Root may write whatever the modes say, so the file system is made read-only.

READING = ("status --json", "show 0 --json", "compare --json", "best --json", "verify")


FORKED = """
import os, runpy, sys
import hpo.storage.lookup, sqlalchemy  # what takes longest to load, once for all
sys.stdout.reconfigure(line_buffering=True)
home, *reading = sys.argv[1:]
if "verify" in reading:
    import mlflow.tracking
for command in reading:
    if not (child := os.fork()):
        os.dup2(1, 2)
        sys.argv = ["hpo", *command.split(), "--study", "mlp", "--home", home]
        runpy.run_module("hpo", run_name="__main__")
    print("rc", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print("---")
"""


def read_only(home: Home, *reading: str) -> dict[str, str]:
    """What each of these commands prints on the home while nothing can be written there; skips where that is not to be
    had."""
    commands = shlex.join([sys.executable, "-c", FORKED, str(home.root), *reading])
    script = f"mount --bind {home.root} {home.root} && mount -o remount,ro,bind {home.root} || exit 77; {commands}"
    beside = home.root.parent
    before = set(beside.iterdir())
    ran = subprocess.run(
        ["unshare", "-Urm", "bash", "-c", script], cwd=beside, capture_output=True, text=True, timeout=240
    )
    assert set(beside.iterdir()) == before
    if ran.returncode in (1, 77) and not ran.stdout:
        pytest.skip(f"runs as root, or with the right to mount in a namespace of its own: {ran.stderr.strip()}")
    assert ran.stderr == ""
    return dict(zip(reading, ran.stdout.split("---\n"), strict=False))


@pytest.fixture(scope="module")
def ended(tmp_path_factory, process) -> Home:
    """A home whose study is complete."""
    home = Home.at(tmp_path_factory.mktemp("ended") / "home")
    assert hpo("run", *FLAGS, home=home).exit_code == 0
    return home


@pytest.mark.usefixtures("process")
def test_a_home_that_may_only_be_read_says_the_same(ended):
    found = read_only(ended, *READING)
    for command in READING:
        allowed = hpo(*command.split(), "--study", "mlp", home=ended)
        assert found[command] == f"{allowed.stdout}rc 0\n"
    assert "0 differences" in found["verify"]
    assert "points" in found["verify"] and "behind" not in found["verify"]


@pytest.mark.usefixtures("process")
def test_what_is_left_in_a_home_to_read_names_the_way_out(ended):
    """A report and plots, which their options write elsewhere."""
    why = f"error: home {ended.root} cannot be written (Read-only file system): "
    out = {"report": "--to FILE.html", "plot history": "--to DIRECTORY"}
    for command, said in read_only(ended, *out).items():
        assert said.splitlines()[-2:] == [f"{why}{out[command]} writes elsewhere.", "rc 2"]


@pytest.mark.usefixtures("process")
def test_nothing_is_dropped_of_a_home_to_read_whose_ledger_is_elsewhere(ended, tmp_path):
    """Else the rows would say that files are gone which are there."""
    shutil.copyfile(ended.root / "ledger.db", tmp_path / "ledger.db")
    storage = f"sqlite:///{tmp_path / 'ledger.db'}"
    before = hpo("status", "--json", "--storage", storage, home=ended).stdout
    said = (
        f"error: home {ended.root} cannot be written (Read-only file system): choose another with --home or HPO_HOME."
    )
    for text in read_only(ended, f"gc --storage {storage}", f"rm --yes --storage {storage}").values():
        assert text == f"{said}\nrc 2\n"
    assert hpo("status", "--json", "--storage", storage, home=ended).stdout == before


def test_a_home_whose_files_take_no_changes_says_the_same(ended, tmp_path, monkeypatch):
    """As above where mounting is not allowed: the files are taken as read-only, and none of them changes."""

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(ended.root.rglob("*")) if path.is_file()}

    allowed = {command: hpo(*command.split(), "--study", "mlp", home=ended).stdout for command in READING}
    before = files()
    for module in (store, mlflow, damage):
        monkeypatch.setattr(module, "writable", lambda path: False)
    monkeypatch.chdir(tmp_path)
    for command in READING:
        found = hpo(*command.split(), "--study", "mlp", home=ended)
        assert (found.exit_code, found.stdout) == (0, allowed[command])
    assert files() == before and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("process")
def test_beside_a_writer_what_it_has_committed_is_read(ended, tmp_path):
    """What the ledger's file lacks stands in the WAL, as while a study runs."""
    home = Home.at(tmp_path / "home")
    shutil.copytree(ended.root, home.root)
    ledger = Ledger(home.storage)
    with ledger.write() as connection:
        connection.execute(update(tables.studies).values(requested=7))
    assert (home.root / "ledger.db-wal").stat().st_size
    found = read_only(home, "status --json")
    ledger.close()
    assert json.loads(found["status --json"].splitlines()[0])["requested"] == 7


def test_a_writer_that_comes_in_between_is_noticed(ended, tmp_path, monkeypatch):
    """Without a WAL the file is taken as immutable; if it is not, what was read is refused."""
    home = Home.at(tmp_path / "home")
    shutil.copytree(ended.root, home.root)
    for name in ("ledger.db-wal", "ledger.db-shm"):  # of commands in this process, whose ledgers wait for the collector
        (home.root / name).unlink(missing_ok=True)
    monkeypatch.setattr(store, "writable", lambda path: False)
    reader = Ledger(home.storage, create=False)
    writer = Ledger(home.storage)
    with pytest.raises(HomeError, match="was written while it was read"), reader.read() as connection:
        connection.execute(select(tables.studies.c.name)).all()
        with writer.write() as other:
            other.execute(update(tables.studies).values(requested=7))
    reader.close()
    writer.close()


@pytest.mark.parametrize("offset", [0, 4096, 20000])
@pytest.mark.parametrize("command", ["status", "compare", "verify", "resume"])
def test_a_damaged_ledger(home, offset, command):
    home.create()
    ledger = open_crafted(home.root / "ledger.db")
    put_trial(ledger, 0, "complete", (0.5,))
    ledger.close()
    with (home.root / "ledger.db").open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * 60_000)
    damaged = (home.root / "ledger.db").read_bytes()
    sentence = refused(hpo(command, "--study", "crafted", home=home), 1)
    assert "the file is damaged: restore it from a backup" in sentence
    assert (home.root / "ledger.db").read_bytes() == damaged


# What breaks in the middle of a run. The uninterrupted run is the oracle.


@pytest.fixture(scope="module")
def digest(ended) -> str:
    """Of the study that FLAGS run, uninterrupted."""
    return digest_of(ended)


def digest_of(home: Home) -> str:
    found = json.loads(hpo("status", "--study", "mlp", "--json", home=home).stdout)
    assert found["trials"]["complete"] == 2
    return found["digest"]


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    "damage",
    ["flip", pytest.param("truncate", marks=pytest.mark.slow), pytest.param("manifest", marks=pytest.mark.slow)],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(home, digest, damage):
    killed = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@3"}
    command = [sys.executable, "-m", "hpo", "run", *FLAGS, "--home", str(home.root)]
    assert subprocess.run(command, env=killed, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    trial = json.loads(hpo("show", "0", "--study", "mlp", "--json", home=home).stdout)
    kept = [Path(one["path"]) for one in trial["checkpoints"] if one["state"] == "kept"]
    *_, before, _ = [one["step"] for one in trial["checkpoints"] if one["state"] == "kept"]
    victim = kept[-1] / "manifest.json" if damage == "manifest" else next(kept[-1].glob("*.safetensors"))
    content = bytearray(victim.read_bytes())
    if damage == "truncate":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert hpo("resume", "--executor", "inline", home=home).exit_code == 0
    assert digest_of(home) == digest
    trial = json.loads(hpo("show", "0", "--study", "mlp", "--json", home=home).stdout)
    assert [event["kind"] for event in trial["events"]].count("checkpoint_damaged") == 1
    assert trial["attempts"][-1]["from_step"] == before
    verified = hpo("verify", home=home)
    assert verified.exit_code == 0, verified.output


# Run in a namespace of its own; what it starts begins warm. The study alone, without MLflow, needs 0.9 MB.
ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path

tests, small, out, *flags = sys.argv[1:]
sys.path.insert(0, tests)
import warm

warm.install()
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", small]).returncode:
    sys.exit(77)
hpo, home = [sys.executable, "-m", "hpo"], ["--home", f"{small}/home"]
with open(f"{out}/error", "w") as error:
    code = subprocess.run([*hpo, "run", *flags, *home], stderr=error).returncode
Path(out, "code").write_text(f"{code}")
subprocess.run(["mount", "-o", "remount,size=64m", "none", small], check=True)
subprocess.run([*hpo, "resume", "--executor", "inline", *home], check=True)
subprocess.run(["cp", "-r", f"{small}/home", f"{out}/home"], check=True)
"""


@pytest.mark.usefixtures("process")
def test_a_full_disk_stops_the_study_and_loses_nothing(tmp_path, digest):
    small, out = tmp_path / "small", tmp_path / "out"
    small.mkdir()
    out.mkdir()
    program = [sys.executable, "-c", ON_A_SMALL_DISK, str(ROOT / "tests" / "helpers"), str(small), str(out), *FLAGS]
    ran = subprocess.run(["unshare", "-Urm", *program], capture_output=True, text=True, timeout=280)
    if ran.returncode in (1, 77) and not (out / "code").exists():
        pytest.skip(f"runs as root, or with the right to mount in a namespace of its own: {ran.stderr.strip()}")
    assert (out / "code").read_text() == "1", ran.stderr
    sentence = (out / "error").read_text().splitlines()[-1]
    assert sentence.startswith("error: ")
    assert "disk is full" in sentence or "No space left on device" in sentence  # as the ledger or a save meets it first
    assert "hpo resume" in sentence
    assert "Traceback" not in (out / "error").read_text()
    assert ran.returncode == 0, ran.stderr
    assert digest_of(Home.at(out / "home")) == digest


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    "point", ["checkpoint.before_rename", pytest.param("checkpoint.after_files", marks=pytest.mark.slow)]
)
def test_a_disk_that_fills_up_while_a_checkpoint_is_written(home, digest, point):
    full = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"{point}=raise:ENOSPC@2"}
    command = [sys.executable, "-m", "hpo", "run", *FLAGS, "--home", str(home.root)]
    ran = subprocess.run(command, env=full, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    sentence = ran.stderr.splitlines()[-1]
    assert sentence.startswith("error: ") and "No space left on device" in sentence and "resume" in sentence
    assert "Traceback" not in ran.stderr
    verified = hpo("verify", home=home)
    assert verified.exit_code == 0, verified.output
    assert hpo("resume", "--executor", "inline", home=home).exit_code == 0
    assert digest_of(home) == digest


def test_a_lease_that_is_no_time_is_refused(home, monkeypatch):
    monkeypatch.setenv("HPO_LEASE_SECONDS", "abc")
    assert "HPO_LEASE_SECONDS='abc' is not a time" in run("--study", "mlp", home=home)
    assert not home.root.exists()


def test_a_monitor_of_the_users_own_need_not_be_a_metric():
    class Config(BaseModel):
        monitor: int = 3
        nested: dict[str, bool] = {"monitor": True}

    study = Study("own", Config(), Loop, {"monitor": Int(1, 4)}, [Objective("val/loss")])
    preflight.check(ResolvedStudy(study, spec_of(study)))
