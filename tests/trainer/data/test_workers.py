"""Loader workers that hang, die or raise; and how many there are to be. Real processes, real signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from trainer_runs import Toy, Trial, uninterrupted

from trainer.config import TrainConfig
from trainer.data import Loader, TensorDataset, device_copies, workers
from trainer.data.autotune import quickest
from trainer.data.loader import to_device
from trainer.data.transport import map_leaves, receive, send
from trainer.data.workers import InProcess, WorkerLost, Workers
from trainer.errors import DataError
from trainer.task import Task

pytestmark = pytest.mark.whole

TRAINING = os.getpid()
CPU = torch.device("cpu")


class Numbers:
    """0 to 19; `at` index 7 it does what `trouble` does."""

    def __init__(self, trouble=lambda: None, at: int = 7) -> None:
        self.trouble, self.at = trouble, at

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            self.trouble()
        return torch.tensor(index)


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def hang_in_workers() -> None:
    if os.getpid() != TRAINING:
        sleep_for_ever()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loader(data, events: list | None = None, device: torch.device = CPU, **config) -> Loader:
    class Reading(Task):
        def train_set(self):
            return data

    heard = events if events is not None else []
    config = {"num_workers": 2, "batch_size": 3, "data_timeout": 1.0} | config
    return Loader(
        Reading(None), TrainConfig(**config), device, on_event=lambda kind, **fields: heard.append((kind, fields))
    )


def numbers(made: Loader, epoch: int = 0, position: int = 0) -> list[list[int]]:
    return [torch.cat(window).tolist() for window in made.epoch(epoch, position)]


@pytest.fixture
def lost():
    """Reads an epoch from a data set in trouble; gives the error, its event, and what was read before."""

    def read(trouble):
        events: list = []
        made = loader(Numbers(trouble), events)
        pids, before = made._reader.pids, []
        with pytest.raises(DataError) as caught:
            for window in made.epoch(0, 0):
                before += torch.cat(window).tolist()
        assert not any(map(psutil.pid_exists, pids)), "workers outlived the error"
        [(kind, fields)] = events
        assert (kind, fields["reason"], fields["retried"]) == ("data_worker_lost", str(caught.value), False)
        made.close()
        return str(caught.value), fields["stack"], pids, before

    return read


def culprit(made: Loader) -> tuple[int, list[int]]:
    """Which request holds index 7, and its indices."""
    return next((n, indices) for n, (_, indices) in enumerate(made.sampler) if 7 in indices)


def test_a_worker_that_hangs_ends_the_wait_with_its_place(lost):
    sentence, stack, pids, before = lost(sleep_for_ever)
    number, indices = culprit(loader(Numbers(), num_workers=0))
    assert f"loader worker {number % 2} (pid {pids[number % 2]}) has not answered" in sentence
    assert "train.data_timeout (1 s)" in sentence
    assert f"indices {indices} of epoch 0" in sentence
    assert "test_workers.py" in sentence and "in sleep_for_ever" in sentence
    assert "in __getitem__" in stack
    assert len(before) == 3 * number and "\n" not in sentence


@pytest.mark.skipif(sys.platform != "linux", reason="runs on Linux, where /proc has the names of threads")
def test_a_worker_that_waits_for_what_a_fork_leaves_behind_says_so(lost):
    """As a data set does that uses polars before its workers are forked."""
    asked, answered, ended = threading.Event(), threading.Event(), threading.Event()

    def pool() -> None:
        ctypes.CDLL(None).prctl(15, b"pool-3", 0, 0, 0)  # PR_SET_NAME
        answered.set()
        while asked.wait() and not ended.is_set():
            asked.clear()
            answered.set()

    def compute() -> None:
        answered.clear()
        asked.set()
        answered.wait()

    thread = threading.Thread(target=pool)
    thread.start()
    compute()  # answered here, and by nobody in a fork
    try:
        sentence = lost(compute)[0]
    finally:
        ended.set()
        asked.set()
        thread.join()
    assert re.search(
        r"a fork leaves threads of libraries behind, here (.*, )?pool(,.*)?; let the data set use", sentence
    )
    assert "or set train.num_workers=0, or raise train.data_timeout if it is only slow." in sentence


def test_a_worker_that_is_killed_is_noticed_at_once(lost):
    sentence, _, pids, _ = lost(die)
    number, indices = culprit(loader(Numbers(), num_workers=0))
    assert f"loader worker {number % 2} (pid {pids[number % 2]}) was killed by SIGKILL" in sentence
    assert f"indices {indices} of epoch 0" in sentence


def test_a_worker_that_leaves_is_noticed(lost):
    assert "exited with 3" in lost(lambda: os._exit(3))[0]


def test_a_stopped_worker_is_killed_without_saying_where_it_is(lost):
    sentence, stack, _, _ = lost(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    assert "has not answered" in sentence and stack == ""


def test_a_worker_killed_between_two_epochs(lost):
    made = loader(Numbers())
    first = numbers(made)
    os.kill(made._reader.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"loader worker 1 .* was killed by SIGKILL"):
        numbers(made, 1)
    made.close()
    assert sorted(index for window in first for index in window) == list(range(20))


@pytest.mark.parametrize("trouble", [hang_in_workers, lambda: die() if os.getpid() != TRAINING else None])
def test_where_configured_the_epoch_goes_on_without_workers(trouble):
    events: list = []
    made = loader(Numbers(trouble), events, data_retry=True)
    assert numbers(made) == numbers(loader(Numbers(), num_workers=0))
    assert numbers(made, 1, 2) == numbers(loader(Numbers(), num_workers=0), 1, 2)
    assert [(kind, fields["retried"]) for kind, fields in events] == [("data_worker_lost", True)]


def test_what_hangs_here_as_well_ends_here_as_well():
    with pytest.raises(DataError, match=r"reading indices .*7.* of epoch 0 has taken longer than train.data_timeout"):
        numbers(loader(Numbers(sleep_for_ever), data_retry=True))


def test_whoever_else_uses_the_alarm_still_can():
    fired = []
    before = signal.signal(signal.SIGALRM, lambda *_: fired.append(True))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        made = loader(Numbers(lambda: time.sleep(0.2)), num_workers=0)
        assert len(numbers(made)) == 7 and fired == [True]
        with pytest.raises(DataError):
            numbers(loader(Numbers(sleep_for_ever), num_workers=0, data_timeout=0.05))
        signal.raise_signal(signal.SIGALRM)
        assert fired == [True, True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def test_readers_that_end_out_of_order_leave_the_alarm_as_it_was():
    """As those of lanes with different seeds do: what stayed of each epoch would add up in a worker of many trials."""
    before = signal.getsignal(signal.SIGALRM)
    made = [loader(Numbers(), num_workers=0, seed=seed) for seed in (0, 1)]
    first, second = (one.epoch(0, 0) for one in made)
    assert [next(first), next(second)]
    first.close()
    assert next(second) and signal.getsignal(signal.SIGALRM) != before
    second.close()
    assert signal.getsignal(signal.SIGALRM) == before


class Unsendable(Exception):
    def __init__(self, one, two) -> None:
        super().__init__(f"{one} and {two}")


def boom() -> None:
    raise DataError("row 7 is bad")


def unsendable() -> None:
    raise Unsendable("this", "that")


@pytest.mark.parametrize(
    ("trouble", "kind", "text"),
    [(boom, DataError, "row 7 is bad"), (unsendable, RuntimeError, "Unsendable: this and that")],
)
def test_what_a_data_set_raises_comes_through_with_its_traceback(trouble, kind, text):
    made = loader(Numbers(trouble))
    with pytest.raises(kind, match=text) as caught:
        numbers(made)
    assert f"in {trouble.__name__}" in caught.value.__notes__[0]
    assert not isinstance(caught.value, WorkerLost)
    with pytest.raises(kind):  # the workers live on, and what was under way is dropped
        numbers(made, 1)
    made.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_validated_start_refuses_what_will_not_do_and_leaves_no_worker(num_workers):
    before = set(psutil.Process().children())  # such as the cluster of another test, which the session keeps
    rows = torch.zeros(20, 2)
    rows[5, 1] = float("nan")
    with pytest.raises(DataError, match=r"sample 5 of the training set: its tensor is nan at \[1\]"):
        loader(list(rows), num_workers=num_workers, validate_data=True)
    left = set(psutil.Process().children()) - before
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
    with pytest.raises(DataError, match="indices \\[7\\] of epoch 0"):
        loader(Numbers(sleep_for_ever), num_workers=num_workers, validate_data=True)


def test_an_epoch_left_early_leaves_nothing_behind_for_the_next():
    made, plain = loader(Numbers()), loader(Numbers(), num_workers=0)
    for position in range(4):
        next(made.epoch(0, position))
        assert numbers(made, 1, position) == numbers(plain, 1, position)
    made.close()


@pytest.mark.usefixtures("process")
def test_workers_die_with_the_training_process_and_leave_nothing(tmp_path):
    code = """
