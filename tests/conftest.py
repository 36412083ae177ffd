import json
import os
import sys
from typing import NamedTuple

import pytest

# One thread each: the models here are tiny, and tests share their machine with others. Set before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Where there is no card, the kernels are interpreted. Triton asks for this when they are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from lanes_cases import NETWORKS, shards

from fedobp import cli
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


@pytest.fixture(scope="module")
def networks():
    """Networks of many kinds, known by their names."""
    with pytest.MonkeyPatch.context() as patch:
        for name, build in NETWORKS.items():
            patch.setitem(NETS, name, build)
        yield


@pytest.fixture
def ragged(monkeypatch):
    """Deal the digits' first samples out to ragged clients."""
    monkeypatch.setattr("fedobp.federation.partition", lambda y, clients, *, seed, **_: shards(seed % 2))
