"""Cleans a corpus from the command line.

python -m studies._lm.clean IN OUT --against validation.txt --processes 4
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from studies._lm.clean.run import SECONDS, clean
from studies._lm.clean.settings import Settings, steps_of
from trainer.errors import ConfigError, DataError


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m studies._lm.clean",
        description="Cleans a corpus of text, and reports what each step took and why.",
        epilog="A run that was cut goes on by the same command. Any number of processes write the same output.",
    )
    add = parser.add_argument
    add("source", metavar="IN", help="a text file, a table with a column of text, or a directory of such")
    add("out", metavar="OUT", help="a new directory: shards/*.jsonl, report.md, report.json")
    add("--column", default="text", help="the column of text in tables [text]")
    add("--separator", default="", help="divides a text file into documents [none: a file is one document]")
    add("--off", action="append", default=[], metavar="STEP", help="leaves a step or a group (c4, gopher) out")
    add("--language", default="", help="keeps documents of one language, such as en (extra clean)")
    add("--against", default="", metavar="FILE", help="a validation text, of which no 13 words in a row may stay")
    add("--similarity", type=float, default=0.8, help="from which documents are near-duplicates [0.8]")
    add("--perplexity", default="", metavar="MODEL", help="a model of the gpt study, exported as safetensors")
    add("--quantile", type=float, default=0.9, help="of perplexity, up to which documents stay [0.9]")
    add("--shard-mb", type=float, default=16.0, help="megabytes of input for each shard [16]")
    add("--processes", type=int, default=1, help="how many work at once [1]")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Cleans, prints what stayed, and returns the exit code."""
    options = vars(parser().parse_args(arguments))
    out, processes = options.pop("out"), options.pop("processes")
    try:
        options["off"] = steps_of(options["off"])
        report = clean(Settings(**options), out, processes)
    except (ConfigError, DataError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except OSError as error:  # a disk that is full
        print(f"error: {error.filename or out}: {error.strerror or error}; the same command goes on.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: the same command goes on.", file=sys.stderr)
        return 130
    about = json.loads(report.read_bytes())
    before, after = about["input"], about["output"]
    print(f"{after['documents']:,} of {before['documents']:,} documents stay, {after['bytes']:,} bytes: {out}")
    stages = json.loads(report.with_name(SECONDS).read_bytes())
    print("seconds: " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
