"""A trial of Syne Tune's local backend, as which it starts this file."""

# pyright: reportMissingImports=false

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from syne_tune import Reporter
from syne_tune.constants import ST_CHECKPOINT_DIR
from syne_tune.utils import add_checkpointing_to_argparse, add_config_json_to_argparse, load_config_json

from bench.racing import loop


def main() -> None:
    parser = ArgumentParser()
    add_config_json_to_argparse(parser)
    add_checkpointing_to_argparse(parser)
    config = load_config_json(vars(parser.parse_known_args()[0]))
    directory = Path(config["directory"])
    workload = loop.read(directory)
    params = loop.active(workload["space"], {path: config[path] for path in workload["space"]})
    report = Reporter()
    for metrics in loop.train(workload, loop.load(directory), params, config["seed"], Path(config[ST_CHECKPOINT_DIR])):
        report(**metrics)


if __name__ == "__main__":
    main()
