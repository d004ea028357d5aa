"""One rank of a trial: joins the others and calls the entry. `trainer.distributed.launch` starts it."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from datetime import timedelta
from importlib import import_module
from typing import Any

from trainer.distributed.member import Member, Page, become, this
from trainer.errors import OutOfMemory
from trainer.redaction import redacted
from trainer.runtime.lifeline import die_with

# How gloo, NCCL and the store say that another rank is gone or silent.
_PEER_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer|TCPStore|Broken pipe|wait timeout", re.IGNORECASE)
_SLACK = 60.0  # seconds by which a collective outlasts the launcher's patience, since the launcher names who is late


class Failure(Exception):
    """Raised by an entry to end the trial with a report of its own, which is JSON and has a field `error`."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["error"])
        self.report = report


def main() -> None:
    given = json.load(sys.stdin)
    die_with(given["parent"])
    try:
        _say(given, {"result": _call(given)})
    except BaseException as error:  # whatever it is, the launcher is to hear of it before this process ends
        _say(given, {"at": time.time()} | _words_of(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once, so that the others learn of it


def _call(given: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    sys.path[:] = given["path"]
    member = Member(given["rank"], given["world"], Page(given["page"], given["world"]), given["micro_batch_size"])
    become(member)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: member.page.ask_to_leave())
    if given["device"] == "cuda":
        torch.cuda.set_device(member.rank % given["share"])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if given["device"] == "cuda" else "gloo",
        store=dist.PrefixStore(given["prefix"], dist.TCPStore(given["host"], given["port"], is_master=False)),
        rank=member.rank,
        world_size=member.world,
        timeout=timedelta(seconds=given["timeout"] + _SLACK),
    )
    member.page.beat(member.rank)
    module, _, name = given["entry"].partition(":")
    result = getattr(import_module(module), name)(given["job"])
    dist.destroy_process_group()
    return result


def _words_of(error: BaseException) -> dict[str, Any]:
    if isinstance(error, Failure):
        return {"report": error.report}
    text = redacted(f"{type(error).__name__}: {error}")
    if isinstance(error, OutOfMemory):
        return {"out_of_memory": str(error), "micro_batch_size": error.micro_batch_size}
    report = {"error": text, "traceback": redacted("".join(traceback.format_exception(error)))}
    return {"peer_lost": report} if peer_lost(error) else {"report": report}


def peer_lost(error: BaseException) -> bool:
    """Whether this process is a rank and the error reads as if another one were gone; the launcher sees whether."""
    return this() is not None and isinstance(error, RuntimeError) and _PEER_LOST.search(str(error)) is not None


def _say(given: dict[str, Any], word: dict[str, Any]) -> None:
    with os.fdopen(given["word"], "wb", closefd=False) as file:
        file.write(json.dumps(word).encode())


if __name__ == "__main__":
    from trainer.distributed import rank  # what an entry imports: __main__ has a Failure of its own

    rank.main()
