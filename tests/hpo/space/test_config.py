"""Overrides and YAML: read by the field's type, refused in one sentence."""

import json
import math
import re
import subprocess
import sys
from functools import reduce
from importlib import import_module
from operator import getitem
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from places import ROOT
from pydantic import BaseModel, ConfigDict, Field, model_validator
from rounds import rounds

from hpo.errors import SpaceError, UserError
from hpo.space.config import (
    apply,
    as_json,
    canonical_json,
    config_hash,
    flatten,
    from_json,
    load_yaml,
    near,
    parse_override,
    reads_as,
    resolve,
)
from hpo.space.paths import check_path
from studies.mlp.config import Config as MlpConfig


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sgd(Frozen):
    name: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0)
    momentum: float = 0.9


class AdamW(Frozen):
    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)


class Train(Frozen):
    num_epochs: int = Field(3, ge=1)
    optim: Annotated[Sgd | AdamW, Field(discriminator="name")] = AdamW()
    clip_norm: float | None = None
    resume_from: str | None = None


class Model(Frozen):
    use_gat: bool = True
    layers: list[int] = [8, 8]
    tag: int | str = 0
    scales: dict[str, float] = {}


class Config(Frozen):
    train: Train = Train()
    model: Model = Model()


CONFIG = Config()


@rounds(
    ("text", "expected"),
    [
        ("train.num_epochs=5", 5),
        ("train.optim.lr=1e-4", 1e-4),
        ("train.optim.betas=[0.9, 0.99]", (0.9, 0.99)),
        ("train.clip_norm=null", None),
        ("train.clip_norm=2", 2.0),
        ("train.resume_from=null", None),
        ("train.resume_from=no", "no"),
        ("train.resume_from=5", "5"),
        ("train.resume_from=[not yaml", "[not yaml"),
        ("train.resume_from=a=b", "a=b"),
        ("model.use_gat=false", False),
        ("model.layers=[1, 2, 3]", [1, 2, 3]),
        ("model.tag=7", 7),
        ("model.tag=seven", "seven"),
        ("model.scales.price=0.5", 0.5),
        ("model.tag=\n\n", "\n\n"),
        ("model.tag=\t", "\t"),
        ("model.tag=\n---\n", "\n---\n"),
        ("train.resume_from=one\n two\n", "one\n two\n"),
        ("train.resume_from='one\n\n  two'", "one\ntwo"),
        ("train.resume_from= one ", "one"),
        ("train.resume_from= 5 ", "5"),
        ("train.num_epochs = 5\n", 5),
        ("model.layers=[1,\n 2]", [1, 2]),
    ],
)
def test_override_is_read_by_the_type_of_its_field(text, expected):
    path, value = parse_override(text)
    found = apply(CONFIG, {path: value})
    for name in path.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == expected and type(found) is type(expected)


@rounds(
    ("text", "words"),
    [
        ("train.num_epochs=abc", ["train.num_epochs", "'abc'", "integer"]),
        ("train.num_epochs=5.5", ["train.num_epochs", "'5.5'", "integer"]),
        ("train.num_epochs=true", ["'true'", "integer"]),
        ("train.num_epochs=", ["train.num_epochs", "integer"]),
        ("train.num_epochs=0", ["'0'", "greater than or equal to 1"]),
        ("train.optim.lr=.inf", ["'.inf'", "finite"]),
        ("model.use_gat=no", ["'no'", "boolean"]),
        ("model.use_gat=1", ["'1'", "boolean"]),
        ("train.optim.betas=[1, 2, 3]", ["betas", "at most 2 items"]),
        ("train.optim.name=sgdd", ["'sgdd'", "'sgd'", "'adamw'"]),
        ("train.optim.momentum=0.5", ["momentum", "does not belong"]),
        ("train.num_epoch=5", ["unknown path 'train.num_epoch'", "did you mean 'train.num_epochs'"]),
        ("lr=5", ["unknown path 'lr'", "'train.optim.lr'"]),
        ("trian.optim.lr=5", ["'trian'", "'train.optim.lr'"]),
        ("model.scale.price=1", ["'scale'", "did you mean 'model.scales.price'?"]),
        ("nothing=1", ["Config has no field 'nothing'; it has "]),
        ("train.num_epochs.x=5", ["train.num_epochs has no fields"]),
        ("model.scales.price=x", ["model.scales.price", "'x'", "number"]),
    ],
)
def test_nonsense_is_refused_in_one_sentence(text, words):
    path, value = parse_override(text)
    with pytest.raises(SpaceError) as caught:
        apply(CONFIG, {path: value})
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and len(message) < 200


