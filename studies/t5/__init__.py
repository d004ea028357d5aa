"""T5: an encoder and a decoder, pre-trained to write missing spans, of a generated language or of your text."""

from hpo import Choice, Float, Int, Objective, Study
from studies.t5.config import Config

STUDY = Study(
    name="t5",
    config=Config(),
    task="studies.t5.task:T5Task",
    check="studies.t5.check:check",
    space={
        "train.optim.lr": Float(3e-4, 2e-2, log=True),
        "spans.share": Float(0.1, 0.5),
        "train.batch_size": Int(16, 64, powers_of_two=True),
        "train.schedule.warmup_ratio": Float(0.0, 0.3),
        "spans.mean": Float(1.0, 8.0, log=True, tier=2),
        "model.num_layers": Int(1, 4, tier=2),
        "model.hidden_size": Choice([32, 64, 128], tier=2),
        "train.optim.weight_decay": Float(1e-3, 0.3, log=True, tier=2),
        "model.dropout": Float(0.0, 0.2, tier=3),
        "train.optim.beta2": Float(0.9, 0.999, tier=3),
    },
    objectives=[Objective("val/loss", "minimize", select="best")],
    metrics=("train/loss", "val/*", "test/*"),
    plan={"train.activations.checkpoint": ["none", "selective", "full"], "train.micro_batch_size": [64, 16, 4, 1]},
    data_paths=("data.path", "data.general_path", "data.tokenizer_file", "model.weights"),
    hold_out={"data.test": True},
    read_when={
        **dict.fromkeys(["data.column", "data.separator", "data.held_out", "data.general_path"], "data.path != ''"),
        **dict.fromkeys(["data.corpus.*", "data.seed"], "data.path == ''"),
        **dict.fromkeys(["data.vocab_size", "data.tokenizer_file"], "data.tokenizer == 'bpe'"),
        **dict.fromkeys(["data.end_token", "data.tiktoken_pattern"], "data.tokenizer_file != ''"),
    },
    enqueue=[
        {  # the defaults, so that the best trial is never worse
            "train.optim.lr": 3e-3,
            "spans.share": 0.15,
            "train.batch_size": 32,
            "train.schedule.warmup_ratio": 0.1,
            "spans.mean": 3.0,
            "model.num_layers": 2,
            "model.hidden_size": 64,
            "train.optim.weight_decay": 0.01,
            "model.dropout": 0.0,
            "train.optim.beta2": 0.98,
        }
    ],
)