import sys, time
from trainer.data.workers import Workers
def read(request):
    time.sleep(3600)
workers = Workers(read, 2, None)
print(*workers.pids, flush=True)
next(workers.map([(0, [0])]))
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not list(tmp_path.iterdir()), "nothing is left in the directory for temporary files"
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.usefixtures("process")
def test_workers_that_begin_after_the_training_process_died_die_too():
    code = """
import os, time
from trainer.data import workers
serve, parent = workers._serve, os.getpid()
def late(*arguments):
    while os.getppid() == parent:
        time.sleep(0.01)
    serve(*arguments)
workers._serve = late
print(*workers.Workers(lambda request: None, 2, None).pids, flush=True)
time.sleep(3600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    left = [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    for child in left:
        child.kill()
    assert len(children) == 2 and not left


def test_signals_to_the_whole_group_are_left_to_the_training_process():
    made = loader(Numbers(lambda: time.sleep(0.2)), data_timeout=30.0)
    windows = []
    for window in made.epoch(0, 0):
        windows.append(torch.cat(window).tolist())
        for pid in made._reader.pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
    assert windows == numbers(loader(Numbers(), num_workers=0))
    made.close()


@pytest.mark.usefixtures("process")
def test_a_process_that_ends_without_closing_does_not_wait_for_workers():
    code = """
