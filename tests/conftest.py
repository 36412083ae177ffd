import json
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

# One thread each: the models here are tiny, and tests share their machine with others. Set before torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

# Tests do not depend on who started them: what changes how the command line looks is theirs to set.
for name in ("CI", "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES", "NO_COLOR", "PY_COLORS", "PYTHONIOENCODING"):
    os.environ.pop(name, None)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, every process seems to have exited with 0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one

# Nor on how fast the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

import numpy as np
import torch

# Where there is no card, the kernels are interpreted. Triton asks for this when they are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from children import children
from cli.cases import write_npz
from lanes_cases import NETWORKS, shards
from relay import Relay

from fedobp import cli
from fedobp.algorithms import METHODS
from fedobp.data import datasets
from fedobp.models import NETS


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run the command line in this process, in an empty folder with an empty data folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDOBP_DATA", str(tmp_path / "data"))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedobp", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        said = capsys.readouterr()
        return Said(stop.value.code, said.out, said.err)

    return call


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a module with entry points of one group, as pip would."""

    def installed(package, code, group, entry_points):
        (tmp_path / f"{package}.py").write_text(code)
        about = tmp_path / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
        (about / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, package, raising=False)

    return installed


@pytest.fixture
def start():
    """Start processes; what is left of them is ended with the test."""
    with children() as call:
        yield call


@pytest.fixture
def ran(start):
    """Run what `start` starts to its end, and return what it said."""

    def call(*arguments, **more):
        process = start(*arguments, **more)
        out, err = process.communicate()
        return Said(process.returncode, out, err)

    return call


@pytest.fixture(scope="module")
def networks():
    """Networks of many kinds, registered by their names."""
    with pytest.MonkeyPatch.context() as patch:
        for name, build in NETWORKS.items():
            patch.setitem(NETS, name, build)
        yield


@pytest.fixture
def ragged(monkeypatch):
    """Assign the digits' first samples to ragged clients."""
    monkeypatch.setattr("fedobp.federation.partition", lambda y, clients, *, seed, **_: shards(seed % 2))


@pytest.fixture
def wards(tmp_path, monkeypatch):
    """The dataset `wards`: a table of 70 samples with seven natural clients."""
    x = np.random.default_rng(0).random((70, 3)).astype(np.float32)
    wards = np.array([f"ward {n}" for n in range(7)])
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "wards.npz", x=x, y=np.arange(70) % 2, client=wards[np.arange(70) % 7])
    monkeypatch.setenv("FEDOBP_DATA", str(tmp_path / "data"))


@pytest.fixture
def relay(monkeypatch):
    """Register the method `relay`."""
    monkeypatch.setitem(METHODS, "relay", Relay)


@pytest.fixture
def read_files(tmp_path, monkeypatch):
    """The dataset `mine`; the names of the dataset files that were read, in order."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FEDOBP_DATA", str(tmp_path / "data"))
    write_npz(tmp_path / "data" / "mine.npz", n=120)
    found, read = [], datasets.read_npz

    def counted(path, *arguments, **more):
        found.append(Path(path).name)
        return read(path, *arguments, **more)

    monkeypatch.setattr(datasets, "read_npz", counted)
    return found
