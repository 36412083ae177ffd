"""The package as a whole: what it needs to import, and the wheel in an empty environment."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import fedobp

ROOT = Path(__file__).parent.parent


def test_the_core_imports_with_torch_and_numpy_alone(ran):
    code = """
import sys
ABSENT = "typer click rich sklearn scipy pooch requests matplotlib jinja2 safetensors".split()
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import fedobp.importance, fedobp.models, fedobp.data, fedobp.engine, fedobp.algorithms, fedobp.wire, fedobp.federation
"""
    assert ran("-c", code) == (0, "", "")


def test_the_callers_generators_are_left_alone_from_the_first_import_on(ran):
    code = """
import random
before = random.getstate()
import numpy, torch
seen = numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
import fedobp
fedobp.Federation(fedobp.Config(clients=5, rounds=1, epochs=1, model="mlp")).run()
assert random.getstate() == before
assert (numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == seen
"""
    assert ran("-c", code) == (0, "", "")


def test_public_names_are_listed_without_torch(ran):
    code = """
import sys
import fedobp
assert {"Callback", "Config", "Federation", "Results", "sweep", "trackers"} <= set(dir(fedobp))
assert not {"torch", "numpy"} & set(sys.modules)
"""
    assert ran("-c", code) == (0, "", "")


# What can execute what it reads, and modules that do.
PICKLES = re.compile(
    r"\b(import|from) +(pickle|cPickle|_pickle|dill|cloudpickle|joblib|shelve|marshal)\b|torch\.(load|save)\(|"
    r"\ballow_pickle *= *True|\b(read|to)_pickle\(|yaml\.(load|full_load|unsafe_load)\(|"
    r"\b(np|numpy)\.load\((?![^\n]*allow_pickle=False)|\b(np|numpy)\.(fromfile|genfromtxt)\("
)
HOSTILE = ["tests/test_fuzz.py", "tests/test_package.py"]  # a pickle that does harm to who reads it, and this list


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import pickle", True), ("from joblib import load", True), ("torch.load(path)", True), ("np.load(path)", True),
        ("np.load(path, allow_pickle=False)", False), ("np.load(path, allow_pickle=True)", True),
        ("yaml.load(x)", True), ("loads = json.load(file)", False), ("it is pickled", False),
        ("import marshalling", False),
    ],
)  # fmt: skip
def test_pickles_are_recognised(line, found):
    assert bool(PICKLES.search(line)) == found


def test_nothing_is_pickled():
    """Also not in tests, benchmarks and examples, but for a control that must."""
    paths = [path for name in ("src", "tests", "benchmarks", "examples") for path in (ROOT / name).rglob("*")]
    files = [
        path for path in paths if path.suffix in (".py", ".ipynb") and path.relative_to(ROOT).as_posix() not in HOSTILE
    ]
    assert len(files) > 200
    found = [
        f"{path}:{at}"
        for path in files
        for at, line in enumerate(path.read_text().splitlines(), 1)
        if PICKLES.search(line)
    ]
    assert found == []


def test_the_wheel_works_in_an_empty_environment_outside_the_clone(ran, tmp_path):
    bin_folder = tmp_path / "empty" / "bin"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def done(program, *arguments):
        said = ran(*arguments, program=program, cwd=tmp_path, env=environment)
        assert said.code == 0, said
        return said

    source = tmp_path / "source"  # setuptools leaves a folder `build` behind, and takes what is in one
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done(sys.executable, "-m", "venv", "--without-pip", "empty")
    pip = "-m", "pip", "--python", bin_folder / "python", "--disable-pip-version-check"
    done(sys.executable, *pip, "install", "--no-compile", source)  # builds the wheel, and compiles only what is run
    assert "compare" in done(bin_folder / "fedobp", "--help").out
    assert done(bin_folder / "fedobp", "--version").out.strip() == f"fedobp {fedobp.__version__}"
    run = done(bin_folder / "fedobp", "run", "--clients", 5, "--rounds", 1, "--epochs", 1, "--json").json
    assert (tmp_path / run["out"] / "models" / "clients.safetensors").exists()
    done(bin_folder / "fedobp", "report", run["out"])
    assert (tmp_path / run["out"] / "report.html").exists()
    assert done(bin_folder / "fedobp", "paper", "claims", "--json").json["rows"] == {"results": 15}  # published numbers
    where = done(bin_folder / "python", "-c", "import fedobp; print(fedobp.__file__)").out
    assert where.startswith(str(tmp_path))
    assert (Path(where.strip()).parent / "py.typed").exists()


def test_the_package_offers_exactly_its_public_names():
    assert dir(fedobp) == sorted(fedobp.__all__)
    assert all(hasattr(fedobp, name) for name in dir(fedobp))
    with pytest.raises(AttributeError, match="no attribute 'Fedration'"):
        _ = fedobp.Fedration
