"""A planted corpus is cleaned; processes, kills and the form of the input change no byte; what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from places import ROOT

from bench import cleaning
from studies._lm.clean.__main__ import main
from studies._lm.clean.processes import for_each
from studies._lm.clean.run import clean
from studies._lm.clean.settings import Settings
from trainer.errors import DataError
from trainer.files.tables import read

pytestmark = pytest.mark.whole
SIZE = 1.5e6


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Path, cleaning.Planted]:
    directory = tmp_path_factory.mktemp("planted")
    return directory, cleaning.corpus(directory, SIZE, seed=3)


def arguments(directory: Path, out: Path, *more: str) -> list[str]:
    against = ["--against", str(directory / "validation.txt")]
    return [str(directory / "corpus.jsonl"), str(out), *against, "--shard-mb", "0.2", *more]


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "studies._lm.clean", *more]


def output(directory: Path) -> dict[str, bytes]:
    """Every file of the output but the seconds, by name."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "seconds.json")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def cleaned(planted) -> Path:
    directory, _ = planted
    assert main(arguments(directory, directory / "clean")) == 0
    return directory / "clean"


def test_what_was_planted_goes_and_the_rest_stays(planted, cleaned):
    shares = {kind: (recall, precision) for kind, recall, precision, _ in cleaning.measured(*planted)}
    assert set(shares) == {"exact", "near", "leak", "email", "phone", "ip", "key"}
    assert shares.pop("near") >= (0.9, 0.99)
    assert shares == dict.fromkeys(shares, (1.0, 1.0))


def test_the_report_accounts_for_each_document_and_byte(cleaned):
    report = json.loads((cleaned / "report.json").read_text())
    for unit in ("documents", "bytes"):
        assert report["input"][unit] == report["output"][unit] + sum(step[unit] for step in report["steps"])
    texts = [text for shard in sorted((cleaned / "shards").iterdir()) for text in read(shard, ["text"]).texts("text")]
    assert len(texts) == report["output"]["documents"]
    assert sum(len(text.encode()) for text in texts) == report["output"]["bytes"]
    taken = [step for step in report["steps"] if step["bytes"]]
    assert taken and all(1 <= len(step["examples"]) <= 3 for step in taken)
    page = (cleaned / "report.md").read_text()
    assert all(f"| {step['step']} | {step['documents']:,} |" in page for step in report["steps"])
    assert not (cleaned / ".work").exists()


def test_three_processes_write_what_one_does(planted, cleaned, tmp_path, process):
    directory, _ = planted
    ran = subprocess.run(command(*arguments(directory, tmp_path / "out", "--processes", "3")), cwd=ROOT)
    assert ran.returncode == 0
    assert output(tmp_path / "out") == output(cleaned)


@pytest.mark.parametrize("stage", ["kept/000002.json", "edges-003.i8", "written/000001.json"])
def test_a_run_killed_in_a_stage_goes_on_to_the_same_output(planted, cleaned, tmp_path, stage, process):
    directory, _ = planted
    out, processes = tmp_path / "out", "2" if stage.startswith("kept") else "1"
    run = command(*arguments(directory, out, "--processes", processes))
    with subprocess.Popen(run, cwd=ROOT) as running:
        deadline = time.monotonic() + 60
        while not (out / ".work" / stage).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(running.pid, signal.SIGKILL)
    assert running.returncode == -signal.SIGKILL and not (out / "report.json").exists()
    first = (out / ".work" / "kept" / "000000.json").stat().st_mtime_ns
    with subprocess.Popen(run, cwd=ROOT) as again:
        while (out / ".work" / "kept" / "000000.json").exists():
            assert _changed(out / ".work" / "kept" / "000000.json", first) == first
            time.sleep(0.01)
        assert again.wait() == 0
    assert output(out) == output(cleaned)


def _changed(path: Path, instead: int) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return instead


def test_a_process_that_is_killed_is_one_sentence(tmp_path, process):
    with pytest.raises(DataError, match="a process was killed, perhaps for lack of memory: give the same command with"):
        for_each(os._exit, [1, 1, 1, 1, 1, 1], 2, tmp_path)


