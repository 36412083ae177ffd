"""The package as a whole: what it needs to import, and the wheel in an empty environment."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import fedobp

ROOT = Path(__file__).parent.parent


def test_the_core_imports_with_torch_and_numpy_alone():
    code = """
import sys
ABSENT = "typer click rich sklearn scipy pooch requests matplotlib safetensors".split()
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import fedobp.importance, fedobp.models, fedobp.data, fedobp.engine, fedobp.algorithms, fedobp.wire, fedobp.federation
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_callers_generators_are_left_alone_from_the_first_import_on():
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
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_pickled():
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text, path
        assert "torch.load(" not in text, path
        assert "allow_pickle=True" not in text, path


def test_the_wheel_works_in_an_empty_environment_outside_the_clone(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("fedobp-*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    bin_folder = tmp_path / "empty" / "bin"
    pip = [bin_folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    inside = {"cwd": tmp_path, "env": environment, "check": True, "capture_output": True, "text": True}
    shown = subprocess.run([bin_folder / "fedobp", "--help"], **inside)
    assert "compare" in shown.stdout
    version = subprocess.run([bin_folder / "fedobp", "--version"], **inside)
    assert version.stdout.strip() == f"fedobp {fedobp.__version__}"
    tiny = ["run", "--clients", "5", "--rounds", "1", "--epochs", "1", "--json"]
    ran = json.loads(subprocess.run([bin_folder / "fedobp", *tiny], **inside).stdout)
    assert (tmp_path / ran["out"] / "models" / "clients.safetensors").exists()
    where = subprocess.run([bin_folder / "python", "-c", "import fedobp; print(fedobp.__file__)"], **inside)
    assert where.stdout.startswith(str(tmp_path))
    assert (Path(where.stdout.strip()).parent / "py.typed").exists()
