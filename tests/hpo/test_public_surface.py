"""What users import, frozen; and that importing it costs nothing."""

import json
import re
import subprocess
import sys

import pytest
from places import ROOT

import hpo
import hpo.errors

pytestmark = pytest.mark.usefixtures("process")

HEAVY = ("torch", "mlflow", "optuna", "ray", "numpy", "scipy", "sqlalchemy", "pydantic", "yaml")


def fresh(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_the_public_names_are_these():
    classes = ["Bool", "Choice", "Constraint", "Float", "HpoError", "Int", "Objective", "Study", "StudyHandle", "Trial"]
    assert sorted(hpo.__all__) == [*classes, "__version__", "import_study", "load", "open", "resume", "run", "study"]
    assert all(getattr(hpo, name) is not None for name in hpo.__all__)
    assert hpo.HpoError is hpo.errors.HpoError
    assert dir(hpo) == sorted(hpo.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = hpo.Nothing


def test_the_version_of_the_image_is_the_packages():
    [label] = re.findall(r"^ARG VERSION=(.*)", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert hpo.__version__ == label


def test_importing_hpo_loads_nothing_heavy():
    assert fresh(f"import sys, json, hpo; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))") == []


@pytest.mark.parametrize("name", ["Study", "Float", "HpoError", "load"])
def test_declaring_needs_no_torch_optuna_or_numpy(name):
    heavy = ("torch", "mlflow", "optuna", "ray", "numpy", "scipy", "sqlalchemy")
    assert (
        fresh(f"import sys, json, hpo; hpo.{name}; print(json.dumps([m for m in {heavy} if m in sys.modules]))") == []
    )


def test_random_and_grid_ask_without_optuna_or_scipy():
    code = (
        "import sys, json; from hpo.search.samplers.registry import make_sampler;"
        "from hpo.space.dimensions import Float; from hpo.space.space import Space;"
        "s = Space({'x': Float(0, 1)});"
        "[make_sampler(n, s, [], 0).ask(0) for n in ('random', 'grid')];"
        "print(json.dumps([m for m in ('torch', 'mlflow', 'optuna', 'ray', 'scipy') if m in sys.modules]))"
    )
    assert fresh(code) == []


@pytest.mark.parametrize("package", ["hpo", "trainer"])
def test_a_package_says_to_checkers_that_it_is_typed(package):
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"][package]
    assert (ROOT / package / "py.typed").is_file()
