"""Watches the ranks of a trial until all have ended or one is lost, and says which one and why."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from trainer.distributed.failures import NodeLost, RankFailed, RankLost
from trainer.distributed.local_ranks import LocalRank
from trainer.distributed.nodes import STARTING, Node, RemoteRank
from trainer.errors import OutOfMemory, TrainerError

OFTEN = 0.05  # seconds between two looks at the ranks
SETTLING = 2.0  # seconds that ranks have after the first failure to report its cause


class Watch:
    """Watches `ranks`, those of `nodes` among them; a rank may show no progress for at most `timeout` seconds."""

    def __init__(self, ranks: Sequence[LocalRank | RemoteRank], nodes: Sequence[Node], timeout: float) -> None:
        self._ranks, self._nodes, self._timeout = ranks, nodes, timeout
        self._beats: tuple[int, ...] = ()
        self._since = time.monotonic()

    def results(self, look: Callable[[], object]) -> list[Any]:
        """Returns each rank's result, by rank, and calls `look` repeatedly while it waits.

        Raises RankLost, RankFailed, OutOfMemory, and any error of `look`.
        """
        while True:
            time.sleep(OFTEN)
            look()
            self._hear_nodes()
            codes = [rank.code for rank in self._ranks]
            if any(codes):
                raise self._blame()
            if None not in codes:
                return [rank.word()["result"] for rank in self._ranks]
            if lost := self._hung():
                raise lost

    def _hear_nodes(self) -> None:
        for node in self._nodes:
            node.look()

    def _hung(self) -> RankLost | None:
        """Returns the loss of a silent node, or of the rank that all others wait for, once its time is up."""
        if silent := [node for node in self._nodes if node.silent]:
            return NodeLost(f"{silent[0]} has not been heard of for {silent[0].unheard:.0f} s.")
        now, beats = time.monotonic(), tuple(rank.beats for rank in self._ranks)
        if beats != self._beats:
            self._beats, self._since = beats, now
        waited = now - self._since
        if waited < (self._timeout if min(beats) > 1 else max(self._timeout, STARTING)):
            return None
        if stopped := [rank for rank in self._ranks if rank.stopped]:
            return RankLost(f"{stopped[0]} has been stopped for {waited:.0f} s (SIGSTOP).")
        behind = [str(rank) for rank in self._ranks if rank.code is None and rank.beats == min(beats)]
        return RankLost(
            f"{' and '.join(behind)} showed no progress for {waited:.0f} s, train.parallel.timeout: it hangs, or that "
            "limit is too low for one step, evaluation or save."
        )

    def _blame(self) -> TrainerError:
        """Returns why a rank has failed. When one ends, the others fail too, and their later reports are ignored."""
        self._settle()
        failed = [rank for rank in self._ranks if rank.code]
        for rank in failed:
            if rank.code < 0:  # type: ignore[operator]
                return RankLost(f"{rank} was killed by {signal.Signals(-rank.code).name}.")  # type: ignore[operator]
        words = sorted(((rank.word(), rank) for rank in failed), key=lambda pair: pair[0].get("at", 0.0))
        for word, rank in words:
            if "out_of_memory" in word:
                return OutOfMemory(f"{rank}: {word['out_of_memory']}", word["micro_batch_size"])
            if "report" in word:
                return RankFailed(rank.number, word["report"])
        for word, rank in words:
            if not word:
                return RankLost(f"{rank} ended with exit code {rank.code} and without a word.")
        word, rank = words[0]
        return self._lost_peer(rank, word["peer_lost"])

    def _settle(self) -> None:
        """Waits until a rank has reported a cause, or all have ended, for SETTLING seconds at most."""
        deadline = time.monotonic() + SETTLING
        while time.monotonic() < deadline and any(rank.code is None for rank in self._ranks):
            if any(rank.code and "peer_lost" not in rank.word() for rank in self._ranks):
                break
            self._hear_nodes()
            time.sleep(OFTEN)

    def _lost_peer(self, rank: LocalRank | RemoteRank, report: dict[str, Any]) -> TrainerError:
        """Returns why a rank, the first to report it, has lost the others."""
        if silent := [node for node in self._nodes if node.unheard > SETTLING / 2]:
            return NodeLost(f"{silent[0]} is not heard of any more.")
        if stopped := [rank for rank in self._ranks if rank.stopped]:
            return RankLost(f"{stopped[0]} is stopped (SIGSTOP).")
        if not self._nodes:  # no rank was lost on this host, so the first rank's error is its own
            return RankFailed(rank.number, report)
        return RankLost(f"{rank} lost the others: {report['error'].splitlines()[0]}")
