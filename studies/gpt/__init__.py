"""A Llama-style language model: pre-trained and continued on two domains, of a generated language or of your text."""

from hpo import Choice, Float, Int, Objective, Study
from studies.gpt.config import Config

STUDY = Study(
    name="gpt",
    config=Config(),
    task="studies.gpt.task:GptTask",
    check="studies.gpt.check:check",
    space={
        "train.optim.lr": Float(3e-4, 2e-2, log=True),
        "train.optim.weight_decay": Float(1e-3, 1.0, log=True),
        "train.schedule.warmup_ratio": Float(0.0, 0.2),
        "train.batch_size": Int(4, 32, powers_of_two=True),
        "model.hidden_size": Choice([32, 64, 96, 128], tier=2),
        "model.num_layers": Int(1, 4, tier=2),
        "model.num_heads": Choice([2, 4, 8], tier=2),
        "model.num_kv_heads": Choice([1, 2], tier=2),
        "train.optim.beta2": Float(0.9, 0.999, tier=3),
        "train.clip.norm": Float(0.3, 3.0, log=True, tier=3),
    },
    objectives=[Objective("val/loss", "minimize", select="best")],
    metrics=("train/loss", "val/*", "test/*"),
    presets={
        # 124 M parameters, GPT-2's smallest in width, depth and vocabulary; see README.md for the tokens it needs.
        "full": {
            "data.tokenizer": "bpe",
            "data.vocab_size": 50304,
            "data.block_size": 1024,
            "data.tokens_per_parameter": 20.0,
            "model.hidden_size": 768,
            "model.num_layers": 12,
            "model.num_heads": 12,
            "model.num_kv_heads": 12,
            "train.num_epochs": 20,
            "train.batch_size": 512,
            "train.micro_batch_size": 16,
            "train.optim.lr": 6e-4,
            "train.schedule.min_lr": 6e-5,
            "train.schedule.warmup_ratio": 0.02,
        }
    },
    plan={"train.activations.checkpoint": ["none", "selective", "full"], "train.micro_batch_size": [64, 16, 4, 1]},
    data_paths=("data.path", "data.general_path", "data.tokenizer_file", "model.weights"),
    hold_out={"data.test": True},
    read_when={
        **dict.fromkeys(["data.column", "data.separator", "data.held_out", "data.general_path"], "data.path != ''"),
        **dict.fromkeys(["data.corpus.*", "data.seed"], "data.path == ''"),
        "data.phases": "data.path == '' or data.general_path != ''",
        **dict.fromkeys(["data.vocab_size", "data.tokenizer_file"], "data.tokenizer == 'bpe'"),
        **dict.fromkeys(["data.end_token", "data.tiktoken_pattern"], "data.tokenizer_file != ''"),
        **{
            f"model.moe.{name}": "model.moe.experts > 1"
            for name in ("top_k", "capacity", "shared", "balance", "z_loss")
        },
        "model.position.scaling": "model.position.kind == 'rotary'",
        "model.position.trained": "model.position.scaling != 'none'",
        "model.position.sinks": "model.position.window != None",
        **dict.fromkeys(["samples.prompts", "samples.temperature"], "samples.tokens > 0"),
    },
    enqueue=[
        {  # the defaults, so that the best trial is never worse
            "train.optim.lr": 3e-3,
            "train.optim.weight_decay": 0.1,
            "train.schedule.warmup_ratio": 0.05,
            "train.batch_size": 8,
            "model.hidden_size": 64,
            "model.num_layers": 2,
            "model.num_heads": 4,
            "model.num_kv_heads": 2,
            "train.optim.beta2": 0.95,
            "train.clip.norm": 1.0,
        }
    ],
)
