"""The tiny study as a population of three."""

from dataclasses import replace

import tiny_study

STUDY = replace(tiny_study.STUDY, task="tiny_study:TinyTask", strategy={"name": "pbt", "population": 3})
