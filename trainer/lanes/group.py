"""Trains lanes together, an epoch at a time, each with its own learning rate, data, verdicts and end."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.errors import ConfigError, TrainerError, is_stop
from trainer.lanes.lane import Lane, Stream
from trainer.lanes.stacked_model import Stack, Sums, check_alike, compare
from trainer.report import Outcome, Report, Reporter, Verdict
from trainer.runtime.device import out_of_memory
from trainer.runtime.process_state import Snapshot, following
from trainer.runtime.window import Window
from trainer.settings import runtime
from trainer.task import Task, method

Answer = Verdict | BaseException | None
# Commits the reports of several lanes at once. An exception concerns its lane alone. None: the report must be sent
# again for its verdict. With the flag no lane can train before it has one, and at least one answer is not None.
Commit = Callable[[Sequence[tuple[Reporter, Report]], bool], Sequence[Answer]]
Ended = tuple[Lane, Outcome | BaseException]
Reader = tuple[Lane, Iterator[list[Any]]]  # a lane whose data all lanes of its stream train on


class Group:
    """Up to `size` lanes, whose configurations agree in all but `trainer.config.lanes.LANE_FIELDS`.

    A lane's reports, weights and checkpoints are the same, to the bit, in any group and despite any interruption; they
    equal those of `trainer.loop.fit` up to rounding.
    """

    def __init__(self, config: TrainConfig, commit: Commit) -> None:
        self.lanes: list[Lane] = []
        self.size = config.fixed_lanes  # reduced when memory runs out
        self._commit, self._exit = commit, ExitStack()
        self._device = self._exit.enter_context(runtime(config))
        self._stack: Stack | None = None
        self._before = self._follow(Snapshot(light=True))  # the process state in which each lane is made
        self._joint = self._before  # the state in which all lanes train, as the first one left it
        self.lasting: list[str] = []  # changes that lanes made to the process and that cannot be undone

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self.lanes:
            lane.close()
        self._exit.close()

    @property
    def room(self) -> int:
        """Returns how many more lanes the group can take."""
        return self.size - len(self.lanes)

    def _follow(self, snapshot: Snapshot) -> Snapshot:
        self._exit.enter_context(following(snapshot))
        return snapshot

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Restores the process state from before the group had lanes, within the block; afterwards its lanes' state.

        Making a lane's task and the call of `admit` belong in this block.
        """
        self._before.restore()
        try:
            yield
        finally:
            self.lasting += (self._joint if self.lanes else self._before).restore()

    def admit(self, task: Task, config: TrainConfig, reporter: Reporter, checkpoints: CheckpointStore) -> Lane:
        """Adds a lane, which continues from its newest checkpoint. Raises the errors of `trainer.loop.fit`, and
        ConfigError if its model differs from those of the other lanes, or if it has changed the process's state
        differently."""
        lane = Lane(task, config, reporter, checkpoints, self._device)
        check_alike([member.state.model for member in (*self.lanes[:1], lane)])
        now = Snapshot(light=True)
        if not self.lanes:
            self._joint = self._follow(now)
        elif differing := self._joint.differing(now):
            lane.close()
            raise ConfigError(
                f"train.lanes: this trial sets {' and '.join(differing)} otherwise than the lanes beside it, in one "
                "process with it: take what decides that out of lane_fields, or set train.lanes=1."
            )
        self.lanes.append(lane)
        return lane

    def advance(self) -> list[Ended]:
        """Trains all lanes that can to the end of their epoch, and reports.

        Returns the lanes whose trial is over, each with its outcome or the error that it raised.
        """
        training = [lane for lane in self.lanes if lane.pending is None and not lane.fit.done]
        training.sort(key=_span)
        ended: list[Ended] = []
        for _, together in groupby(training, key=_span):
            ended += self._train([*together])
        settings = Snapshot(light=True)
        with following(settings):
            for lane in _without(training, ended):
                ended += _attempted(lane, lane.close_epoch)
                self.lasting += settings.restore()  # an evaluation concerns its lane alone
        ended += self._report(_without(self.lanes, ended), wait=not training and not ended)
        for lane, _ in ended:
            lane.close()
        self.lanes = _without(self.lanes, ended)
        return ended

    def _report(self, lanes: Sequence[Lane], wait: bool) -> list[Ended]:
        asking = [(lane, lane.pending) for lane in lanes if lane.pending is not None]
        ended = [
            end
            for lane in lanes
            if lane.pending is None and lane.fit.done
            for end in _attempted(lane, lane.fit.finished)
        ]
        answers = self._commit([(lane.reporter, report) for lane, report in asking], wait) if asking else ()
        for (lane, _), answer in zip(asking, answers, strict=True):
            if isinstance(answer, BaseException):
                ended.append((lane, answer))
            elif answer is not None:
                ended += _attempted(lane, partial(lane.answered, answer))
        return ended

    def _train(self, lanes: list[Lane]) -> list[Ended]:
        """Trains the rest of the epoch, which is equally long for all of these lanes."""
        for lane in lanes:
            lane.fit.enter_epoch()
        ended: list[Ended] = []
        streams: dict[Stream, Reader] = {}
        for lane in lanes:
            streams.setdefault(lane.stream, (lane, lane.windows()))  # read by its oldest lane
        while lanes and lanes[0].state.position < lanes[0].state.windows:
            over = [end for lane in lanes for end in _attempted(lane, lane.asked_to_leave)]
            over += self._window(_without(lanes, over), streams)
            ended, lanes = ended + over, _without(lanes, over)
        for lane in lanes:
            lane.read()
        return ended

    def _window(self, lanes: list[Lane], streams: Mapping[Stream, Reader]) -> list[Ended]:
        """Takes one optimizer step of each lane. Returns those that end by it."""
        batches: dict[Stream, Any] = {}
        for stream in {lane.stream: None for lane in lanes}:
            batches[stream] = _caught(partial(next, streams[stream][1]))
        over = [(lane, error) for lane in lanes if isinstance(error := batches[lane.stream], BaseException)]
        new: dict[int, Any] = {}
        for lane in _without(lanes, over):
            if not lane.checked:
                reader = streams[lane.stream][0]
                new[id(lane)] = gradient = _caught(partial(_own, lane, batches[lane.stream], reader, lanes[0].task))
                over += [(lane, gradient)] if isinstance(gradient, BaseException) else []
        return over + self._step(_without(lanes, over), batches, new)

    def _step(self, lanes: list[Lane], batches: Mapping[Stream, list[Any]], new: Mapping[int, Tensor]) -> list[Ended]:
        if not lanes:
            return []
        windows = [batches[lane.stream] for lane in lanes]
        for lane in lanes:
            lane.stepper.statistics.remember()
        try:
            if self._stack is None or [*map(id, self._stack.lanes)] != [*map(id, lanes)]:
                self._stack = None  # frees its memory before the next one is made
                self._stack = Stack(lanes, self._device)
            sums = self._stack.pass_over(windows)
            self._stack.prepare_rows()
        except BaseException as error:
            if is_stop(error):
                raise
            return self._failed(lanes, batches, new, error)
        over: list[Ended] = []
        for lane, gradient in zip(lanes, self._stack.gradient, strict=True):
            if id(lane) in new:
                over += _attempted(lane, partial(compare, new[id(lane)], gradient, lane.config.precision))
                lane.checked = True
        return over + _update(self._stack, windows, sums, without=[lane for lane, _ in over])

    def _failed(
        self, lanes: list[Lane], batches: Mapping[Stream, list[Any]], new: Mapping[int, Tensor], error: BaseException
    ) -> list[Ended]:
        """Handles a pass that failed: half of the lanes leave if memory has run out, or else the new ones do."""
        self._stack = None
        for lane in lanes:
            lane.stepper.statistics.restore()
        if out_of_memory(error) and len(lanes) > 1:
            self.size = len(lanes) // 2
            stay, leave = lanes[: self.size], lanes[self.size :]
            over = [end for lane in leave for end in _attempted(lane, partial(lane.fit.leave, "preempted"))]
            report = partial(stay[0].reporter.event, "out_of_memory", step=stay[0].state.step, lanes=self.size)
            over += _attempted(stay[0], report)
            return over + self._step(_without(stay, over), batches, new)
        blamed = error
        if new and isinstance(error, Exception) and not isinstance(error, TrainerError) and not out_of_memory(error):
            blamed = _unvectorised(lanes[0].task, error)
        older = [lane for lane in lanes if id(lane) not in new]
        over: list[Ended] = []
        if not out_of_memory(error):  # each is tried separately, as the new ones have been, to see which one raises
            tried = [(lane, _caught(partial(lane.gradient_alone, batches[lane.stream], lane.task))) for lane in older]
            over = [(lane, raised) for lane, raised in tried if isinstance(raised, BaseException)]
        if over:
            return over + self._step(_without(lanes, over), batches, new)
        if new and older:  # the older lanes passed before the new ones came
            return [(lane, blamed) for lane in lanes if id(lane) in new] + self._step(older, batches, {})
        return [(lane, blamed) for lane in lanes]


