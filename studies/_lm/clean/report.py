"""Writes the report of a cleaning: which step took how much, why, and the first few examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from studies._lm.clean.filters import EMPTY, LANGUAGE, LEAKS, kept
from studies._lm.clean.leaks import LENGTH
from studies._lm.clean.rules import DOCUMENT_RULES, LINE_RULES
from studies._lm.clean.selection import PERPLEXITY, Selection
from studies._lm.clean.settings import EXACT, NEAR, PERSONAL, STEPS, Settings
from studies._lm.clean.store import Tally, publish, total


def write_report(settings: Settings, selection: Selection, directory: Path, file: Path) -> None:
    """Writes report.md into the directory and the same as JSON into `file`, which ends the run.

    Neither has the seconds that the run took, so that runs of one command write one report.
    """
    batches = range(len(selection.corpus.counts))
    tally = total(path for batch in batches for path in (kept(selection.corpus.work, batch, "json"),))
    tally.add(total(selection.tally(batch) for batch in batches))
    report = _report(settings, tally, selection.most)
    publish(directory / "report.md", "".join(f"{line}\n" for line in _page(report)).encode())
    publish(file, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())


def _reasons(settings: Settings, most: float) -> dict[str, str]:
    """Returns each step, in order, with what it takes."""
    rules = {name: f"{kind} {why}" for kind, some in (("the line", LINE_RULES), ("the document", DOCUMENT_RULES))
             for name, (why, _) in some.items()}  # fmt: skip
    reasons = {PERSONAL: "an address, a number or a key was replaced", EMPTY: "the document has no text"} | rules
    reasons[LANGUAGE] = f"the language is another than {settings.language}"
    reasons[LEAKS] = f"{LENGTH} words in a row are in the validation text; so much around them was cut"
    reasons[EXACT] = "the text equals that of an earlier document, but for case and white space"
    reasons[NEAR] = f"a share of {settings.similarity:g} of its runs of 5 words, or more, is in an earlier document too"
    reasons[PERPLEXITY] = f"the model has more than {most:.4f} nats for a token"
    order = (PERSONAL, *LINE_RULES, EMPTY, *DOCUMENT_RULES, LANGUAGE, LEAKS, EXACT, NEAR, PERPLEXITY)
    optional = {LANGUAGE: settings.language, LEAKS: settings.against, PERPLEXITY: settings.perplexity}
    ran = [step for step in order if (settings.runs(step) if step in STEPS else optional.get(step, True))]
    return {step: reasons[step] for step in ran}


def _report(settings: Settings, tally: Tally, most: float) -> dict[str, object]:
    empty = asdict(Tally().read)
    steps = [
        {"step": step, "why": why, **(asdict(tally.entries[step]) if step in tally.entries else empty)}
        for step, why in _reasons(settings, most).items()
    ]
    return {
        "input": {"documents": tally.read.documents, "bytes": tally.read.bytes},
        "output": {
            "documents": tally.written.documents,
            "bytes": tally.written.bytes,
            "shards": tally.written.parts,
        },
        "steps": steps,
        "replaced": dict(sorted(tally.replaced.items())),
        "settings": asdict(settings),
    }


def _page(report: dict) -> Iterator[str]:
    before, after = report["input"], report["output"]
    yield "# Cleaning\n"
    yield f"{before['documents']:,} documents of {before['bytes']:,} bytes were read."
    yield f"{after['documents']:,} documents of {after['bytes']:,} bytes stayed, in {after['shards']:,} shards.\n"
    yield "| step | documents | parts | bytes | why |"
    yield "|---|---|---|---|---|"
    for step in report["steps"]:
        yield f"| {step['step']} | {step['documents']:,} | {step['parts']:,} | {step['bytes']:,} | {step['why']} |"
    yield "\nParts are lines of a rule of lines, replaced addresses, and documents that were cut for a leak.\n"
    if report["replaced"]:
        kinds = ", ".join(f"{count:,} of {kind}" for kind, count in report["replaced"].items())
        yield f"Replaced by placeholders: {kinds}.\n"
    for step in report["steps"]:
        if step["examples"]:
            yield f"## {step['step']}\n"
            for example in step["examples"]:
                like = f", like {example['like']}" if "like" in example else ""
                text = example["text"].replace("`", "'")
                yield f"- {example['file']} row {example['row']}{like}: `{text}`"
            yield ""
