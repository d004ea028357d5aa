"""Positions against their formulas in float64, against transformers, and the generated documents that need them."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from studies._lm.corpus import prepare
from studies._lm.corpus_config import CorpusConfig
from studies._lm.source import Source
from studies.gpt import llama
from studies.gpt.budget import parameters
from studies.gpt.check import check
from studies.gpt.config import Config, DataConfig
from studies.gpt.data import packed
from studies.gpt.generate import generate
from studies.gpt.model import Llama, forget, remember
from studies.gpt.positions import Alibi, Scaled, places, rates, slopes
from studies.gpt.reach import Reach
from studies.gpt.task import GptTask, sizes
from trainer.errors import ConfigError, DataError
from trainer.runtime.quiet_imports import quiet_torchao

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 48}
HERE = torch.device("cpu")
KEYED = {"general": 20, "target": 20, "words": 30, "keys": 5}


def config_of(block_size: int = 128, corpus: dict[str, int] | None = None, **model: Any) -> Config:
    corpus = corpus or {"general": 30, "target": 20}
    return Config.model_validate({"model": SIZES | model, "data": {"corpus": corpus, "block_size": block_size}})


def model_of(config: Config) -> Llama:
    torch.manual_seed(1)
    model = Llama(257, **sizes(config)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


# --- scaled rotary positions


def test_interpolated_positions_are_those_of_a_slower_rotation():
    scaled = Scaled(8, 100.0, scaling="linear", trained=16, factor=4.0).turns(64, HERE, 0).double()
    position = torch.arange(64, dtype=torch.float64)[:, None] / 4
    angle = (position * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)).repeat(1, 2)
    torch.testing.assert_close(scaled, torch.stack((angle.cos(), angle.sin())), rtol=0, atol=1e-5)


def test_a_larger_base_keeps_the_fastest_rate_and_divides_the_slowest():
    plain, scaled = (rates(16, 10_000.0, scaling, 256, 8.0) for scaling in ("none", "ntk"))
    assert scaled[0] == plain[0] and scaled[-1] == pytest.approx(plain[-1] / 8)
    assert all(1 <= a / b <= 8 for a, b in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("width", [16, 64, 128])
def test_yarn_is_that_of_transformers(width, transformers):
    """Its rates, and the factor of cos and sin."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 256}
    theirs = transformers.LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=rope
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, HERE)
    ours = rates(width, 10_000.0, "yarn", 256, 8.0)
    torch.testing.assert_close(torch.tensor(ours), expected, rtol=1e-6, atol=0)
    turns = Scaled(width, 10_000.0, scaling="yarn", trained=256, factor=8.0).turns(1, HERE, 0)
    assert float(turns[0, 0, 0]) == pytest.approx(factor)


@pytest.fixture(scope="module")
def transformers():
    quiet_torchao()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("transformers", reason="runs with pip install -e '.[llm]'")


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn"])
@torch.no_grad()
def test_scaled_positions_and_geglu_have_the_same_logits_there(scaling, transformers, tmp_path):
    config = config_of(position={"scaling": scaling, "trained": 32}, activation="geglu")
    model, tokens = model_of(config), torch.randint(257, (2, 100))
    llama.save(model.state_dict(), config, tmp_path, end=256)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=2e-5, atol=2e-5)


def test_geglu_is_read_back(tmp_path):
    config = config_of(activation="geglu")
    llama.save(model_of(config).state_dict(), config, tmp_path)
    assert llama.read_config(tmp_path)[0].activation == "geglu" and "-o model.activation=geglu" in llama.flags(tmp_path)
    silu = config_of(weights=str(tmp_path), mlp_size=48)
    with pytest.raises(DataError, match=r"model.activation is swiglu and model.weights .* has geglu"):
        check(silu)


# --- ALiBi, learned positions, windows and sinks


def test_the_slopes_are_those_of_the_paper():
    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert slopes(6) == [2.0 ** -(2 * i) for i in range(1, 5)] + [2.0**-1, 2.0**-3]


