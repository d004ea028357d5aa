"""An attempt at a trial by a command: what the program is given, how it reports, stops and ends; real programs."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from told import Told

from hpo import load
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import ConfigError, TrainerError
from trainer.report import Outcome

pytestmark = pytest.mark.usefixtures("process")

SPACE = {"lr": {"type": "float", "low": 0.25, "high": 0.25}, "kind": {"type": "choice", "options": ["a b"]}}
REPORT = 'echo \'{"epoch": %d, "metrics": {"val/loss": %s}}\' >> "$HPO_REPORTS"'
COUNTING = """
import json
from hpo.client import trial
done = 0
if saved := trial.resume():
    done = json.loads((saved / "deep" / "state.json").read_text())
    assert done == trial.epoch
(trial.directory / "log.txt").write_text("begun")
for epoch in range(trial.epoch + 1, 6):
    done += 1
    (trial.checkpoint / "state.json").write_text(json.dumps(done))
    trial.save({"deep/state.json": trial.checkpoint / "state.json"})
    if trial.report(epoch, {"val/loss": 1 / done}):
        break
"""


def task(place: Path, command: Any, **declared: Any) -> Any:
    document = {"command": command, "space": SPACE, "minimize": "val/loss", "grace": 0.2} | declared
    (place / "mine.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    study = load(str(place / "mine.yaml"))
    made = study.task_class()(study.config)  # pyright: ignore[reportCallIssue]
    made.number, made.shared = 3, place / "shared"
    return made


def fit(place: Path, command: Any, told: Told, committed=(), fence: int = 1, **declared: Any) -> Outcome:
    """Run one attempt at the middle of the space."""
    store = CheckpointStore(place / "checkpoints" / "mine" / "00003", fence, committed)
    store.directory.mkdir(parents=True, exist_ok=True)
    return task(place, command, **declared).fit(told, store)


def shell(*lines: str) -> list[str]:
    return ["sh", "-c", "\n".join(lines)]


def python(directory: Path, text: str) -> list[str]:
    (directory / "train.py").write_text(text)
    return ["{python}", "train.py"]


def refusal(directory: Path, command: Any, told: Told | None = None, **declared: Any) -> str:
    """Why an attempt fails, in one line."""
    try:
        outcome = fit(directory, command, told or Told(), **declared)
    except TrainerError as error:
        said = str(error)
    else:
        assert outcome.kind == "user_error", outcome
        said = outcome.error
    assert "\n" not in said
    return said


def values(told: Told) -> list[tuple[int, int | None, float]]:
    return [(step, epoch, metrics["val/loss"]) for step, epoch, metrics in told.reports]


# --- What it is given


def test_parameters_arrive_as_arguments_in_the_environment_and_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HPO_STORAGE", "postgresql://user:secret@host/db")
    monkeypatch.setenv("MINE", "kept")
    script = """
import json, os, sys
told = json.load(open(os.environ["HPO_TRIAL"]))
os.makedirs("seen", exist_ok=True)
json.dump([sys.argv[1:], dict(os.environ), told, os.getcwd()], open("seen/it", "w"))
print("STARTED")
with open(os.environ["HPO_REPORTS"], "a") as file:
    file.write('{"epoch": 1, "metrics": {"val/loss": 0.5, "val/accuracy": "nan"}}\\n')