@rounds("text", ["train.num_epochs", "=5", ""])
def test_override_without_path_or_equals_says_how_to_write_one(text):
    with pytest.raises(SpaceError, match="write -o path=value"):
        parse_override(text)


def test_another_alternative_of_a_union_starts_from_its_own_defaults():
    changed = apply(CONFIG, {"train.optim.momentum": 0.5, "train.optim.name": "sgd"})
    assert changed.train.optim == Sgd(momentum=0.5)
    assert apply(changed, {"train.optim.name": "sgd"}) == changed, "choosing what stands already changes nothing"
    whole = apply(CONFIG, {"train.optim": {"name": "sgd", "lr": 1.0}, "train.optim.momentum": 0.0})
    assert whole.train.optim == Sgd(lr=1.0, momentum=0.0), "parts are set after the whole"


def test_check_path_accepts_every_alternative():
    for path in ("train.optim.momentum", "train.optim.betas", "model.scales.anything", "train"):
        check_path(Config, path)


def test_text_that_is_a_value_already_is_taken_as_it_stands():
    assert resolve(Config, "model.tag", "7") == "7"
    assert resolve(Config, "model.tag", parse_override("t=7")[1]) == 7


json_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)


@given(
    st.sampled_from(["train.num_epochs", "train.optim.lr", "model.tag", "train.clip_norm", "train.nope"]), json_scalars
)
@example("train.optim.lr", 2**53 + 1)
@settings(max_examples=150, deadline=None)
def test_any_override_gives_a_configuration_or_a_sentence(path, value):
    try:
        changed = apply(CONFIG, {path: value})
    except SpaceError as error:
        assert "\n" not in str(error) and str(error).startswith((path, "unknown path"))
    else:
        assert from_json(Config, json.loads(canonical_json(changed))) == changed
        assert isinstance(value, str) or flatten(as_json(changed))[path] == value


@given(st.floats(min_value=5e-324, allow_infinity=False))
def test_floats_come_back_exactly(lr):
    changed = apply(CONFIG, {"train.optim.lr": lr})
    assert from_json(Config, json.loads(json.dumps(as_json(changed)))).train.optim.lr == lr


@pytest.mark.usefixtures("process")
def test_hash_is_the_same_in_another_process_and_differs_with_any_value():
    code = f"import runpy; t = runpy.run_path({__file__!r}); print(t['config_hash'](t['CONFIG']))"
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": str(ROOT / "tests" / "helpers")},
        )
        assert run.stdout.strip() == config_hash(CONFIG)
    assert config_hash(apply(CONFIG, {"train.optim.lr": math.nextafter(1e-3, 1)})) != config_hash(CONFIG)


def test_a_value_json_cannot_hold_is_named():
    with pytest.raises(SpaceError, match=r"train\.clip_norm=inf"):
        canonical_json(Config(train=Train(clip_norm=math.inf)))


def yaml_file(tmp_path, text):
    path = tmp_path / "overrides.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_yaml_scalars_are_those_of_yaml_1_2(tmp_path):
    scalars = ["1e-3", "no", "on", "010", "", "2020-01-01", "1:30", "0x10", "'5'", "TRUE", "1_000", "1.5E+3", "-7"]
    loaded = load_yaml(yaml_file(tmp_path, "".join(f"k{n}: {scalar}\n" for n, scalar in enumerate(scalars))))
    expected = [0.001, "no", "on", 10, None, "2020-01-01", "1:30", 16, "5", True, "1_000", 1500.0, -7]
    assert list(loaded.values()) == expected
    assert [type(value) for value in loaded.values()] == [type(value) for value in expected]


@rounds("text", ["", "# nothing\n", "\ufeffa: {b: 1}\r\n"])
def test_empty_files_and_byte_order_marks_are_read(tmp_path, text):
    assert flatten(load_yaml(yaml_file(tmp_path, text))) in ({}, {"a.b": 1})