@torch.no_grad()
def test_alibi_adds_the_distance_to_the_scores():
    """Against a loop in float64 over the tokens of two documents."""
    config = config_of(position={"kind": "alibi", "window": 5, "sinks": 2})
    model, documents = model_of(config).double(), torch.tensor([[0] * 9 + [1] * 6 + [-1]])
    attend, x = model.blocks[0].attend, torch.randn(1, 16, 32, dtype=torch.float64)
    _, cos, sin, mask = model.embed(torch.zeros(1, 16, dtype=torch.long), documents)
    q, k, v = (layer(x)[0].view(16, -1, 8) for layer in (attend.q, attend.k, attend.v))
    where = [i if i < 9 else i - 9 for i in range(16)]
    expected = torch.zeros(16, 32, dtype=torch.float64)
    for token in range(15):
        seen = [
            other
            for other in range(token + 1)
            if documents[0, other] == documents[0, token] and (token - other < 5 or where[other] < 2)
        ]
        for head in range(4):
            scores = [
                float(q[token, head] @ k[other, head // 2]) / 8**0.5 - 2.0 ** (-2 * (head + 1)) * (token - other)
                for other in seen
            ]
            shares = torch.tensor(scores, dtype=torch.float64).softmax(0)
            expected[token, 8 * head : 8 * head + 8] = sum(
                share * v[other, head // 2] for share, other in zip(shares, seen, strict=True)
            )
    torch.testing.assert_close(attend(x, cos, sin, mask)[0, :15], attend.o(expected)[:15], rtol=1e-6, atol=1e-6)


def test_positions_in_a_document_begin_at_0():
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1]])
    assert places(documents, 8, HERE).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    "position",
    [
        {"kind": "learned"},
        {"kind": "alibi"},
        {"window": 6, "sinks": 1},
        {"scaling": "yarn", "trained": 32},
        {"kind": "learned", "window": 4},
    ],
    ids=str,
)
@torch.no_grad()
def test_documents_of_a_row_and_kept_keys_change_nothing(position):
    """A document has the same logits alone, behind another one, and token by token."""
    model = model_of(config_of(position=position))
    first, second = torch.randint(257, (1, 7)), torch.randint(257, (1, 12))
    both = torch.cat((first, second), dim=1)
    packed = model(both, torch.tensor([[0] * 7 + [1] * 12]))
    torch.testing.assert_close(packed[:, 7:], model(second), rtol=1e-5, atol=1e-5)
    remember(model)
    parts = [model(part) for part in second.split([5, 1, 1, 3, 2], dim=1)]
    forget(model)
    torch.testing.assert_close(torch.cat(parts, dim=1), model(second), rtol=1e-5, atol=1e-5)
    new = generate(model, second[0].tolist(), 140, length=128, temperature=0)
    assert len(new) == 140  # further than there are positions


@torch.no_grad()
def test_a_window_hides_what_lies_before_it_and_sinks_stay():
    """One layer sees as far as its window; further tokens change nothing, but for the first ones."""
    tokens = torch.randint(257, (1, 20))
    for sinks, changing in ((0, {16, 17, 18, 19}), (2, {0, 1, 16, 17, 18, 19})):
        torch.manual_seed(0)
        model = Llama(257, **SIZES | {"num_layers": 1}, positions=Scaled(8, 1e4, window=4, sinks=sinks)).eval()
        before = model(tokens)[0, -1]
        for place in range(20):
            changed = tokens.clone()
            changed[0, place] = (changed[0, place] + 1) % 257
            assert torch.equal(model(changed)[0, -1], before) == (place not in changing), place