"""
    (tmp_path / "below").mkdir()
    (tmp_path / "train.py").write_text(script)
    told = Told()
    words = ["{python}", "../train.py", "--lr={lr}", "{kind}", "${args}"]
    declared = {"constants": {"flag": True}, "directory": "below", "environment": {"KIND": "is {kind}"}}
    assert fit(tmp_path, words, told, num_epochs=4, **declared).kind == "complete"
    arguments, environ, given, directory = json.loads((tmp_path / "below" / "seen" / "it").read_text())
    assert arguments == ["--lr=0.25", "a b", "--lr=0.25", "--kind=a b", "--flag=True"]
    assert (environ["HPO_PARAM_lr"], environ["HPO_PARAM_kind"], environ["KIND"]) == ("0.25", "a b", "is a b")
    assert (environ["HPO_NUMBER"], environ["HPO_NUM_EPOCHS"], environ["MINE"]) == ("3", "4", "kept")
    assert given["params"] == {"lr": 0.25, "kind": "a b", "flag": True} and given["number"] == 3
    assert directory == str(tmp_path / "below")
    assert "secret" not in json.dumps(environ), "the ledger's password is no business of a program"
    assert told.artifacts["output.f1.log"] == b"STARTED\n"
    assert told.reports[0][2]["val/loss"] == 0.5 and math.isnan(told.reports[0][2]["val/accuracy"])


# --- Reports, files, verdicts


def test_the_client_reports_saves_and_hands_files_over(tmp_path):
    told = Told()
    assert fit(tmp_path, python(tmp_path, COUNTING), told) == Outcome("complete", 5, 5)
    assert values(told) == [(n, n, 1 / n) for n in range(1, 6)]
    assert [ref.step for ref in told.committed] == [5, 4, 3, 2, 1]
    assert told.artifacts == {"log.txt": b"begun", "output.f1.log": b""}
    assert not list((tmp_path / "shared").rglob("*.log")), "the output is handed over, and not left as well"


def test_cut_anywhere_it_reports_what_it_would_have_reported(tmp_path):
    for cut in (1, 4):
        first, rest = Told({cut: "leave"}), Told()
        command = python(tmp_path, COUNTING)
        assert fit(tmp_path, command, first).kind == "preempted"
        assert fit(tmp_path, command, rest, first.committed[:1], fence=2) == Outcome("complete", 5, 5)
        assert [*values(first)[:-1], *values(rest)] == [(n, n, 1 / n) for n in range(1, 6)]


@pytest.mark.parametrize(("verdict", "kind"), [("stop", "pruned"), ("pause", "paused"), ("leave", "preempted")])
def test_a_verdict_reaches_the_program_and_is_obeyed_again_after_a_kill(tmp_path, verdict, kind):
    first, again = Told({2: verdict}), Told({2: verdict})
    assert fit(tmp_path, python(tmp_path, COUNTING), first) == Outcome(kind, 2, 2)
    never = shell("touch ran")
    assert fit(tmp_path, never, again, first.committed[:1], fence=2) == Outcome(kind, 2, 2)
    assert values(again) == values(first)[-1:] and not (tmp_path / "ran").exists()


def test_what_comes_again_up_to_the_checkpoint_is_not_counted(tmp_path):
    """A program that ignores its checkpoint and begins anew reports what stands already, then what is new."""
    first, rest = Told({3: "leave"}), Told()
    fit(tmp_path, python(tmp_path, COUNTING), first)
    anew = shell(*(REPORT % (epoch, 1 / epoch) for epoch in range(1, 6)))
    assert fit(tmp_path, anew, rest, first.committed[:1], fence=2) == Outcome("complete", 5, 5)
    assert values(rest) == [(n, n, 1 / n) for n in range(3, 6)], "the third is asked for its verdict"


def test_arguments_are_added_where_it_goes_on_from_a_checkpoint(tmp_path):
    script = shell(
        'mkdir -p out && echo "$@" > "out/$HPO_EPOCH"; cat "$HPO_CHECKPOINT"/* > out/kept', REPORT % (5, 0.5)
    )
    words = [*script, "sh", "{epoch}"]
    first = Told({2: "leave"})
    fit(tmp_path, python(tmp_path, COUNTING), first)
    fit(tmp_path, words, Told(), first.committed[:1], fence=2, resume=["--from={checkpoint}", "--at={step}"])
    said = (tmp_path / "out" / "2").read_text().split()
    assert said[0] == "2" and said[1].startswith("--from=/") and said[2] == "--at=2"
    fit(tmp_path, words, Told(), resume=["--from={checkpoint}"])
    assert (tmp_path / "out" / "0").read_text() == "0\n"


def test_a_shell_script_waits_for_its_answers_and_stops(tmp_path):
    """Line n of the answers is of line n of the reports."""
    loop = (
        "for n in 1 2 3 4 5; do",
        'echo "{\\"epoch\\": $n, \\"metrics\\": {\\"val/loss\\": 0.5}}" >> "$HPO_REPORTS"',
        'while [ "$(wc -l < "$HPO_ANSWERS")" -lt $n ]; do sleep 0.01; done',
        'tail -n 1 "$HPO_ANSWERS" | grep -q \'"stop": true\' && echo stopped at $n && exit 0',
        "done",
    )
    told = Told({3: "stop"})
    assert fit(tmp_path, shell(*loop), told) == Outcome("pruned", 3, 3)
    assert told.artifacts["output.f1.log"] == b"stopped at 3\n"


def test_one_that_reads_no_answer_is_told_by_sigterm_and_then_killed(tmp_path):
    for trap, ended in (("trap 'echo told; exit 0' TERM", b"told\n"), ("trap '' TERM", b"")):
        told = Told({1: "stop"})
        began = time.monotonic()
        lines = shell(trap, REPORT % (1, 0.5), "for n in $(seq 600); do sleep 0.1; done")
        assert fit(tmp_path, lines, told) == Outcome("pruned", 1, 1)
        assert told.artifacts["output.f1.log"].endswith(ended)
        assert time.monotonic() - began < 30


def test_steps_close_the_epochs_that_they_come_to(tmp_path):
    script = (
        "from hpo.client import trial\nfor n in (200, 500, 900, 1600): trial.report(step=n, metrics={'val/loss': 1})"
    )
    told = Told()
    assert fit(tmp_path, python(tmp_path, script), told, steps_per_epoch=500) == Outcome("complete", 1600, 3)
    assert [(step, epoch) for step, epoch, _ in told.reports] == [(200, None), (500, 1), (900, None), (1600, 3)]


# --- Patterns over the output

MNIST = (
    "for e in 1 2 3; do",
    'echo "Train Epoch: $e [0/640 (0%)] Loss: 0.9"',
    'printf "\\n  1%%|#  |\\r 50%%|## |\\rTest set: Average loss: 0.%d, Accuracy: 98/100 (98%%)\\n\\n" $((6 - e))',
    "done",
)
PATTERNS = {"epoch": r"Train Epoch: (\d+)", "val/loss": r"Average loss: ([\d.]+)", "val/acc": r"Accuracy: .*\((\d+)%\)"}


def test_reports_are_read_from_the_output(tmp_path):
    told = Told()
    assert fit(tmp_path, shell(*MNIST), told, output=PATTERNS) == Outcome("complete", 3, 3)
    assert told.reports == [(n, n, {"val/loss": (6 - n) / 10, "val/acc": 98.0}) for n in (1, 2, 3)]


def test_without_a_pattern_for_the_epoch_reports_are_counted(tmp_path):
    told = Told()
    patterns = {name: PATTERNS[name] for name in ("val/loss", "val/acc")}
    assert fit(tmp_path, shell(*MNIST), told, output=patterns) == Outcome("complete", 3, 3)
    assert [epoch for _, epoch, _ in told.reports] == [1, 2, 3]


def test_a_pattern_may_find_steps_and_numbers_with_commas(tmp_path):
    lines = shell('echo "step 1,000: loss 1,234.5"', 'printf "step 2,000: loss 1e-3"')
    told = Told()
    patterns = {"step": r"step ([\d,]+)", "val/loss": r"loss (\S+)"}
    assert fit(tmp_path, lines, told, output=patterns, steps_per_epoch=1000) == Outcome("complete", 2000, 2)
    assert values(told) == [(1000, 1, 1234.5), (2000, 2, 0.001)], "the last line has no end"


def test_stopped_by_its_output_it_is_told_by_sigterm(tmp_path):
    lines = shell("trap 'exit 1' TERM", 'echo "loss: 0.5"', "for n in $(seq 600); do sleep 0.1; done")
    assert fit(tmp_path, lines, Told({1: "stop"}), output={"val/loss": "loss: (.*)"}) == Outcome("pruned", 1, 1)


def test_a_verdict_on_an_epoch_comes_once_the_next_one_is_printed(tmp_path):
    told = Told({1: "stop"})
    lines = shell("trap 'exit 1' TERM", *MNIST, "for n in $(seq 600); do sleep 0.1; done")
    assert fit(tmp_path, lines, told, output=PATTERNS) == Outcome("pruned", 1, 1)
    assert told.reports == [(1, 1, {"val/loss": 0.5, "val/acc": 98.0})]


def test_text_is_no_number_in_a_report_and_is_one_in_a_line_of_output(tmp_path):
    report = 'echo \'{"epoch": 1, "metrics": {"val/loss": "0.5"}}\' >> "$HPO_REPORTS"'
    assert "metric 'val/loss' is not a number but '0.5': give a float of it" in refusal(tmp_path, shell(report))
    told = Told()
    assert fit(tmp_path, shell("echo loss: 0.5"), told, output={"val/loss": "loss: (.*)"}).kind == "complete"
    assert values(told) == [(1, 1, 0.5)]


def test_parameters_with_dots_reach_the_program(tmp_path):
    """Hydra and LightningCLI name options so; braces with dots that name nothing are the program's own."""
    echo = 'echo "$@" {{optim.lr}} {other.x} {{other.x}} $HPO_PARAM_optim__lr; echo loss: {optim.lr}'
    space = {"optim.lr": SPACE["lr"], "optim.name": SPACE["kind"]}
    told, command = Told(), ["sh", "-c", echo, "sh", "${args}", "optim.lr={optim.lr}"]
    declared = {"space": space, "constants": {"model.depth": 3}, "output": {"val/loss": "loss: (.*)"}}
    assert fit(tmp_path, command, told, **declared).kind == "complete" and values(told) == [(1, 1, 0.25)]
    printed = "--optim.lr=0.25 --optim.name=a b --model.depth=3 optim.lr=0.25 {optim.lr} {other.x} {{other.x}} 0.25\n"
    assert told.artifacts["output.f1.log"].decode().startswith(printed)


