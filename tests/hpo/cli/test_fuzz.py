"""Random input to every command: an exit code that is documented, one sentence, nothing written elsewhere.

Seeded. `FUZZ=SEED:COUNT pytest tests/hpo/cli/test_fuzz.py` tries others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
from driven import driven
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.driver.loop import Driver
from hpo.driver.request import request_of
from hpo.errors import HpoError
from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.tracking import mirror_process
from hpo.tracking.ui import serve as ui
from hpo.workers import worker
from trainer.redaction import redacted

SEED, COUNT = map(int, os.environ.get("FUZZ", "1:300").split(":"))
CODES = {0, 1, 2, 3, 130}
AWAY = 75  # where a server that does not answer is named
LONGEST = 1500  # characters of a message, whatever was typed

STUDY = """
from hpo import Float, Int, Objective, Study
from trainer.config import Frozen, TrainConfig
from trainer.report import Outcome

class Config(Frozen):
    x: float = 0.0
    n: int | None = None
    name: str = ""
    train: TrainConfig = TrainConfig()

class Loop:
    def __init__(self, config): pass
    def fit(self, reporter, checkpoints):
        reporter.report(1, {"val/loss": 0.5}, epoch=1)
        return Outcome("complete", 1, 1)

STUDY = Study("fuzzed", Config(), Loop, {"x": Float(0.0, 1.0), "n": Int(1, 8)}, [Objective("val/loss")])
"""
# What people type, paste and leave half-finished, and what files and variables hold by mistake.
TEXTS = [
    "",
    " ",
    "x" * 5000,
    "x " * 2500,
    "../../etc/passwd",
    "~nouser/x",
    "~",
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    ".",
    "http://h:x",
    "https://[::1",
    "http://u:p@h:99999/",
    "postgresql://u:p@h:x/y",
    "postgresql+psycopg://h/",
    "sqlite://",
    "sqlite:///",
    "sqlite:////none/dir/l.db",
    "sqlite:///:memory:",
    "mysql://u:p@h:x/y",
    "s3://",
    "s3://b/../x",
    "file:///x",
    "nan",
    "inf",
    "-1",
    "0",
    "1",
    "2",
    "1e400",
    "1e-400",
    "99999999999999999999",
    "1" * 5000,
    "0x10",
    "1_0",
    "½",
    "٣",
    "é\u202e",
    "\udce9",
    "a\nb",
    "a\tb",
    "a=b=c",
    "=",
    "a.b.c",
    "x=",
    "x=1",
    "n=1e400",
    "n=" + "9" * 5000,
    "train.seed=-1",
    "train=1",
    "x=[1,",
    "x={a: &b [*b]}",
    "x=!!python/object:os.system {}",
    "preset=none",
    "'",
    '"',
    "`id`",
    "$(id)",
    "--",
    "%s%n",
    "{0}",
    "mlp",
    "mlp:NONE",
    "fuzzed.py",
    "fuzzed.py:NONE",
    "none.py",
    "fuzzed",
    "val/loss",
    "null",
    "true",
    "90m",
    "-5s",
    "1e9h",
    "10GB",
    "1e99TB",
    "random",
    "tpe",
    "asha",
    "inline",
    "config.yaml",
    "odd.yaml",
    "[" * 2000,
    "(" * 5000,
    "*",
    "?",
    "a?b",
    "%41",
    "CON",
    ".hidden",
    "-o",
    "a" * 300 + ".py",
    "ſ",
    "\u0000"[1:] + "é" * 4000,
]
YAML = [
    b"",
    b"x: 1\n",
    b"x: 1\nx: 2\n",
    b"[1, 2]",
    b"x: [1,\n",
    b"\xff\xfe\x00",
    b"x: !!python/object:os.system {}\n",
    b"a: &a [*a]\n",
    b"x: " + b"[" * 500,
    b"x: " + b"9" * 5000,
    b"? [a]\n: 1\n",
    b"x: 1e999\n",
    b"\x00",
    b"x: 2001-01-01\n",
    b"train:\n  optim: 3\n",
    b"n: .nan\n",
    b"{" * 300,
    b"x: \xc3\x28\n",
    b"%YAML 9.9\n---\nx: 1\n",
    b"x: |\n",
    b"'" + b"k" * 5000 + b"': 1",
]
VARIABLES = (
    "HPO_HOME",
    "HPO_STORAGE",
    "HPO_TRACKING_URI",
    "HPO_CHECKPOINTS",
    "HPO_LEASE_SECONDS",
    "HPO_STORAGE_FILE",
    "HPO_STUDY",
)
COMMANDS = vars(typer.main.get_command(app))["commands"]


def words_of(rng: random.Random) -> list[str]:
    """A command with some of its options and arguments."""
    name = rng.choice([*COMMANDS, "run", "run", "run", "x" * 500])
    words = [name]
    for parameter in COMMANDS[name].params if name in COMMANDS else ():
        if parameter.param_type_name == "argument":
            words += [rng.choice(TEXTS) for _ in range(rng.choice([0, 1, 1, 2]))]
        elif "--help" not in parameter.opts and rng.random() < 0.25:
            words += [rng.choice(parameter.opts)] + ([] if parameter.is_flag else [rng.choice(TEXTS)])
    if name == "run" and "--study" not in words and rng.random() < 0.8:
        words += ["--study", "fuzzed.py", "--trials", "1"]
    return words


def names(line: str, typed: list[str], variables: Iterable[str]) -> bool:
    """Whether a refusal shows what was typed or the part of it that is wrong, its beginning or end where it is long,
    however it is quoted."""
    plain = line.replace("\\\\", "\\")
    for text in typed:
        if not text.strip() and any(shown in plain for shown in (repr(text), f"/{text}/", f": {text} ")):
            return True
        if len(text) > 200 and " characters) " in plain:  # the end of a path is what is left out
            return True
        if "***" in plain and text.partition(":")[0] in plain:  # a URL, whose rest may be secret
            return True
        for shown in (
            text,
            os.path.expanduser(text),
            repr(text)[1:-1],
            ascii(text)[1:-1],
            redacted(text),
            *text.rpartition(":")[::2],
        ):
            if shown.strip() and (shown.strip()[:10] in plain or shown.strip()[-10:] in plain):
                return True
    if "***" in plain and any(name.endswith("_FILE") for name in variables):  # a URL that a file holds
        return True
    # What is refused stands in the study, or is lacking, or is a variable's.
    return any(one in plain for one in ("'fuzzed'", "fuzzed.py", *variables)) or plain.startswith("error: give ")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working directory with a study, its home and two files; nothing that a command begins goes on."""
    here = tmp_path / "a" / "b" / "c"
    here.mkdir(parents=True)
    (here / "fuzzed.py").write_text(STUDY)
    home = Home.at(here / ".hpo").create()
    ledger = Ledger(home.storage)
    driven(ledger, request_of(home, str(here / "fuzzed.py"), sampler="random"), trials=2)
    ledger.close()
    (here / "config.yaml").write_text("x: 0.5\n")

    def begun(*_: Any, **__: Any) -> Any:
        raise HpoError("it would begin now.")

    monkeypatch.setattr(Driver, "run", begun)
    monkeypatch.setattr(mirror_process, "spawn", begun)
    monkeypatch.setattr(ui, "start", begun)
    monkeypatch.setattr(ui, "start_optuna", begun)
    monkeypatch.setattr(worker, "serve", begun)
    monkeypatch.setattr("hpo.analysis.serve.server.serve", begun)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # a worker's would stay behind
    monkeypatch.chdir(here)
    return here