@rounds(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", ["overrides.yaml:3:", "'a'", "line 1"]),
        ("t:\n  x: 1\n  x: 2\n", ["overrides.yaml:3:", "'x'", "line 2"]),
        ("a: !!python/object/apply:os.system [x]", ["overrides.yaml:1:", "tag"]),
        ("a: !x 1", ["tag"]),
        ("a: &a [1]\nb: [" + ", ".join(["*a"] * 11) + "]", ["aliases"]),
        ("a: " + "[" * 1000, ["nested deeper"]),
        ("a: [1, 2", ["overrides.yaml:"]),
        ("1: 2", ["key 1", "quote it"]),
        ("a: &a {x: 1}\nb:\n  <<: *a\n  y: 2", ["overrides.yaml:3:", "'<<' merges nothing", "write out the keys"]),
        ("a: &a {x: 1}\nb: {<<: [*a]}", ["overrides.yaml:2:", "'<<' merges nothing"]),
        ("true: 2", ["key True", "quote it"]),
        ("- 1", ["must hold a mapping", "list"]),
        ("just text", ["must hold a mapping", "str"]),
        (b"a: \xff\xfe", ["not UTF-8"]),
        (b"a: \x00", ["overrides.yaml"]),
        ("---\na: 1\n---\nb: 2", ["overrides.yaml"]),
        ("a: " + "x" * (1 << 20), ["larger than"]),
    ],
)
def test_yaml_that_misleads_is_refused_with_its_place(tmp_path, text, words):
    with pytest.raises(UserError) as caught:
        load_yaml(yaml_file(tmp_path, text))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_alias_bomb_ends_at_once(tmp_path):
    bomb = "a: &a [x, x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(UserError, match="aliases"):
        load_yaml(yaml_file(tmp_path, bomb))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml cannot be read: No such file"):
        load_yaml(tmp_path / "none.yaml")


@given(st.binary(max_size=64))
@settings(max_examples=200, deadline=None)
def test_no_bytes_make_the_loader_fail_otherwise_than_in_a_sentence(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("yaml") / "any.yaml"
    path.write_bytes(data)
    try:
        assert isinstance(load_yaml(path), dict)
    except UserError as error:
        assert "\n" not in str(error)


def test_flatten_takes_nested_and_dotted_paths_but_none_twice():
    assert flatten({"train": {"optim": {"lr": 1}, "x": {}}, "model.y": [1]}) == {
        "train.optim.lr": 1,
        "train.x": {},
        "model.y": [1],
    }
    with pytest.raises(SpaceError, match=r"train\.x is given twice"):
        flatten({"train": {"x": 1}, "train.x": 2})


@rounds(
    ("name", "meant"),
    [
        ("lr", ["train.optim.lr"]),
        ("train.optim.learning_rate", ["train.optim.lr"]),
        ("train.batchsize", ["train.batch_size"]),
        ("epochs", ["train.num_epochs"]),
        ("train.epochs", ["train.num_epochs"]),
        ("name", ["train.init.name", "train.optim.name", "train.average.name"]),
        ("zzz", []),
    ],
)
def test_what_was_meant_is_named_first_with_at_most_two_more(name, meant):
    known = flatten(as_json(MlpConfig()))
    said = near(name, known)
    named = re.findall("'([^']+)'", said)
    assert named[: len(meant)] == meant and len(named) <= 3
    assert bool(said) == bool(meant) and (not said or said == f"; did you mean {' or '.join(map(repr, named))}?")


def test_a_name_under_several_parents_means_that_of_the_same_parent():
    said = near("train.optim.nam", flatten(as_json(MlpConfig())))
    assert said == "; did you mean 'train.optim.name'?"


def test_a_key_that_a_table_does_not_know_is_named():
    with pytest.raises(SpaceError, match=r"train.schedule=.* is refused: there is no 'foo' in it\.$"):
        resolve(MlpConfig, *parse_override('train.schedule={"name": "constant", "foo": 2}'))


def test_a_rule_of_the_whole_configuration_is_told_in_its_own_words():
    class Whole(BaseModel):
        low: int = 0

        @model_validator(mode="after")
        def check(self):
            if self.low:
                raise ValueError(f"low={self.low} is above high: lower it.")
            return self

    with pytest.raises(SpaceError, match=r"^low=3 is above high: lower it\.$"):
        from_json(Whole, {"low": 3})


@pytest.mark.parametrize("study", ["atft", "bert", "convnet", "dpo", "gpt", "lora", "mlp", "online", "t5"])
def test_a_configuration_reads_as_its_json_and_as_no_other(study):
    config = import_module(f"studies.{study}").STUDY.config
    stored = as_json(config)
    assert reads_as(config, stored)
    for path, value in flatten(stored).items():
        other = json.loads(json.dumps(stored))
        *parents, name = path.split(".")
        reduce(getitem, parents, other)[name] = float(value) if type(value) is int else [value]
        assert not reads_as(config, other), path
    assert not reads_as(config, stored | {"more": 1})


def test_a_value_that_json_has_no_type_for_reads_as_nothing():
    class Placed(Frozen):
        place: Path = Path("here")

    assert not reads_as(Placed(), as_json(Placed()))
