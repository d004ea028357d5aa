"""Starts the ranks of one trial on this host, watches them, and ends them all when one is lost.

Torch elastic's agent runs them (with no restart: a lost rank ends the attempt, and who launched decides about the
next), in a way of its own: a rank that is stopped or hangs counts as lost, too, and is named; a rank of ours dies with
the launcher; and nothing listens but on the loopback interface, or is left on the disk.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer.config import ParallelConfig
from trainer.distributed.member import Page
from trainer.distributed.nodes import SILENT, Meeting, Node, RemoteRank
from trainer.errors import ConfigError, OutOfMemory, TrainerError
from trainer.runtime.threads import ONE

STARTING = 180.0  # seconds a rank has to import everything and find the others: until its second sign of life
SETTLING = 2.0  # seconds that ranks have, after the first has failed, to say whose fault it was
LOOPBACK = "127.0.0.1"


class RankLost(TrainerError):
    """A rank died, was stopped or hung; names the rank, its pid and what happened to it."""


class RankFailed(TrainerError):
    """The entry raised on a rank: `report` is what it said of itself (see `trainer.distributed.rank.Failure`)."""

    def __init__(self, rank: int, report: dict[str, Any]) -> None:
        super().__init__(f"rank {rank}: {report['error']}")
        self.rank, self.report = rank, report


def launch(
    entry: str,
    job: Mapping[str, Any],
    parallel: ParallelConfig,
    *,
    device: str = "auto",
    environ: Mapping[str, str] | None = None,
    leaving: Callable[[], bool] = lambda: False,
    meeting: Meeting | None = None,
) -> list[Any]:
    """Call the function `entry` ("package.module:name") with `job` on every rank; what each returned, by rank.

    `job` and what is returned are JSON. `leaving` is asked all the time: once it is true, the ranks' `preempted` is;
    what it raises ends the ranks and is raised here. What is secret goes through `environ`, which nobody else can read.
    Where a rank raises OutOfMemory, all are ended and started again with the smaller micro-batch that it names, down to
    one sample. With a `meeting`, each of its nodes has as many ranks, the first ones this host. Raises RankLost,
    RankFailed, and ConfigError where there are fewer GPUs than ranks.
    """
    nodes = meeting.count if meeting else 1
    if parallel.ranks % nodes:
        raise ConfigError(
            f"train.parallel asks for {parallel.ranks} ranks, which {nodes} nodes cannot share evenly: ask for a "
            f"multiple of {nodes}."
        )
    given = {"entry": entry, "job": dict(job), "device": _device(device, parallel.ranks // nodes)}
    given |= {"micro_batch_size": None, "nodes": nodes, "world": parallel.ranks, "timeout": parallel.timeout}
    while True:
        try:
            return _launch(given, dict(environ or {}), leaving, meeting)
        except OutOfMemory as error:
            given["micro_batch_size"] = error.micro_batch_size


def _launch(
    given: dict[str, Any], environ: dict[str, str], leaving: Callable[[], bool], meeting: Meeting | None
) -> list[Any]:
    with _called(given, meeting) as (given, store), LocalRanks(given, 0, environ) as local:
        nodes = [Node(place, store) for place in range(1, given["nodes"])]
        share = len(local.ranks)
        ranks = [*local.ranks, *(RemoteRank(share * n.place + i, n) for n in nodes for i in range(share))]

        def leave() -> None:
            local.page.ask_to_leave()
            if nodes:
                store.set("leave", "")

        spec = WorkerSpec(
            role="trial",
            local_world_size=len(ranks),
            entrypoint=_launch,
            rdzv_handler=_Rendezvous(store, given["port"]),
            max_restarts=0,
            monitor_interval=0.05,
        )
        agent = _Agent(spec, ranks, nodes, given["timeout"], lambda: leaving() and leave())
        agent.run()
        return agent.results()


@contextmanager
def _called(given: dict[str, Any], meeting: Meeting | None) -> Iterator[tuple[dict[str, Any], dist.Store]]:
    """What the ranks are given, and the store at which they, and the nodes they are of, find each other."""
    if meeting is not None:
        given = given | meeting.at()
        store = meeting.begin(given)
        try:
            yield given, store
        finally:
            store.set("end", "")
        return
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port = listener.getsockname()[1]
        descriptor = os.dup(listener.fileno())
        yield (
            given | {"host": LOOPBACK, "port": port, "prefix": ""},
            dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor),
        )


def _device(name: str, ranks: int) -> str:
    """cpu or cuda, with a GPU for each of this host's ranks."""
    kind = name.partition(":")[0]
    if kind == "cpu" or not torch.cuda.is_available():
        return "cpu"
    if torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"train.parallel asks for {ranks} ranks here and this machine has {torch.cuda.device_count()} GPUs, "
            "and every rank needs one: ask for fewer, or set train.device=cpu."
        )
    return "cuda"


class _Rendezvous(RendezvousHandler):
    """One agent looks after all ranks, also those of other nodes, so there is nobody to wait for."""

    def __init__(self, store: dist.Store, port: int) -> None:
        self._info = RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        return self._info

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(os.getpid())

    def shutdown(self) -> bool:
        return True