import time
from trainer.data.workers import Workers
workers = Workers(lambda request: time.sleep(3600), 2, 0.1)
print(*workers.pids, flush=True)
kept = workers.map([(0, [0]), (0, [1])])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not any(psutil.pid_exists(int(pid)) for pid in ended.stdout.split()), ended


def test_a_sum_is_the_same_in_a_worker_with_any_number_of_threads():
    """Torch sums in another order on two threads, and OpenMP's threads do not survive a fork."""

    class Sums(Task):
        def train_set(self):
            return torch.randn(4, 300_001)

        def augment(self, sample, generator):
            return sample.sum()

    def read(num_workers):
        torch.manual_seed(0)
        made = Loader(Sums(None), TrainConfig(num_workers=num_workers, num_threads=2, batch_size=4), CPU)
        [[batch]] = made.epoch(0, 0)
        made.close()
        return batch.tolist()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert read(0) == read(1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Hanging(Toy):
    """One of its samples hangs, in workers only."""

    class Samples:
        def __init__(self, data) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index):
            if index == 31:
                hang_in_workers()
            return self.data[index]

    def train_set(self):
        return self.Samples(super().train_set())


def test_a_fit_ends_with_the_error_or_trains_as_it_would_have(tmp_path):
    trial = Trial(tmp_path / "fails", task=Hanging, num_workers=2, data_timeout=1.0)
    with pytest.raises(DataError, match=r"indices \[.*\b31\b.*\] of epoch 0, at .* in sleep_for_ever"):
        trial.attempt()
    assert trial.reporter.events[0][0] == "data_worker_lost"
    trial = Trial(tmp_path / "retries", task=Hanging, num_workers=2, data_timeout=1.0, data_retry=True)
    assert trial.attempt().kind == "complete"
    assert trial.digest() == uninterrupted(tmp_path / "plain").digest()


def test_a_measured_number_of_workers_changes_nothing_and_is_an_event(tmp_path):
    trial = Trial(tmp_path / "auto", num_workers="auto")
    assert trial.attempt().kind == "complete"
    [(kind, fields)] = trial.reporter.events
    assert kind == "num_workers" and str(fields["chosen"]) in fields["seconds_per_micro_batch"]
    assert trial.digest() == uninterrupted(tmp_path / "plain").digest()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_each_worker_has_as_many_micro_batches_at_hand_as_it_is_told(prefetch):
    asked = []

    def requests():
        for i in range(20):
            asked.append(i)
            yield (0, [i])

    with contextlib.closing(Workers(lambda request: torch.tensor(request[1]), 2, 60.0, prefetch=prefetch)) as reader:
        batches = reader.map(requests())
        assert next(batches).item() == 0
        assert len(asked) == 2 * prefetch + 1
        assert [batch.item() for batch in batches] == [*range(1, 20)]


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_workers_are_taken_where_they_read_quicker(seconds):
    def read(request):
        if seconds:
            time.sleep(seconds)
        return torch.tensor(request[1])

    def reading_with(count):
        return Workers(read, count, 60.0) if count else InProcess(read, 60.0)

    chosen, reader, measured = quickest(reading_with, [(0, [i]) for i in range(5)], cpus=4)
    with contextlib.closing(reader):
        assert [batch.item() for batch in reader.map([(0, [3]), (0, [1])])] == [3, 1]
    assert set(measured) == {"0", "1", "2", "4"}
    assert measured[str(chosen)] <= min(measured.values()) / 0.9
    if seconds:
        assert chosen in (2, 4)


def test_where_one_read_takes_long_nothing_more_is_measured(monkeypatch):
    monkeypatch.setattr("trainer.data.autotune.SECONDS", 0.0)
    made = []

    def reading_with(count):
        made.append(count)
        return InProcess(lambda request: None, None)

    assert quickest(reading_with, [(0, [0])], cpus=3)[0] == 2
    assert made == [0, 2]