def test_an_interrupt_ends_the_run_with_a_sentence(planted, tmp_path, process):
    run = command(*arguments(planted[0], tmp_path / "out"))
    with subprocess.Popen(run, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        while not (tmp_path / "out" / ".work" / "kept" / "000000.json").exists():
            time.sleep(0.001)
        running.send_signal(signal.SIGINT)
        assert running.communicate()[1] == "stopped: the same command goes on.\n"
    assert running.returncode == 130


def test_a_finished_run_is_left_as_it_is(planted, cleaned, capsys):
    before = {path: path.stat().st_mtime_ns for path in cleaned.rglob("*")}
    assert main(arguments(planted[0], cleaned, "--processes", "2")) == 0
    assert {path: path.stat().st_mtime_ns for path in cleaned.rglob("*")} == before
    assert "documents stay" in capsys.readouterr().out


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path, process):
    """It would by 14 MB if the text stayed in memory once."""
    peaks = []
    for size in (1e6, 15e6):
        directory = tmp_path / str(size)
        directory.mkdir()
        cleaning.corpus(directory, size)
        code = "import resource, sys\nfrom studies._lm.clean.__main__ import main\ncode = main(sys.argv[1:])\n"
        code += "print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        ran = [sys.executable, "-c", code, *arguments(directory, directory / "out")]
        shown = subprocess.run(ran, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        exit_code, peak = map(int, shown.split())
        assert exit_code == 0
        peaks.append(peak / 1024)
    assert peaks[1] - peaks[0] < 10  # MiB
    assert peaks[1] < 500


TEXTS = ["The first text, in one line.", "A second one\nwith \u00e9 and\n\nthree lines.", "And the third."]


def lines(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for path in sorted((out / "shards").iterdir()) for line in path.read_text().splitlines()]


def written(directory: Path, form: str) -> Path:
    table = pa.table({"text": [*TEXTS, None], "number": [1, 2, 3, 4]})
    path = directory / f"in.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif form == "csv":
        pyarrow.csv.write_csv(table, path)
    elif form == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif form == "arrow":
        pyarrow.feather.write_feather(table, path)
    elif form == "txt":
        path.write_text("==".join([*TEXTS, ""]))
    else:
        path.mkdir()
        for number, text in enumerate(TEXTS):
            (path / f"{number}.txt").write_text(text)
        (path / ".hidden").write_text("")
    return path


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "arrow", "txt", "directory"])
def test_each_form_of_input_gives_the_same_texts(form, tmp_path):
    source = written(tmp_path, form)
    settings = Settings(str(source), separator="==" if form == "txt" else "", off=steps("c4", "gopher"))
    report = json.loads(clean(settings, str(tmp_path / "out")).read_text())
    shards = lines(tmp_path / "out")
    assert [record["text"] for record in shards] == TEXTS
    empty = next(step for step in report["steps"] if step["step"] == "empty")
    assert empty["documents"] == (form in ("jsonl", "csv", "parquet", "arrow"))


def steps(*names: str) -> tuple[str, ...]:
    from studies._lm.clean.settings import steps_of

    return steps_of(names)


def test_a_rule_that_is_off_takes_nothing_and_is_not_reported(tmp_path):
    (tmp_path / "in.txt").write_text("A { is a bracket.")
    out = tmp_path / "out"
    options = ["--off", "gopher", "--off", "c4-brackets", "--off", "c4-sentences"]
    assert main([str(tmp_path / "in.txt"), str(out), *options]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["output"]["documents"] == 1
    assert [step["step"] for step in report["steps"] if step["step"].startswith(("gopher", "c4"))] == [
        "c4-terminal", "c4-line-words", "c4-javascript", "c4-policy", "c4-lorem",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        ('{"body": "a"}', [], "in.jsonl row 1 has no column 'text': it has body; name its column of text."),
        ("", [], "in.jsonl is empty: give it text, or remove it."),
        ('{"text": 3}', [], "in.jsonl row 1, column 'text' holds int: store it as text."),
        ('{"text": "a"},\n', [], "ends in a comma"),
        ('{"text": "a"', [], "in.jsonl row 1 cannot be read as JSON"),
        ('{"text": "a"}', ["--similarity", "1.5"], "similarity is 1.5: give a number between 0 and 1, such as 0.8."),
        ('{"text": "a"}', ["--quantile", "0"], "quantile is 0.0: give a number between 0 and 1, such as 0.8."),
        ('{"text": "a"}', ["--processes", "0"], "processes is 0: give at least 1."),
        ('{"text": "a"}', ["--off", "c5"], "'c5' cannot be turned off: choose among c4, gopher, personal,"),
        ('{"text": "a"}', ["--against", "IN"], "has no 13 words in a row: give a longer validation text."),
        ('{"text": "a"}', ["--perplexity", "IN"], "in.jsonl cannot be read as safetensors"),
    ],
)
def test_bad_input_is_one_sentence(content, options, sentence, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    options = [str(source) if option == "IN" else option for option in options]
    assert main([str(source), str(tmp_path / "out"), *options]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1 and sentence in shown
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_directory_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("A text.")
    source, out = str(tmp_path / "in.txt"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("")
    assert main([source, str(out)]) == 2
    assert "out is not empty, and nothing in it is overwritten: name a new directory." in capsys.readouterr().err
    assert main([source, str(tmp_path / "other")]) == 0
    capsys.readouterr()
    assert main([source, str(tmp_path / "other"), "--off", "c4"]) == 2
    assert "other is of another command, or its input has changed since" in capsys.readouterr().err
    assert main([str(tmp_path), str(tmp_path / "within")]) == 2
    assert "within lies in" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("py3langid") is not None, reason="runs where the extra clean is not installed")
def test_a_language_without_its_package_is_one_sentence(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("A text.")
    assert main([str(tmp_path / "in.txt"), str(tmp_path / "out"), "--language", "en"]) == 2
    assert capsys.readouterr().err == "error: language='en' needs py3langid: pip install 'hpo[clean]'.\n"


def test_documents_of_another_language_go(tmp_path, capsys):
    pytest.importorskip("py3langid", reason="runs where the extra clean is installed")
    texts = ["This is a sentence of the English language, and so it stays.", "Dieser Satz ist auf Deutsch geschrieben."]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--language", "en", "--off", "gopher", "--off", "c4"]
    assert main([str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *options]) == 0
    shards = [record["text"] for record in lines(tmp_path / "out")]
    assert shards == texts[:1]
    assert main([str(tmp_path / "in.jsonl"), str(tmp_path / "other"), "--language", "english"]) == 2
    assert "language='english' is not known: choose among" in capsys.readouterr().err