def test_what_is_no_number_is_named_with_its_line(tmp_path):
    said = refusal(tmp_path, shell("echo loss: none yet"), output={"val/loss": "loss: (.*)"})
    assert "output.val/loss has found 'none yet' in 'loss: none yet', not a number: narrow its group" in said


# --- How it ends


def test_exit_codes_say_what_became_of_a_trial(tmp_path):
    codes = {"infeasible": [3], "out_of_memory": [4], "complete": [5]}
    for code, kind in ((3, "infeasible"), (4, "out_of_memory"), (5, "complete")):
        outcome = fit(tmp_path, shell(REPORT % (1, 0.5), f"exit {code}"), Told(), exit_codes=codes)
        assert (outcome.kind, outcome.epoch) == (kind, 1)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("kill -9 $$", "SIGKILL (killed from outside, as for want of memory)"),
        ("kill -TERM $$", "SIGTERM (asked to end from outside)"),
        ("exit 137", "SIGKILL (killed from outside, as for want of memory)"),
    ],
)
def test_a_program_that_was_killed_is_lost_and_not_wrong(tmp_path, code, said):
    outcome = fit(tmp_path, shell(REPORT % (1, 0.5), code), Told())
    assert outcome.kind == "lost" and outcome.error.startswith(f"sh ended by {said}; last: ")