def _own(lane: Lane, batches: list[Any], reader: Lane, other: Task) -> Tensor:
    """Returns a new lane's gradient on its own.

    Raises ConfigError if its batches or its task differ from what it shares with the other lanes.
    """
    if reader is not lane:
        lane.check_batches(batches)
    return lane.gradient_alone(batches, other)


def _unvectorised(task: Task, error: Exception) -> ConfigError:
    """Returns the error to raise if torch.vmap failed, reworded if torch's names settings that a task cannot change."""
    text = " ".join(str(error).split())
    why = next((ours for theirs, ours in _REASONS.items() if theirs in text), f"{type(error).__name__}: {text[:300]}")
    file = getattr(getattr(type(task).loss, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" in line {lines[-1]}" if lines else ""
    refused = ConfigError(
        f"train.lanes: {method(task, 'loss')} works for a trial on its own and not for several at once{where} ({why}): "
        "correct that, or set train.lanes=1."
    )
    refused.__cause__ = error
    return refused


_TENSORS = "self.progress, self.step and what lane_fields names are tensors there"
_REASONS = {
    ".item() on a Tensor": f"it asks a tensor for its number, by .item(), float() or an option of torch's; {_TENSORS}",
    "data-dependent control flow": f"it branches by a tensor; {_TENSORS}",
    "random operation": "it draws random numbers otherwise than by a dropout layer",
}


def _update(stack: Stack, windows: Sequence[list[Any]], sums: Sums, without: Sequence[Lane]) -> list[Ended]:
    """Updates the weights from the gradients. Returns the lanes that end by it."""
    norms = torch.linalg.vector_norm(stack.gradient, dim=1)
    columns = [sums.loss, sums.count.to(sums.loss), norms.to(sums.loss), *sums.terms.values()]
    rows = torch.stack(columns, dim=1).tolist()  # the only wait for the device
    stack.gradient.mul_(
        norms.new_tensor([lane.factor(*row[1:3]) for lane, row in zip(stack.lanes, rows, strict=True)])[:, None]
    )
    lrs: dict[int, float] = {}
    over: list[Ended] = []
    for k, (lane, (loss, count, norm, *terms)) in enumerate(zip(stack.lanes, rows, strict=True)):
        if not any(lane is other for other in without):
            window = Window(loss, count, dict(zip(sums.terms, terms, strict=True)))
            lr = _caught(partial(_rate, lane, window, norm))
            if isinstance(lr, BaseException):
                over.append((lane, lr))
            elif lr is not None:
                lrs[k] = lr
    together = stack.step_rows(lrs)
    for k, lr in lrs.items():
        over += _attempted(stack.lanes[k], partial(stack.lanes[k].update, lr, solo=k not in together))
    ended_lanes = [lane for lane, _ in over] + [*without]
    for lane, batches in zip(stack.lanes, windows, strict=True):
        if not any(lane is other for other in ended_lanes):
            over += _attempted(lane, partial(lane.advance, batches))
    return over


def _rate(lane: Lane, window: Window, norm: float) -> float | None:
    """Returns the learning rate of the lane's step, None if it skips the window."""
    return lane.fit.lr(lane.state.step) if lane.trains_on(window, norm) else None


def _span(lane: Lane) -> tuple[int, int, int]:
    """Returns the lane's position in its epoch, the epoch's end and the micro-batch size."""
    return lane.state.position, lane.state.windows, lane.state.micro_batch_size


def _without(lanes: Iterable[Lane], gone: Iterable[Ended]) -> list[Lane]:
    ids = {id(lane) for lane, _ in gone}
    return [lane for lane in lanes if id(lane) not in ids]


def _caught(call: Callable[[], Any]) -> Any:
    """Returns the call's result, or the error that it raises."""
    try:
        return call()
    except BaseException as error:
        if is_stop(error):
            raise
        return error


def _attempted(lane: Lane, call: Callable[[], Outcome | None]) -> list[Ended]:
    """Returns the lane with its outcome or error if the call ends it, or else nothing."""
    end = _caught(call)
    return [] if end is None else [(lane, end)]
