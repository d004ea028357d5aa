"""The studies' networks are files of their own, which need torch and nothing else."""

import ast
import shutil
import subprocess
import sys

import pytest
from places import ROOT

ALONE = """
import importlib.util, sys
import torch

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] not in {"torch", "numpy", *sys.stdlib_module_names}:
            raise ImportError(f"{name} is not on this machine")

sys.meta_path.insert(0, Absent())
for file, call in zip(sys.argv[1::2], sys.argv[2::2]):
    spec = importlib.util.spec_from_file_location("net", file)
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    print(*eval(call).shape)
"""
NETWORKS = {
    "atft": (
        "net.Atft(6, 2, 0, 4, lookback=20, hidden_size=8, num_heads=2, num_layers=1, num_filters=2, dropout=0.0, "
        "num_frequencies=2, graph=True, temporal='convolution', selection='softmax', attention=True)("
        "torch.randn(3, 5, 20, 6), torch.ones(3, 5, dtype=torch.bool), torch.zeros(5, dtype=torch.long), "
        "torch.zeros(3, 5, 2, dtype=torch.long), torch.ones(3, 5, 2, dtype=torch.bool), torch.randn(3, 5, 2, 4))",
        "3 5 2",
    ),
    "convnet": (
        "net.ResNet(10, width=8, num_blocks=1, dropout=0.0, channels_last=False)(torch.rand(2, 3, 16, 16))",
        "2 10",
    ),
    "gpt": (
        "net.Llama(257, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_size=32)("
        "torch.zeros(2, 7, dtype=torch.long))",
        "2 7 257",
    ),
    "bert": (
        "net.Bert(258, hidden_size=16, num_layers=1, num_heads=2, mlp_size=32)(torch.zeros(2, 7, dtype=torch.long))",
        "2 7 258",
    ),
    "t5": (
        "net.T5(357, hidden_size=16, num_layers=1, num_heads=2, mlp_size=32)("
        "torch.zeros(2, 7, dtype=torch.long), None, torch.zeros(2, 3, dtype=torch.long))",
        "2 3 357",
    ),
    "mlp": ("net.MLP(64, 10, hidden_size=16, num_layers=2, dropout=0.1)(torch.randn(2, 64))", "2 10"),
}


@pytest.mark.usefixtures("process")
def test_a_network_runs_by_itself_where_there_is_torch_alone(tmp_path):
    """A copy of each file, so that it runs on a bare machine; the networks of lora and dpo are peft's."""
    studies, arguments = ROOT / "studies", []
    for study, (call, _) in NETWORKS.items():
        (tmp_path / study).mkdir()
        arguments += [shutil.copy(studies / study / "model.py", tmp_path / study / "net.py"), call]
    command = [sys.executable, "-P", "-c", ALONE, *arguments]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.splitlines() == [shape for _, shape in NETWORKS.values()], run.stderr


def imported(study: str, file: str) -> set[str]:
    """What a file of a study imports, wherever in it."""
    tree = ast.parse((ROOT / "studies" / study / file).read_text())
    names = {"." * n.level + (n.module or "") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    return names | {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}


def test_a_network_imports_torch_and_the_standard_library_alone():
    """Also not what torch has imported, as numpy."""
    for study in NETWORKS:
        packages = {name.partition(".")[0] for name in imported(study, "model.py")}
        assert packages - sys.stdlib_module_names == {"torch"}, study


def test_what_writes_needs_the_network_beside_it_and_torch():
    assert imported("gpt", "generate.py") == {"__future__", "collections.abc", "torch", "studies.gpt.model"}
