"""Methods of other packages: the example of the docs, installed as a package would be, and packages that are broken."""

import re
import sys
from pathlib import Path

import pytest

from fedobp import Config, Federation, FedobpError
from fedobp.algorithms import METHODS, method_class

PAGE = Path(__file__).parent.parent / "docs/methods/your-own.md"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a module with an entry point, as pip would."""

    def installed(code, value, name="fedmedian"):
        (tmp_path / "fedmedian.py").write_text(code)
        about = tmp_path / "fedmedian-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fedmedian\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[fedobp.methods]\n{name} = {value}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "fedmedian", raising=False)

    return installed


def example():
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(code.splitlines()) < 60
    return code


def test_the_example_of_the_docs_runs_beside_the_librarys_own(install, command, tmp_path):
    install(example(), "fedmedian:FedMedian")
    found = {}
    for engine in ("lanes", "serial"):
        config = Config(clients=5, participation=1.0, rounds=2, epochs=1, precision="fp64", engine=engine, model="mlp")
        found[engine] = Federation(config).run("fedmedian", step=0.5)
    assert found["lanes"].accuracy == found["serial"].accuracy
    assert found["lanes"].accuracy != Federation(config).run("fedavg").accuracy
    assert "fedmedian" in command("methods").out
    said = command(
        "compare", "--methods", "fedavg,fedmedian", "--rounds", "1", "--clients", "5", "--out", tmp_path / "a"
    )
    assert "fedmedian" in said.out.lower()


@pytest.mark.parametrize(
    ("code", "value", "complaint"),
    [
        ("1 / 0", "fedmedian:FedMedian", r"the method 'fedmedian' .* cannot be loaded: ZeroDivisionError"),
        ("", "fedmedian:FedMedian", "cannot be loaded: AttributeError"),
        ("FedMedian = 3", "fedmedian:FedMedian", "is no subclass of `Method` of that name"),
        ("from fedobp.algorithms.fedavg import FedAvg as FedMedian", "fedmedian:FedMedian", "is no subclass"),
    ],
)
def test_a_broken_package_is_named_and_harms_nobody_else(install, code, value, complaint):
    install(code, value)
    with pytest.raises(FedobpError, match=complaint):
        method_class("fedmedian")
    assert method_class("fedavg") is METHODS["fedavg"]


def test_nobody_can_take_a_name_of_the_librarys_own(install):
    install(example(), "fedmedian:FedMedian", name="fedavg")
    assert method_class("fedavg") is METHODS["fedavg"]


def test_a_near_miss_is_suggested(install):
    install(example(), "fedmedian:FedMedian")
    with pytest.raises(FedobpError, match="did you mean 'fedmedian'"):
        method_class("fedmedain")
