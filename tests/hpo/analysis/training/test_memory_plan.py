"""`hpo plan`: what of a study fits a memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hpo import load
from hpo.analysis.training.memory_plan import MICRO_BATCH, _fields, frontier
from hpo.cli.main import app
from studies._lm.base import base_model
from studies._lm.config import ModelConfig
from trainer.memory.estimate import estimate

pytestmark = pytest.mark.whole

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> str:
    """A directory with a config.json alone."""
    return written(tmp_path_factory, 5)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory) -> str:
    """As `shape`, of one layer."""
    return written(tmp_path_factory, 1)


def written(factory: pytest.TempPathFactory, num_layers: int) -> str:
    path = factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": num_layers}))
    return str(path)


def plan(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout if code == 0 else result.stderr


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.floats(0, 4),
)
def test_what_is_shown_fits_and_nothing_that_fits_is_better(sizes, weights, limit):
    """Against all of them, where a need falls with every field."""

    def over(one: tuple[int, ...]) -> float:
        return sum(w / (1 + i) for w, i in zip(weights, one, strict=False)) - limit

    everything = [one for one in product(*map(range, sizes)) if over(one) <= 0]
    best = [one for one in everything if not any(o != one and all(map(int.__le__, o, one)) for o in everything)]
    assert frontier(sizes, over) == best


def test_the_least_comes_first_with_few_asks_beyond_the_proof():
    """Of the 108 configurations of `lora`, whatever the limit; where nothing fits, one is. What proves it is every one
    of the found, and of those that do not fit each that no other implies."""
    sizes = [3, 3, 2, 2, 3]
    for limit in (0.0, 0.3, 0.6, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0):
        asked: list[tuple[int, ...]] = []
        known: list[tuple[int, int]] = []

        def over(one: tuple[int, ...], limit: float = limit) -> float:
            return sum(1 / (1 + i) for i in one) - limit

        def answer(one: tuple[int, ...], asked: list = asked, over: Callable = over) -> float:
            asked.append(one)
            return over(one)

        found = frontier(sizes, answer, lambda *of, known=known: known.append(of))
        refused = [one for one in product(*map(range, sizes)) if over(one) > 0]
        needless = [one for one in refused if any(o != one and all(map(int.__ge__, o, one)) for o in refused)]
        assert asked[0] == (2, 2, 1, 1, 2)
        assert len(asked) <= 36 and len(set(asked)) == len(asked)
        assert len(asked) <= 1.5 * (len(found) + len(refused) - len(needless)) + 1
        assert (len(asked) == 1) == (not found)
        assert known[-1] == (108, 108) and known == sorted(known)


def test_a_preset_pins_nothing_and_no_micro_batch_exceeds_the_batch():
    text = plan(
        "--study", "gpt", "--memory", "1TB", "-o", "preset=full", "-o", "model.num_layers=1", "-o", "train.batch_size=8"
    )
    assert "Tried: train.activations.checkpoint none, selective, full; train.micro_batch_size 8, 4, 1 (9 config" in text
    assert "data.block_size" not in text


def test_any_study_halves_its_micro_batch():
    text = plan("--study", "mlp", "--memory", "110KB")
    assert "Tried: train.micro_batch_size 32, 16, 8, 4, 2, 1 (6 configurations" in text
    assert "Study 'mlp' declares nothing else to give up" in text and "nothing has to be given up" not in text
    assert "The dearest of all fits" in plan("--study", "mlp", "--memory", "1GB")
    [line] = re.findall(r"^1: .*$", text, re.MULTILINE)
    size = int(line.split("train.micro_batch_size=")[1])
    assert size < 32 and f"  {32 // size}  " in text
    study = load("mlp").configure({"train.micro_batch_size": size})
    task = study.task_class()(study.config)
    batch = tuple(t[:size].clone() for t in task._split("train"))
    assert estimate(task, study.config.train, batch, accumulates=True).peak <= 0.9 * 110_000


def test_a_model_is_planned_for_from_its_config_alone(shallow):
    """Between what bf16 needs and what four bits need, four bits are what fits."""
    fixed = {
        "model.path": shallow,
        "data.max_length": "32",
        "model.rank": "4",
        "train.activations.checkpoint": "full",
        "train.micro_batch_size": "1",
    }
    peaks = {}
    for base in ("bf16", "nf4"):
        study = load("lora").configure({**fixed, "model.base": base})
        task = study.task_class()(study.config)
        peaks[base] = estimate(task, study.config.train, task.largest_batch(1), accumulates=True).peak
    memory = sum(peaks.values()) / 2 / 0.9
    arguments = [word for path, value in fixed.items() for word in ("-o", f"{path}={value}")]
    text = plan("--study", "lora", "--memory", str(int(memory)), *arguments)
    assert re.findall(r"^\d+:  (.*)$", text, re.MULTILINE) == ["-o model.base=nf4"]
    [row] = re.findall(r"^1  +nf4 .*$", text, re.MULTILINE)
    accumulation, peak = row.split()[2:4]
    assert int(accumulation) == 16  # of the study's batches of 16
    assert float(peak) == pytest.approx(peaks["nf4"] / 2**20, abs=0.01)


def test_lora_plans_that_fit_six_gigabytes_are_printed():
    """Of the model that the study has where none is given: every number of a row is that of its configuration."""
    text = plan("--study", "lora", "--memory", "6GB")
    first, head, *lines = text.splitlines()
    assert first == f"lora: what fits {6e9 / 2**30:.2f} GiB, with a tenth left free"
    names = re.split(r" {2,}", head.strip())
    rows = [dict(zip(names, line.split()[1:], strict=True)) for line in lines if re.match(r"\d+  ", line)]
    runs = [dict(re.findall(r"-o (\S+)=(\S+)", line)) for line in lines if re.match(r"\d+:  ", line)]
    assert len(rows) == len(runs) > 0
    for row, run in zip(rows, runs, strict=True):
        for path in ("model.base", "data.max_length", "model.rank"):
            assert row[path.rpartition(".")[2]] == run[path]
        assert row["checkpoint"] == run["train.activations.checkpoint"]
        assert row["micro_batch_size"] == run["train.micro_batch_size"]
        assert int(row["micro_batch_size"]) * int(row["accumulation"]) == 16  # the study's batch
        study = load("lora").configure(run)
        task = study.task_class()(study.config)
        needs = estimate(task, study.config.train, task.largest_batch(int(row["micro_batch_size"])), accumulates=True)
        assert 0 < needs.peak <= 0.9 * 6e9
        assert needs.peak <= sum(needs.parts.values())
        for name, size in vars(needs).items():
            assert float(row["peak GiB" if name == "peak" else name]) == pytest.approx(size / 2**30, abs=0.0051), name
    assert set(runs[0]) == set(load("lora").plan)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--study", "mlp", "--memory", "20KB"],
            ["nothing that study 'mlp' may change fits", "micro_batch_size=1 needs"],
        ),
        (["--study", "mlp", "--memory", "6"], ["fits 6 bytes, of which"]),
        (["--study", "mlp", "--memory", "much"], ["--memory 'much': give a number of bytes"]),
        (
            ["--study", "lora", "--memory", "6GB", "-o", "model.path=/nowhere"],
            ["model.path='/nowhere' has no config.json"],
        ),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(arguments, words):
    sentence = plan(*arguments, code=2)
    assert len(sentence.strip().splitlines()) == 1
    for word in words:
        assert word in sentence


def test_no_micro_batch_is_tried_that_the_space_refuses():
    """KTO, which is searched, wants eight."""
    declared, pinned = load("dpo"), load("dpo").configure({"loss.name": "dpo"})
    assert _fields(declared, set())[MICRO_BATCH] == [16]
    assert _fields(pinned, {"loss.name"})[MICRO_BATCH] == [16, 4, 1]


def test_four_bit_weights_take_what_is_estimated(shape):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def held(model: torch.nn.Module) -> int:
        total = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
        for module in model.modules():
            if state := getattr(getattr(module, "weight", None), "quant_state", None):
                total += state.absmax.nbytes + state.state2.absmax.nbytes
        return total

    real = held(base_model(ModelConfig(base="nf4")))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert held(base_model(ModelConfig(base="nf4"))) == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize("checkpoint", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_a_deep_model_needs_what_shallower_ones_say(shape, checkpoint):
    study = load("lora").configure(
        {"model.path": shape, "model.base": "bf16", "data.max_length": 64, "train.activations.checkpoint": checkpoint}
    )
    task = study.task_class()(study.config)
    assert task.depth == 5
    batch = task.largest_batch(2)
    carried = estimate(task, study.config.train, batch, accumulates=True)
    task.depth = None
    assert carried == estimate(task, study.config.train, batch, accumulates=True)


def test_more_layers_than_there_are_is_refused(shape):
    sentence = plan("--study", "lora", "--memory", "6GB", "-o", f"model.path={shape}", "-o", "model.layers=9", code=2)
    assert "model.layers=9 is more than the model has: give at most 5" in sentence