def test_a_failure_shows_the_command_with_its_values(tmp_path):
    (tmp_path / "tool").touch(mode=0o755)
    words = ["./tool", "--lr={lr}", "{kind}", "two\nlines", "--seed={seed}"]
    (tmp_path / "tool").write_text("#!/bin/sh\necho bad lr; exit 3\n")
    said = refusal(tmp_path, words)
    assert said.startswith(
        "tool ended with exit code 3; last: bad lr; run as: ./tool --lr=0.25 'a b' 'two\\nlines' --s"
    )
    (tmp_path / "tool").write_text("no script, for want of a first line\n\0")
    said = refusal(tmp_path, words)
    assert said.startswith(
        "tool ended with exit code 126 (found, but not executable); last: ./tool: Exec format error;"
    )


def test_a_program_that_runs_out_of_memory_does_not_fit(tmp_path):
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert fit(tmp_path, shell(f"echo '{said}'; exit 1"), Told()).kind == "out_of_memory"


def test_an_exception_is_the_trials_error_with_its_traceback(tmp_path):
    outcome = fit(tmp_path, python(tmp_path, "print('before')\nraise ValueError('too  bad')"), Told())
    assert outcome.kind == "user_error" and outcome.traceback.startswith("Traceback (most recent call last):\n")
    assert outcome.error == (
        f"train.py ended with exit code 1; last: ValueError: too bad; run as: {sys.executable} train.py "
        "(its whole output is the artifact output.f1.log)."
    )


