"""The mlp study, whose task tells of its first step."""

from dataclasses import replace

from studies.mlp import STUDY as MLP

STUDY = replace(MLP, name="first-step", task="first_step_task:FirstStep")
