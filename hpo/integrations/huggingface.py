"""Runs the Trainer of transformers as a trial, through `TrialCallback`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hpo.integrations import trial as trials
from hpo.integrations.trial import Trial
from trainer.errors import TrainerError

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise trials.lacking(error, "transformers", "llm") from error

_OF_THE_MACHINE = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")


class TrialCallback(TrainerCallback):
    """Reports each evaluation, with the checkpoint that the trainer saves after it, and stops the trainer.

        callback = TrialCallback(trial)
        args = TrainingArguments(output_dir=trial.directory, eval_strategy="epoch", seed=trial.seed, ...)
        trainer = Trainer(model, args, ..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_path)

    resume_path  the trainer's checkpoint directory to resume from; None for a new trial

    `eval_strategy="epoch"` reports epochs, `"steps"` steps; for steps the study must set `steps_per_epoch`. The trainer
    saves weights, optimizer, schedule and random state at each evaluation, whatever its `save_strategy`. Its checkpoint
    is deleted once the trial has it, unless `load_best_model_at_end` may need it. Raises TrainerError for several
    processes, for settings that report nothing, and for a training that does not begin at the trial's epoch or step.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        path = trials.resumed(trial)
        self.resume_path = None if path is None else str(path)  # transformers does not accept a Path
        self._metrics: dict[str, Any] = {}
        self._begun: int | None = None  # the training's first step, None outside a training

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if args.world_size > 1:
            raise TrainerError(f"a trial is one process, and this Trainer has {args.world_size}: start it without.")
        if args.eval_strategy == "no":
            raise TrainerError("eval_strategy='no' evaluates nothing to report: pass eval_strategy='epoch' or 'steps'.")
        if args.save_strategy == "best":
            raise TrainerError("save_strategy='best' leaves checkpoints out: leave it out, each evaluation is saved.")
        if not Path(args.output_dir or "").resolve().is_relative_to(self._trial.directory.resolve()):
            raise TrainerError(
                f"output_dir={args.output_dir!r} may be another trial's as well: pass output_dir=trial.directory."
            )
        fix = "pass resume_from_checkpoint=callback.resume_path to trainer.train()"
        if args.eval_strategy == "epoch":
            trials.check_begins("epoch", self._trial.epoch, round(state.epoch or 0), fix)
        else:
            trials.check_begins("step", self._trial.step, state.global_step, fix)
        self._begun = state.global_step

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Makes the trainer save, after which `on_save` reports; called once for each evaluation set."""
        if self._begun is not None and state.global_step > self._begun:
            self._metrics |= {name: value for name, value in (metrics or {}).items() if _is_result(name)}
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if not self._metrics:
            return
        metrics, self._metrics = self._metrics, {}
        saved = Path(args.output_dir or "", f"checkpoint-{state.global_step}")
        self._trial.save(saved)
        of_epochs = args.eval_strategy == "epoch"
        epoch, step = (round(state.epoch or 0), None) if of_epochs else (None, state.global_step)
        if trials.report(self._trial, metrics, epoch=epoch, step=step):
            control.should_training_stop = True
        if not args.load_best_model_at_end:
            shutil.rmtree(saved)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._begun = None  # later evaluations are the user's


def _is_result(name: str) -> bool:
    """Returns whether a metric describes the model rather than the machine's speed."""
    return name != "epoch" and not name.endswith(_OF_THE_MACHINE)