class _Rank:
    """A rank's process; its last word comes through a file without a name."""

    def __init__(self, number: int, given: Mapping[str, Any], environ: Mapping[str, str], page: Page) -> None:
        self.number, self._given, self._environ, self._page = number, given, environ, page
        self._process: subprocess.Popen[bytes] | None = None
        self._word: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`

    def start(self) -> int:
        environ = os.environ | ONE
        if self._given["host"] == LOOPBACK:
            environ |= {"GLOO_SOCKET_IFNAME": _loopback(), "NCCL_SOCKET_IFNAME": _loopback()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer.distributed.rank"],
            stdin=subprocess.PIPE,
            env=environ | dict(self._environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(self._given["page"], self._word.fileno()),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        given = json.dumps({**self._given, "rank": self.number, "word": self._word.fileno()})
        with self._process.stdin as pipe:
            pipe.write(given.encode())
        return self.pid

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def code(self) -> int | None:
        """As subprocess has it: None while it runs, negative where a signal ended it."""
        return self._process.poll() if self._process else None

    @property
    def stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat[stat.rindex(b")") + 2 :][:1] in (b"T", b"t")

    @property
    def beats(self) -> int:
        return self._page.beats()[self.number]

    def word(self) -> dict[str, Any]:
        """What it said at its end, once it has ended; nothing where it could not."""
        descriptor = self._word.fileno()  # read in place: the rank writes at the same offset
        return json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0) or b"{}")

    def kill(self) -> None:
        """End it and all it has started; a rank is the leader of its session."""
        if self._process is not None and self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def end(self) -> None:
        self.kill()
        self._word.close()

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.pid})"


class LocalRanks:
    """This host's share of a launch's ranks, `place` its place among the nodes. They end with the context."""

    def __init__(self, given: Mapping[str, Any], place: int, environ: Mapping[str, str]) -> None:
        self._shared = tempfile.TemporaryFile()  # noqa: SIM115, closed at the end
        self.page = Page(self._shared.fileno(), given["world"])
        share = given["world"] // given["nodes"]
        given = {**given, "path": sys.path, "page": self._shared.fileno(), "parent": os.getpid(), "share": share}
        self.ranks = [_Rank(share * place + i, given, environ, self.page) for i in range(share)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.end()
        self._shared.close()

    def status(self) -> dict[int, dict[str, Any]]:
        """Of each rank, what `trainer.distributed.nodes.RemoteRank` tells of it elsewhere."""
        of = {"pid", "code", "stopped", "beats"}
        return {
            rank.number: {name: getattr(rank, name) for name in of} | {"word": {} if rank.code is None else rank.word()}
            for rank in self.ranks
        }


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else "lo0"


class _Agent(SimpleElasticAgent):
    """Starts the ranks and looks after them until all are through or one is lost."""

    def __init__(
        self,
        spec: WorkerSpec,
        ranks: Sequence[_Rank | RemoteRank],
        nodes: Sequence[Node],
        timeout: float,
        look: Callable[[], object],
    ) -> None:
        super().__init__(spec)
        self._ranks, self._nodes, self._look_outside, self._timeout = ranks, nodes, look, timeout
        self._beats: tuple[int, ...] = ()
        self._since = time.monotonic()
        self._error: TrainerError | None = None

    def results(self) -> list[Any]:
        if self._error is not None:
            raise self._error
        return [rank.word()["result"] for rank in self._ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return {rank.number: rank.start() for rank in self._ranks}

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        for rank in self._ranks:
            rank.kill()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look_outside()
        self._hear_nodes()
        codes = [rank.code for rank in self._ranks]
        if any(codes):
            self._error = self._blame()
        elif None not in codes:
            return RunResult(WorkerState.SUCCEEDED, return_values=dict(enumerate(codes)))
        else:
            self._error = self._hung()
        return RunResult(WorkerState.FAILED if self._error else WorkerState.HEALTHY)

    def _hear_nodes(self) -> None:
        for node in self._nodes:
            node.look()

    def _hung(self) -> RankLost | None:
        """The rank that all wait for, if none of them has got on for too long, or the node that has gone silent."""
        if silent := [node for node in self._nodes if node.unheard > SILENT]:
            return RankLost(f"{silent[0]} has not been heard of for {SILENT:.0f} s.")
        now, beats = time.monotonic(), tuple(rank.beats for rank in self._ranks)
        if beats != self._beats:
            self._beats, self._since = beats, now
        silent = now - self._since
        if silent < (self._timeout if min(beats) > 1 else max(self._timeout, STARTING)):
            return None
        if stopped := [rank for rank in self._ranks if rank.stopped]:
            return RankLost(f"{stopped[0]} has been stopped for {silent:.0f} s (SIGSTOP).")
        behind = [str(rank) for rank in self._ranks if rank.code is None and rank.beats == min(beats)]
        return RankLost(
            f"{' and '.join(behind)} showed no progress for {silent:.0f} s, train.parallel.timeout: it hangs, or that "
            "limit is too low for one step, evaluation or save."
        )

    def _blame(self) -> TrainerError:
        """Why a rank has failed. When one goes, the others fail as well; what they say then is of no interest."""
        deadline = time.monotonic() + SETTLING
        while time.monotonic() < deadline and any(rank.code is None for rank in self._ranks):
            if any(rank.code and "peer_lost" not in rank.word() for rank in self._ranks):
                break
            self._hear_nodes()
            time.sleep(0.02)
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
        if gone := [node for node in self._nodes if node.unheard > SETTLING / 2]:
            return RankLost(f"{gone[0]} is not heard of any more.")
        if stopped := [rank for rank in self._ranks if rank.stopped]:
            return RankLost(f"{stopped[0]} is stopped (SIGSTOP).")
        if not self._nodes:  # nobody was lost here, so what the first one says is of its own
            return RankFailed(rank.number, word["peer_lost"])
        return RankLost(f"{rank} lost the others: {word['peer_lost']['error'].splitlines()[0]}")