class Pair(NamedTuple):
    x: torch.Tensor
    rest: dict


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6).view(2, 3).t(),
        (torch.tensor(3.5), torch.zeros(0, 4), torch.tensor([True, False])),
        {"a": [torch.ones(2, dtype=torch.bfloat16), "text", None], "b": torch.tensor([1 + 2j]).conj()},
        Pair(torch.randn(5, 5, dtype=torch.float64)[:, ::2], {"n": np.arange(3)}),
        torch.eye(2).to_sparse(),
        list(range(50_000)),
        None,
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_any_batch_arrives_as_it_was(batch):
    """Through a worker and through a socket whose sender is gone by the time it is received."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        descriptors = len(os.listdir("/proc/self/fd"))
        send(theirs, batch)
        theirs.close()
        arrived = receive(ours)
        assert repr(arrived) == repr(batch) and type(arrived) is type(batch)
        with pytest.raises(EOFError):
            receive(ours)
        assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    map_leaves(arrived, torch.Tensor, lambda tensor: tensor.is_sparse or tensor.zero_())  # it is ours to write to


def test_nothing_is_sent_of_what_cannot_be_pickled():
    made = Workers(lambda request: (torch.ones(2), lambda: None) if request[1] == [0] else 1, 1, 60.0)
    with contextlib.closing(made):
        with pytest.raises(Exception, match="pickle"):
            next(made.map([(0, [0])]))
        assert next(made.map([(0, [1])])) == 1


@pytest.fixture
def of_a_gpu(monkeypatch):
    """A GPU of which a loader asks no more than pinned memory, which needs one."""
    monkeypatch.setattr(workers, "_pinned", lambda batches, pin: batches)
    return torch.device("cuda")


@pytest.mark.parametrize("data", [Numbers(), TensorDataset(torch.zeros(20, 1 << 17))], ids=["any", "much in memory"])
def test_one_process_reads_ahead_for_a_gpu_without_being_asked_for(data, of_a_gpu):
    ahead, here = loader(data, device=of_a_gpu, num_workers=0), loader(data, num_workers=0)
    assert isinstance(ahead._reader, Workers) and len(ahead._reader.pids) == 1
    for read, expected in zip(ahead.epoch(1, 0), here.epoch(1, 0), strict=True):
        assert str(read) == str(expected)
    ahead.close()


@pytest.mark.parametrize(
    ("data", "num_workers"),
    [(TensorDataset(torch.arange(20)), 0), (Numbers(), "none")],
    ids=["little in memory", "none"],
)
def test_this_process_reads_for_a_gpu_what_lies_in_memory(data, num_workers, of_a_gpu):
    made = loader(data, device=of_a_gpu, num_workers=num_workers)
    assert isinstance(made._reader, InProcess)
    assert [map_leaves(window, torch.Tensor, torch.Tensor.tolist) for window in made.epoch(0, 0)] == [
        map_leaves(window, torch.Tensor, torch.Tensor.tolist) for window in loader(data, num_workers=0).epoch(0, 0)
    ]


def test_a_reader_that_nobody_asked_for_ends_no_training(of_a_gpu):
    events = []
    made = loader(Numbers(hang_in_workers), events, device=of_a_gpu, num_workers=0)
    assert numbers(made) == numbers(loader(Numbers(), num_workers=0))
    assert [(kind, fields["retried"]) for kind, fields in events] == [("data_worker_lost", True)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where torch finds a GPU, by make test-gpu")
def test_copies_on_a_stream_of_their_own_give_the_same_weights(tmp_path, monkeypatch):
    digests = []
    for large in (0, device_copies.LARGE):
        monkeypatch.setattr(device_copies, "LARGE", large)
        digests.append(uninterrupted(tmp_path / str(large)).digest())
    assert digests[0] == digests[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where torch finds a GPU, by make test-gpu")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_for_a_gpu_are_pinned_and_the_same(num_workers):
    class Reading(Task):
        def train_set(self):
            return TensorDataset(x=torch.arange(40.0).view(20, 2), y=torch.arange(20))

    device = torch.device("cuda")
    torch.zeros(1, device=device)  # CUDA is up before the workers are forked, as in a fit
    config = TrainConfig(num_workers=num_workers, batch_size=3)
    made, plain = Loader(Reading(None), config, device), Loader(Reading(None), TrainConfig(batch_size=3), CPU)
    for [batch], [expected] in zip(made.epoch(0, 0), plain.epoch(0, 0), strict=True):
        assert batch["x"].is_pinned() and batch["y"].is_pinned()
        moved = to_device(batch, device)
        assert moved["x"].device.type == "cuda" and torch.equal(moved["x"].cpu(), expected["x"])
    made.close()
