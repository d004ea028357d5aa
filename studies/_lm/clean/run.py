"""Cleans a corpus in stages; each job writes its file whole, so that a run which is cut goes on from there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from studies._lm.clean import duplicates, leaks
from studies._lm.clean.documents import Document, documents, files_of, refuse_same_place
from studies._lm.clean.filters import Batch, filter_batch, index_of, kept
from studies._lm.clean.minhash import bands_of
from studies._lm.clean.processes import for_each, wait_for_others
from studies._lm.clean.report import write_report
from studies._lm.clean.selection import Selection, score_batch, scorer_of, threshold_of, write_shard
from studies._lm.clean.settings import EXACT, NEAR, Settings
from studies._lm.clean.store import Tally, publish, size_of
from trainer.errors import ConfigError, DataError
from trainer.files.paths import expanded

VERSION = 1  # of the steps: a run of another version is not resumed
RUN, REPORT, WORK, SHARDS, SECONDS = "run.json", "report.json", ".work", "shards", "seconds.json"
_MOST_DOCUMENTS = 20_000  # of a batch


def clean(settings: Settings, out: str, processes: int = 1) -> Path:
    """Cleans the corpus into a directory and returns its report.json.

    A run that was cut goes on; one that has ended is left as it is. Raises ConfigError or DataError.
    """
    if processes < 1:
        raise ConfigError(f"processes is {processes}: give at least 1.")
    refuse_same_place(settings.source, out)
    if settings.language:
        from studies._lm.clean import language

        language.check(settings.language)
    directory = expanded(out)
    with _run_of(directory, _identity(settings)):
        report = directory / REPORT
        if not report.exists():
            if settings.perplexity:
                scorer_of(settings.perplexity)  # refuses a file that is not a model before the work begins
            (directory / WORK).mkdir(exist_ok=True)
            wait_for_others(directory / WORK)
            seconds = _Seconds()
            _stages(settings, directory, processes, seconds)
            publish(directory / SECONDS, json.dumps(seconds.stages, indent=1).encode())
            os.replace(directory / WORK / REPORT, report)
        shutil.rmtree(directory / WORK, ignore_errors=True)
        return report


class _Seconds:
    """The seconds that each stage took, of the run that ended it."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.stages[stage] = round(time.monotonic() - start, 3)


def _identity(settings: Settings) -> dict[str, object]:
    """Returns what decides the output: the settings, and the sizes and times of change of the files."""
    sources = (settings.source, settings.against, settings.perplexity)
    stats = [[[name, file.stat().st_size, file.stat().st_mtime_ns] for name, file in files_of(path)]
             for path in sources if path]  # fmt: skip
    return json.loads(json.dumps({"version": VERSION, "settings": asdict(settings), "files": stats}))


@contextmanager
def _run_of(directory: Path, identity: dict[str, object]) -> Iterator[None]:
    """Holds a directory that is new, empty, or of a run of the same command; refuses any other."""
    run = directory / RUN
    if directory.exists() and not directory.is_dir():
        raise DataError(f"{directory} is a file: name a new directory.")
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{directory} is being written by another process: wait, or name another one.") from error
        if run.exists():
            if json.loads(run.read_bytes()) != identity:
                raise DataError(
                    f"{directory} is of another command, or its input has changed since: name a new directory."
                )
        elif any(path.name != f".{RUN}.tmp" for path in directory.iterdir()):
            raise DataError(f"{directory} is not empty, and nothing in it is overwritten: name a new directory.")
        else:
            publish(run, json.dumps(identity).encode())
        yield
    finally:
        os.close(descriptor)


def _stages(settings: Settings, directory: Path, processes: int, seconds: _Seconds) -> None:
    work = directory / WORK
    with seconds.of("filter"):
        _index(settings, work)
        corpus = duplicates.Corpus(work, _filter(settings, work, processes))
    with seconds.of("duplicates"):
        _once(work / "duplicates.done", lambda: _mark(settings, corpus, processes))
    selection = Selection(corpus)
    if settings.perplexity:
        with seconds.of("perplexity"):
            batches = [number for number, _ in enumerate(corpus.counts) if not selection.scores(number).exists()]
            for_each(partial(score_batch, selection, settings.perplexity), batches, processes, work)
            selection = Selection(corpus, threshold_of(selection, settings.quantile))
    with seconds.of("write"):
        missing = [number for number, _ in enumerate(corpus.counts) if not selection.tally(number).exists()]
        for_each(partial(write_shard, selection, directory / SHARDS), missing, processes, directory / WORK)
        write_report(settings, selection, directory, work / REPORT)


def _once(marker: Path, stage: Callable[[], None]) -> None:
    if not marker.exists():
        stage()
        publish(marker, b"")


def _index(settings: Settings, work: Path) -> None:
    """Writes the runs of the validation text, once."""
    if settings.against and not index_of(work).exists():
        unfinished = work / "leaks.unfinished"
        texts = (document.text for document in documents(settings.against, settings.column, settings.separator))
        short = leaks.write_index(texts, unfinished)
        if not unfinished.stat().st_size:
            raise DataError(f"{settings.against} has no {leaks.LENGTH} words in a row: give a longer validation text.")
        publish(work / "leaks.json", json.dumps({"short": short}).encode())
        os.replace(unfinished, index_of(work))


def _filter(settings: Settings, work: Path, processes: int) -> tuple[int, ...]:
    """Filters the batches that no earlier run has, and returns the number of documents left of each."""
    counted = work / "counts.json"
    if not counted.exists():
        numbers: list[int] = []

        def missing() -> Iterator[Batch]:
            for batch in _batches(settings):
                numbers.append(batch.number)
                if not kept(work, batch.number, "json").exists():
                    yield batch

        for_each(partial(filter_batch, settings, work), missing(), processes, work)
        counts = [Tally.load(kept(work, number, "json")).read.parts for number in numbers]
        publish(counted, json.dumps(counts).encode())
    return tuple(json.loads(counted.read_bytes()))


def _batches(settings: Settings) -> Iterator[Batch]:
    """Yields the documents in batches whose bounds depend on the settings alone."""
    number, size, batch = 0, 0, list[Document]()
    for document in documents(settings.source, settings.column, settings.separator):
        batch.append(document)
        size += size_of(document.text)
        if size >= settings.shard_mb * 1e6 or len(batch) >= _MOST_DOCUMENTS:
            yield Batch(number, batch)
            number, size, batch = number + 1, 0, []
    if batch:
        yield Batch(number, batch)


def _mark(settings: Settings, corpus: duplicates.Corpus, processes: int) -> None:
    duplicates.begin(corpus)
    if settings.runs(EXACT):
        duplicates.mark_exact(corpus)
    if settings.runs(NEAR):
        bands, rows = bands_of(settings.similarity)
        missing = [band for band in range(bands) if not corpus.edges(band).exists()]
        for_each(partial(duplicates.write_edges, corpus, settings.similarity, rows), missing, processes, corpus.work)
        duplicates.mark_near(corpus, bands)
        duplicates.settle_exact(corpus)