@pytest.mark.parametrize(
    ("lines", "declared", "said"),
    [
        (["exit 7"], {}, "sh ended with exit code 7; last: nothing, it has printed nothing"),
        (["echo one; echo two >&2; exit 7"], {}, "sh ended with exit code 7; last: one | two; run as: sh -c"),
        (["kill -SEGV $$"], {}, "sh ended by SIGSEGV (a fault in native code); last: "),
        (["exit 2"], {}, "exit code 2 (wrong arguments, or a file that is missing, to most programs); last: nothing"),
        (["no-such-program"], {}, "exit code 127 (no such program, or a library of it is missing); last: sh: 1: no-su"),
        (["echo done"], {}, "ended without a report: call trial.report(epoch, {'val/loss': ...}) of hpo.client in it"),
        (["true"], {"output": PATTERNS}, "correct the patterns in output (epoch, val/loss, val/acc)"),
        (["sleep 600"], {"timeout": 0.3}, "sh has run for 0.3 s, its timeout, and not ended: raise that in mine.yaml"),
        (["sleep 600"], {"silence": 0.3}, "sh has reported nothing for 0.3 s, its silence"),
        (["trap '' TERM; while :; do sleep 0.1; done"], {"timeout": 0.3}, "its timeout"),
        (['printf \'{"epoch": 1,\' >> "$HPO_REPORTS"'], {}, "report 1, '{\"epoch\": 1,', is half a line: end it"),
        (['echo "epoch 1" >> "$HPO_REPORTS"'], {}, "sh: report 1, 'epoch 1', is not JSON: write lines such as"),
        (['echo 1 >> "$HPO_REPORTS"'], {}, "report 1, '1', is not a JSON object"),
        (['echo \'{"epoch": 1, "loss": 1}\' >> "$HPO_REPORTS"'], {}, "has 'loss', which is none of metrics, epoch"),
        (['echo \'{"epoch": "1"}\' >> "$HPO_REPORTS"'], {}, "has epoch '1': give a whole number from 1"),
        (['echo \'{"epoch": 1}\' >> "$HPO_REPORTS"'], {}, "was given no metrics"),
        (['echo \'{"metrics": {"val/loss": 1}}\' >> "$HPO_REPORTS"'], {}, "takes an epoch or a step"),
        ([REPORT % (1, '"low"')], {}, "metric 'val/loss' is not a number but 'low'"),
        ([REPORT % (0, 1)], {}, "trial.report(epoch=0) comes first: epochs count from 1"),
        ([REPORT % (2, 1), REPORT % (1, 1)], {}, "comes after epoch 2: report epochs as they grow"),
        (['echo \'{"epoch": 1, "metrics": {"a": 1}, "checkpoint": "no"}\' >> "$HPO_REPORTS"'], {}, "cannot be saved"),
        (['echo \'{"epoch": 1, "metrics": {"a": 1}, "checkpoint": 1}\' >> "$HPO_REPORTS"'], {}, "neither a path nor"),
    ],
)
def test_what_a_program_gets_wrong_is_said_in_a_sentence(tmp_path, lines, declared, said):
    assert said in refusal(tmp_path, shell(*lines), **declared)