@torch.no_grad()
def test_alibi_computes_under_autocast():
    model, tokens = model_of(config_of(position={"kind": "alibi"})), torch.randint(257, (1, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(tokens)
    torch.testing.assert_close(half.float(), model(tokens), rtol=0.1, atol=0.3)
    assert isinstance(model.embed.positions, Alibi)


@pytest.mark.parametrize("kind", ["rotary", "learned"])
def test_parameters_are_counted(kind):
    config = config_of(position={"kind": kind})
    count = sum(p.numel() for p in Llama(257, **sizes(config)).parameters())
    assert parameters(config.model, 257, config.data.block_size) == count


# --- documents whose keys stand at their start


def test_documents_with_keys_hold_each_definition_twice():
    texts = prepare(DataConfig(block_size=256, corpus=CorpusConfig(**KEYED)))["target"]["train"]
    for document in texts.documents:
        words = document.decode().split(" ")
        definitions = [word for word in words if re.fullmatch("[A-Z][0-9]", word)]
        assert sorted(definitions[:5]) == sorted(definitions[5:]) and words[:5] == definitions[:5]
        assert len(words) == 30 + 2 * 5 and len(document) + 2 <= CorpusConfig(**KEYED).longest


def test_the_floor_with_keys_is_the_logarithm_of_how_many_there_are():
    """One word and nothing to draw among words: the digits, two orders, and the places are even."""
    config = CorpusConfig(num_words=4, successors=1, words=3, keys=2)
    source = Source(["a", "b"], config, np.random.default_rng(0))
    source.start[:], source.table[:] = [1.0, 0.0], [[1.0, 0.0], [1.0, 0.0]]
    text = source.text(20_000, np.random.default_rng(1))
    kinds = 10**2 * 2 * 2 * 3  # digits, order of the definitions, order of the repetitions, places of two in three
    assert len(set(text.documents)) == kinds
    assert text.nats == pytest.approx(20_000 * math.log(kinds))


@torch.no_grad()
def test_the_loss_is_told_by_the_position_in_a_document():
    """Against a loop; the digits are those after the definitions, and the whole adds up to the loss of all."""
    config = Config.model_validate({"model": SIZES, "data": {"corpus": KEYED, "block_size": 256, "by_position": True}})
    task = GptTask(config)
    model = model_of(config)
    metrics = task.evaluate(model)
    rows = packed(task.tokens, "target", "val", 256, seed=0)
    losses: dict[str, list[float]] = {}
    for number in range(len(rows)):
        tokens, documents = rows[number]["tokens"], rows[number]["documents"]
        with torch.no_grad():
            logits = model(tokens[None], documents[None])[0].double()
        begin = 0
        for place in range(1, len(tokens)):
            if documents[place] != documents[place - 1]:
                begin = place
            elif documents[place] >= 0:
                loss = float(F.cross_entropy(logits[place - 1], tokens[place]))
                octave = max((start for start in (64, 128, 256) if start <= place - begin), default=0)
                losses.setdefault(f"val/loss_from_{octave}", []).append(loss)
                if 48 <= int(tokens[place]) <= 57 and place - begin > 15:
                    losses.setdefault(f"val/digits_from_{octave}", []).append(loss)
    assert losses.keys() == {name for name in metrics if re.match("val/(loss|digits)_from", name)}
    for name, some in losses.items():
        assert metrics[name] == pytest.approx(sum(some) / len(some), rel=1e-5), name
    everything = [loss for name, some in losses.items() if "loss" in name for loss in some]
    assert metrics["val/loss"] == pytest.approx(sum(everything) / len(everything), rel=1e-5)


def test_octaves_without_tokens_are_left_out():
    assert Reach().metrics() == {}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": {"position": {"scaling": "yarn"}}}, "scaling yarn needs trained, the row length"),
        ({"model": {"position": {"scaling": "ntk", "kind": "alibi", "trained": 9}}}, "scaling ntk is of rotary"),
        ({"model": {"position": {"sinks": 2}}}, "sinks 2 are seen besides a window, and there is none"),
        ({"model": {"position": {"trained": 200}}}, "trained 200 is more than data.block_size 128"),
        ({"model": {"position": {"kind": "alibi"}}, "train": {"parallel": {"tensor": 2}}}, "kind=alibi and train.par"),
        ({"model": {"position": {"kind": "learned"}, "weights": "x"}}, "whose positions are rotary"),
        ({"data": {"corpus": {"keys": 20}}}, "keys 20 are more than words 16: lower keys, or give more words"),
        ({"data": {"corpus": {"keys": 5}}}, "cuts documents of the generated corpus, of up to 143 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(given, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Config.model_validate(given)


@pytest.mark.parametrize(
    ("position", "setting"), [({"kind": "alibi"}, "kind=alibi"), ({"window": 4}, "window=4")], ids=str
)
def test_what_a_llama_does_not_compute_is_not_saved_as_one(position, setting, tmp_path):
    config = config_of(position=position)
    with pytest.raises(ConfigError, match=rf"model.position.{setting} is what Hugging Face's Llama does not compute"):
        llama.save({}, config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_begun_study_keeps_its_configuration():
    """Fields that were added stand in no JSON at their defaults, and positions change no weight's name."""
    fields = Config().model_dump(mode="json")
    assert not {"position", "activation"} & fields["model"].keys() and "by_position" not in fields["data"]
    assert not {"words", "keys"} & fields["data"]["corpus"].keys()
    assert not [name for name, _ in Llama(257, **sizes(Config())).named_parameters() if "position" in name]
