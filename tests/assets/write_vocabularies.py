"""Writes `vocabularies/`: small vocabularies of SentencePiece and tiktoken, and the ids that these libraries give.

pip install sentencepiece tiktoken, then `python tests/assets/write_vocabularies.py`. The tests read them without.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path

import sentencepiece
import tiktoken
from tiktoken_ext import openai_public

DIRECTORY = Path(__file__).parent / "vocabularies"
sys.path.insert(0, str(DIRECTORY.parents[2]))
sys.path.insert(0, str(DIRECTORY.parents[1] / "trainer" / "data"))

from test_vocabularies import MIXED, PUBLISHED, TRAINED_ON  # noqa: E402

RULES = {"\t": " ", "\n": " ", "\r": "", "\u00a0": " ", "ﬁ": "fi", "①": "1", "½": "1⁄2", "e\u0301": "é"}
OPTIONS = {
    "unigram": {"model_type": "unigram", "vocab_size": 400, "byte_fallback": True},
    "bpe": {"model_type": "bpe", "vocab_size": 160, "user_defined_symbols": ["<sep>", "quick"]},
}


def main() -> None:
    ids = {}
    with tempfile.TemporaryDirectory() as directory:
        rules = Path(directory) / "rules.tsv"
        rules.write_text(
            "".join(f"{points(source)}\t{points(target)}\n" for source, target in RULES.items()), encoding="utf-8"
        )
        for name, options in OPTIONS.items():
            trained_on = {"sentence_iterator": iter(TRAINED_ON), "model_prefix": str(DIRECTORY / name)}
            sizes = {"hard_vocab_limit": False, "minloglevel": 2, "normalization_rule_tsv": str(rules)}
            sentencepiece.SentencePieceTrainer.train(**trained_on, **sizes, **options)
            (DIRECTORY / f"{name}.vocab").unlink()
            model = sentencepiece.SentencePieceProcessor(model_file=str(DIRECTORY / f"{name}.model"))
            ids[name] = [model.encode(text) for text in MIXED]
    made = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines()}
    openai_public.load_tiktoken_bpe = lambda *_, **__: made  # instead of a download
    for pattern, encoding in PUBLISHED.items():
        published = openai_public.ENCODING_CONSTRUCTORS[encoding]()["pat_str"]
        model = tiktoken.Encoding(pattern, pat_str=published, mergeable_ranks=made, special_tokens={})
        ids[pattern] = [model.encode(text, disallowed_special=()) for text in MIXED]
    content = {"texts": MIXED, "ids": ids}
    (DIRECTORY / "ids.json").write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def points(text: str) -> str:
    return " ".join(f"{ord(character):x}" for character in text)


def lines() -> list[bytes]:
    """Writes the ranks that byte pairs learnt here have, and returns their lines."""
    from trainer.data.text import BPE
    from trainer.data.vocabularies import letters

    learnt = json.loads(BPE.train(TRAINED_ON, 420)._tokenizer.to_str())["model"]
    byte = {letter: number for number, letter in enumerate(letters())}
    tokens = sorted((id, bytes(byte[c] for c in token)) for token, id in learnt["vocab"].items() if token != BPE.END)
    rows = [base64.b64encode(token) + b" %d" % rank for rank, (_, token) in enumerate(tokens)]
    (DIRECTORY / "ranks.tiktoken").write_bytes(b"\n".join(rows) + b"\n")
    return rows


if __name__ == "__main__":
    main()
