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

# Matches the errors with which gloo, NCCL and the store report that another rank is gone or silent.
_PEER_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer|TCPStore|Broken pipe|wait timeout", re.IGNORECASE)
_SLACK = 60.0  # seconds that a collective waits beyond the launcher's timeout, since the launcher names the late rank


class Failure(Exception):
    """Raised by an entry to end the trial with its own report, a JSON object with a field `error`."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["error"])
        self.report = report


def main() -> None:
    orders = json.load(sys.stdin)
    die_with(orders["parent"])
    try:
        _say(orders, {"result": _call(orders)})
    except BaseException as error:  # the launcher must learn of any error before this process ends
        _say(orders, {"at": time.time()} | _words_of(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once, so that the others learn of it


def _call(orders: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    sys.path[:] = orders["path"]
    member = Member(orders["rank"], orders["world"], Page(orders["page"], orders["world"]), orders["micro_batch_size"])
    become(member)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: member.page.ask_to_leave())
    if orders["device"] == "cuda":
        torch.cuda.set_device(member.rank % orders["share"])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if orders["device"] == "cuda" else "gloo",
        store=dist.PrefixStore(orders["prefix"], dist.TCPStore(orders["host"], orders["port"], is_master=False)),
        rank=member.rank,
        world_size=member.world,
        timeout=timedelta(seconds=orders["timeout"] + _SLACK),
    )
    member.page.beat(member.rank)
    module, _, name = orders["entry"].partition(":")
    answer = getattr(import_module(module), name)(orders["job"])
    dist.destroy_process_group()
    return answer


def _words_of(error: BaseException) -> dict[str, Any]:
    if isinstance(error, Failure):
        return {"report": error.report}
    text = redacted(f"{type(error).__name__}: {error}")
    if isinstance(error, OutOfMemory):
        return {"out_of_memory": str(error), "micro_batch_size": error.micro_batch_size}
    report = {"error": text, "traceback": redacted("".join(traceback.format_exception(error)))}
    return {"peer_lost": report} if peer_lost(error) else {"report": report}


def peer_lost(error: BaseException) -> bool:
    """Returns True if this process is a rank and the error suggests that another one is gone; the launcher checks."""
    return this() is not None and isinstance(error, RuntimeError) and _PEER_LOST.search(str(error)) is not None


def _say(orders: dict[str, Any], word: dict[str, Any]) -> None:
    with os.fdopen(orders["word"], "wb", closefd=False) as file:
        file.write(json.dumps(word).encode())


if __name__ == "__main__":
    from trainer.distributed import rank  # what an entry imports: __main__ has a Failure of its own

    rank.main()