def test_half_a_line_of_a_program_that_was_killed_is_no_mistake(tmp_path):
    told = Told()
    lines = shell(REPORT % (1, 0.5), 'printf \'{"epoch": 2,\' >> "$HPO_REPORTS"', "kill -9 $$")
    assert fit(tmp_path, lines, told).kind == "lost"
    assert values(told) == [(1, 1, 0.5)]


def test_a_program_that_cannot_be_started_is_named(tmp_path):
    made = task(tmp_path, ["sh"])
    made.command = type(made.command)(**vars(made.command) | {"directory": tmp_path / "absent"})
    store = CheckpointStore(tmp_path / "checkpoints" / "mine" / "00003", 1)
    with pytest.raises(ConfigError, match=r"cannot be started in .*absent: No such file or directory"):
        made.fit(Told(), store)


# --- Nothing is left behind


def alive(directory: Path) -> list[int]:
    """Those of the processes that wrote their pids there, once the kernel had time to bury the dead."""
    pids = [int(text) for text in (directory / "pids").read_text().split()]
    deadline = time.monotonic() + 10
    while (found := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


LEAVES = "(setsid sh -c 'echo $$ >> pids; sleep 600' &) ; sh -c 'echo $$ >> pids; sleep 600' &"


@pytest.mark.parametrize("end", [REPORT % (1, 0.5), "exit 3", "sleep 0.3; kill -9 $$", "sleep 600"])
def test_what_a_program_starts_ends_with_it(tmp_path, end):
    """A child, and one in a session of its own whose parent has left."""
    lines = shell(LEAVES, "while [ $(wc -l < pids) -lt 2 ]; do sleep 0.02; done", end)
    (tmp_path / "pids").touch()
    try:
        fit(tmp_path, lines, Told(), timeout=1.0)
    except TrainerError as error:
        assert "timeout" in str(error)
    assert len((tmp_path / "pids").read_text().split()) == 2
    assert alive(tmp_path) == []


def test_a_program_dies_with_its_worker_and_its_output_is_found(tmp_path):
    lines = shell("echo before", LEAVES, "echo $$ >> pids", "sleep 600")
    (tmp_path / "pids").touch()
    task(tmp_path, lines)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    while len((tmp_path / "pids").read_text().split()) < 3:
        assert worker.poll() is None
        time.sleep(0.02)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert alive(tmp_path) == []
    told = Told()
    assert fit(tmp_path, shell(REPORT % (1, 0.5)), told, fence=3).kind == "complete"
    assert told.artifacts == {"output.f1.log": b"before\n", "output.f3.log": b""}


WORKER = """
import sys
from pathlib import Path
from hpo import load
from trainer.checkpoint.store import CheckpointStore
from trainer.report import LoopReporter, Silent
directory = Path(sys.argv[1])
study = load(str(directory / "mine.yaml"))
task = study.task_class()(study.config)
task.shared = directory / "shared"
task.fit(LoopReporter(Silent()), CheckpointStore(directory / "checkpoints" / "mine" / "00003", 1))
"""


def test_asked_to_leave_it_leaves_at_its_next_report_or_after_a_while(tmp_path):
    assert fit(tmp_path, python(tmp_path, COUNTING), Told(preempted=True), grace=60) == Outcome("preempted", 1, 1)
    silent = shell("trap 'echo told; exit 0' TERM", "for n in $(seq 600); do sleep 0.1; done")
    told = Told(preempted=True)
    assert fit(tmp_path, silent, told).kind == "preempted"
    assert told.artifacts["output.f1.log"].endswith(b"told\n")


def test_a_program_that_prints_much_is_quoted_briefly(tmp_path):
    said = refusal(tmp_path, shell("yes 'a long line of words' | head -c 3000000; exit 1"))
    assert len(said) < 1000 and re.search(r"last: a long line of words \| ", said)