def files_outside(place: Path) -> set[str]:
    root = place.parents[2]
    return {str(path) for path in root.rglob("*") if not path.is_relative_to(place)}


def fault(words: list[str], environment: dict[str, str]) -> str:
    """What is wrong with how a command answered; empty where nothing is."""
    before = dict(os.environ)
    result = CliRunner().invoke(app, words, env=environment)
    os.environ.clear()
    os.environ.update(before)  # a command hands what its secret files hold on to the processes it starts
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}: {str(result.exception)[:300]}"
    away = result.exit_code == AWAY and any("psycopg://" in word for word in [*words, *environment.values()])
    if result.exit_code not in CODES and not away:
        return f"exit code {result.exit_code}"
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    if result.exit_code == 2 and len(lines) != 1:
        return f"not one sentence: {result.stderr[-500:]!r}"
    typed = words[1:] or environment
    if result.exit_code == 2 and typed and not names(lines[0], [*words, *environment.values()], environment):
        return f"what is refused is not named: {lines[0]!r}"
    if any(len(line) > LONGEST for line in lines) or "Traceback" in result.stderr:
        return f"too long: {result.stderr[:200]!r} ... of {len(result.stderr)}"
    return ""


@pytest.mark.usefixtures("process")
@pytest.mark.timeout(300 + COUNT)
@pytest.mark.filterwarnings("ignore")  # of libraries, on input of which there is no other answer
def test_whatever_is_typed_is_answered_in_a_sentence(place):
    rng, before, found = random.Random(SEED), files_outside(place), list[Any]()
    for number in range(COUNT):
        (place / "odd.yaml").write_bytes(rng.choice(YAML))
        words = words_of(rng)
        environment = {name: rng.choice(TEXTS) for name in VARIABLES if rng.random() < 0.03}
        if wrong := fault(words, environment):
            found.append((number, wrong, [word[:80] for word in words], environment))
        assert files_outside(place) == before, (words, environment)
    assert not found, "\n".join(map(str, found[:20]))
