"""Tells whether a Llama of Hugging Face's is plain: without biases, scaled positions or heads of a width of their own.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}


def rope_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of rotary positions in a config.json, in the form of any release of transformers."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_type": kind, "rope_theta": float(rope.get("rope_theta", fields.get("rope_theta", 10_000.0)))}


def head_width(fields: Mapping[str, Any]) -> int:
    """Returns the width of an attention head."""
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def not_plain(fields: Mapping[str, Any]) -> str | None:
    """Returns the first setting of a config.json that a plain Llama does not have, such as `attention_bias=True`.

    It is None if there is none. Raises KeyError if a size is missing.
    """
    if (model := fields.get("model_type")) != "llama":  # which may name its sizes otherwise
        return f"model_type={model!r}"
    width, kind = head_width(fields), rope_of(fields)["rope_type"]
    wrong = [f"{name}={fields[name]!r}" for name, value in PLAIN.items() if fields.get(name, value) != value]
    wrong += [f"rope_type={kind!r}"] if kind != "default" else []
    wrong += [f"head_dim={width}"] if width * fields["num_attention_heads"] != fields["hidden_size"] else []
    return next(iter(wrong), None)
