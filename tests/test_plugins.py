"""Methods of other packages: the example of the docs, installed like a package, and packages that are broken."""

import ast
import json
import re
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from fedobp import Config, Federation, FedobpError, sweep
from fedobp.algorithms import METHODS, method_class, registry

PAGE = Path(__file__).parent.parent / "docs/methods/your-own.md"


@pytest.fixture
def install(install):
    """Install a module with a method."""

    def installed(code, value, name="fedmedian", package="fedmedian"):
        install(package, code, "fedobp.methods", {name: value})

    return installed


@pytest.fixture
def few(monkeypatch):
    """Leave three built-in methods."""
    for name in set(METHODS) - {"fedavg", "local", "fedper"}:
        monkeypatch.delitem(METHODS, name)


def example():
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(code.splitlines()) < 60
    return code


def test_a_method_needs_one_import():
    """Beside the standard library, `from fedobp import method as fl` is all that the example imports."""
    imports = [node for node in ast.walk(ast.parse(example())) if isinstance(node, ast.Import | ast.ImportFrom)]
    outside = [node for node in imports if getattr(node, "module", "").split(".")[0] not in sys.stdlib_module_names]
    assert [ast.unparse(node) for node in outside] == ["from fedobp import method as fl"]


def test_the_example_of_the_docs_runs_beside_built_in_methods(install, command, tmp_path):
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


def test_a_methods_prints_are_not_in_the_output(install, command):
    """Standard output is only JSON, whatever a method prints when it is loaded and when it runs."""
    code = example().replace("return {", "print('running'); return {", 1)
    assert "print" in code
    install("print('loaded')\n" + code, "fedmedian:FedMedian")
    arguments = ("--rounds", 1, "--clients", 5, "--model", "mlp", "--json")
    said = command("run", "--method", "fedmedian", *arguments)
    assert said.json["method"] == "fedmedian"
    assert "loaded" in said.err
    assert "running" in said.err
    assert [one["method"] for one in command("compare", "--methods", "fedmedian", *arguments).json["runs"]] == [
        "fedmedian"
    ]
    assert command("methods", "--json").json["methods"]


METHOD = """
from fedobp import method as fl
from fedobp.algorithms.fedavg import FedAvg
from dataclasses import dataclass

@dataclass(frozen=True)
class FedMedian(FedAvg):
    name = "fedmedian"
"""
BROKEN = [
    (
        "1 / 0",
        "fedmedian:FedMedian",
        r"the method 'fedmedian' .* cannot be loaded: ZeroDivisionError: division by zero",
    ),
    ("def f(:", "fedmedian:FedMedian", r"cannot be loaded: SyntaxError: .*fedmedian.py, line 1"),
    ("import nothing_of_that_name", "fedmedian:FedMedian", "cannot be loaded: ModuleNotFoundError: No module named"),
    ("import sys; sys.exit('bye')", "fedmedian:FedMedian", "cannot be loaded: SystemExit: bye"),
    ("class E(BaseException): pass\nraise E", "fedmedian:FedMedian", "cannot be loaded: E$"),
    ("", "fedmedian:FedMedian", "cannot be loaded: AttributeError"),
    ("", "not a module", "cannot be loaded: "),
    ("FedMedian = 3", "fedmedian:FedMedian", "is no subclass of `Method` of that name"),
    ("", "fedmedian", "is no subclass of `Method` of that name"),
    ("from fedobp.method import Method as FedMedian", "fedmedian:FedMedian", "is no subclass of `Method`"),
    ("from fedobp.algorithms.fedavg import FedAvg as FedMedian", "fedmedian:FedMedian", "is no subclass"),
    (METHOD + "    summary = None", "fedmedian:FedMedian", "has no text `summary`"),
    (METHOD + "    step: float = 1.0", "fedmedian:FedMedian", "has a field 'step' that is not declared with `option`"),
    (
        METHOD + "    step: float = fl.option(None, 'x')",
        "fedmedian:FedMedian",
        "has an option 'step' whose default is no number or text",
    ),
    (
        METHOD + "    fast: bool = fl.option(True, 'x')",
        "fedmedian:FedMedian",
        r"has an option 'fast' whose default is no number or text: a switch has choices=\('off', 'on'\)",
    ),
    (METHOD + "    @classmethod\n    def options(cls): 1 / 0", "fedmedian:FedMedian", "cannot be loaded: ZeroDivision"),
]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("code", "value", "complaint"), BROKEN)
def test_a_broken_package_is_named_and_all_other_methods_work(install, command, code, value, complaint):
    install(code, value)
    with pytest.raises(FedobpError, match=complaint):
        method_class("fedmedian")
    assert method_class("fedavg") is METHODS["fedavg"]
    said = command("methods")
    assert said.code == 2
    assert all(name in said.out for name in ("fedavg", "local", "fedper"))
    assert "fedmedian" not in said.out
    [line] = said.err.splitlines()
    assert line.startswith("error: ")
    assert "fedmedian" in line
    assert re.search(complaint, line)
    said = command("methods", "--json")
    assert [one["name"] for one in said.json["methods"]] == ["local", "fedavg", "fedper"]
    assert said.json["failed"] == [{"method": "fedmedian", "error": line.removeprefix("error: ")}]


TINY = ["--clients", "5", "--rounds", "2", "--epochs", "1", "--participation", "0.4", "--model", "mlp"]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("methods", ["all", "fedmedian,fedavg,local,fedper"])
def test_a_broken_package_is_left_out_of_a_comparison(install, command, methods):
    install("1 / 0", "fedmedian:FedMedian")
    said = command("compare", *TINY, "--methods", methods, "--seeds", 2, "--set", "step=1", "--out", "here")
    assert said.code == 2
    assert said.err.startswith("error: fedmedian, seeds 42, 43: the method 'fedmedian' (fedmedian:FedMedian) cannot be")
    assert len(said.err.splitlines()) == 1
    found = json.loads(Path("here/compare.json").read_text())
    assert {run["method"] for run in found["runs"]} == {"fedavg", "local", "fedper"}
    assert [(one["method"], one["seed"]) for one in found["failed"]] == [("fedmedian", 42), ("fedmedian", 43)]


@pytest.mark.usefixtures("few")
def test_two_packages_with_one_name_are_both_refused(install, command):
    install(example(), "fedmedian:FedMedian")
    install(example(), "other:FedMedian", package="other")
    said = command("methods", "--json")
    assert said.code == 2
    assert "is declared more than once" in said.err
    assert [one["method"] for one in said.json["failed"]] == ["fedmedian"]
    assert len(said.json["methods"]) == 3


@pytest.mark.usefixtures("few")
def test_a_package_with_the_name_of_a_built_in_method_is_reported(install, command):
    install(example(), "fedmedian:FedMedian", name="fedavg")
    said = command("methods", "--json")
    assert (said.code, len(said.json["methods"])) == (2, 3)
    assert "the entry point 'fedavg' (fedmedian:FedMedian) has the name of a built-in method" in said.err
    said = command("compare", *TINY, "--methods", "all", "--json")
    assert (said.code, len(said.json["runs"])) == (2, 3)
    assert [(one["method"], one["seed"]) for one in said.json["failed"]] == [("fedavg", None)]
    assert command("compare", *TINY, "--methods", "fedavg", "--json").code == 0


@pytest.mark.parametrize("where", ["init", "download", "client_update", "aggregate", "personalize"])
def test_a_method_that_raises_ends_its_own_run_only(install, command, tmp_path, where):
    code = example() + f"\n    def {where}(self, *given):\n        raise OSError('no disk')\n"
    install(code, "fedmedian:FedMedian")
    line = len(code.splitlines())
    said = command("compare", *TINY, "--methods", "fedavg,fedmedian,local", "--out", "here")
    assert said.code == 2
    assert all(name in said.out for name in ("fedavg", "local", "Run folder: here"))
    assert "fedmedian" not in said.out
    error = f"OSError: no disk (method 'fedmedian', {tmp_path}/fedmedian.py:{line})"
    assert said.err == f"error: fedmedian, seed 42: {error}\n"
    found = json.loads(Path("here/compare.json").read_text())
    assert [run["method"] for run in found["runs"]] == ["fedavg", "local"]
    assert [row["method"] for row in found["table"]] == ["fedavg", "local"]
    assert found["failed"] == [{"method": "fedmedian", "seed": 42, "error": error}]
    for name, rounds in (("fedavg", 2), ("local", 2)):
        assert len(Path("here", f"{name}-seed42", "metrics.jsonl").read_text().splitlines()) == rounds
        assert Path("here", f"{name}-seed42", "result.json").exists()
    alone = command("compare", *TINY, "--methods", "fedmedian", "--json")
    assert (alone.code, alone.out, alone.err) == (2, "", f"error: {error}\n")
    alone = command("run", *TINY, "--method", "fedmedian", "--json")
    assert (alone.code, alone.out, alone.err) == (2, "", f"error: {error}\n")


def test_a_method_that_refuses_its_options_ends_its_own_run_only(install, command):
    code = example() + "\n    def __post_init__(self):\n        assert self.step > 0.5, 'too slow'\n"
    install(code, "fedmedian:FedMedian")
    said = command("compare", *TINY, "--methods", "fedavg,fedmedian", "--set", "step=0.1", "--json")
    assert said.code == 2
    assert [run["method"] for run in said.json["runs"]] == ["fedavg"]
    assert said.err.startswith("error: fedmedian, seed 42: AssertionError: too slow (method 'fedmedian', ")
    said = command("compare", *TINY, "--methods", "fedmedian,fedavg", "--set", "step=7", "--json")
    assert said.err == "error: fedmedian, seed 42: option 'step' of fedmedian must be between 0.0 and 1.0, not 7\n"
    assert [run["method"] for run in said.json["runs"]] == ["fedavg"]


def test_a_built_in_method_that_refuses_its_options_ends_its_own_run_only(command):
    said = command("compare", *TINY, "--methods", "fedobp,fedavg", "--q", "7", "--json")
    assert said.code == 2
    assert said.err == "error: fedobp, seed 42: option 'q' of fedobp must be between 0.0 and 1.0, not 7.0\n"
    assert [run["method"] for run in said.json["runs"]] == ["fedavg"]


def test_a_bug_in_a_built_in_method_shows_its_traceback_after_the_other_runs(command, monkeypatch):
    monkeypatch.setattr(METHODS["fedper"], "download", lambda *_: 1 / 0)
    said = command("compare", *TINY, "--methods", "fedper,fedavg", "--json")
    assert said.code == 2
    assert [run["method"] for run in said.json["runs"]] == ["fedavg"]
    assert said.err.startswith("Traceback")
    assert said.err.splitlines()[-1].startswith("error: fedper, seed 42: ZeroDivisionError: division by zero (")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--clients", "0"], "--clients must be at least 1"),
        (["--dataset", "digit"], "did you mean 'digits'"),
        (["--clients", "1700"], "no client has|use fewer --clients"),
    ],
)
def test_an_error_of_all_runs_is_one_sentence(command, flags, complaint):
    said = command("compare", *TINY, *flags, "--seeds", 2, "--json")
    assert (said.code, said.out) == (2, "")
    assert re.search(complaint, said.err)
    assert len(said.err.splitlines()) == 1
    assert "seed 42" not in said.err


def test_a_built_in_name_stays_with_its_method(install):
    install(example(), "fedmedian:FedMedian", name="fedavg")
    assert method_class("fedavg") is METHODS["fedavg"]


def test_a_near_miss_is_suggested(install):
    install(example(), "fedmedian:FedMedian")
    with pytest.raises(FedobpError, match="did you mean 'fedmedian'"):
        method_class("fedmedain")


def from_the_docs():
    """Return the class of the docs' example, as a notebook would define it."""
    names = {"__name__": "notebook"}
    exec(compile(example(), "notebook", "exec"), names)
    return names["FedMedian"]


@pytest.fixture
def forgotten():
    """Forget the classes that a test gives."""
    yield
    registry._GIVEN.clear()


@pytest.mark.usefixtures("forgotten")
def test_a_class_is_run_without_a_package(tmp_path):
    method, config = from_the_docs(), Config(clients=5, participation=1.0, rounds=2, epochs=1, model="mlp")
    federation = Federation(config)
    result = federation.run(method, step=0.5, out=tmp_path / "run")
    [same] = sweep([replace(config, method=method, options={"step": 0.5})])
    assert (result.config.method, result.accuracy) == ("fedmedian", same.accuracy)
    assert result.accuracy != federation.run("fedavg").accuracy
    assert federation.run("fedmedian", step=0.5).accuracy == result.accuracy  # from now on by its name
    [note] = result.notes
    assert "which no package declares: this folder cannot repeat it" in note
    assert note in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.usefixtures("forgotten")
def test_a_later_class_of_a_name_takes_its_place_but_in_settings_that_have_another():
    first, second = from_the_docs(), from_the_docs()
    config = Config(method=first)
    assert config.method == "fedmedian"
    assert method_class("fedmedian") is first
    Config(method=second)
    assert method_class("fedmedian") is second
    assert method_class(config.method) is method_class(deepcopy(replace(config, rounds=3)).method) is first
    assert "fedmedian" not in METHODS


@pytest.mark.usefixtures("forgotten")
def test_two_classes_of_one_name_train_side_by_side():
    """One keeps the global model as it was."""
    still, moving = (Config(rounds=1, clients=5, method=from_the_docs(), options={"step": s}) for s in (0.0, 1.0))
    alone = [Federation(config).run().accuracy.pooled for config in (still, moving)]
    assert alone[0] != alone[1]

    class Frozen(method_class(moving.method)):
        def aggregate(self, ctx, server, records, update):
            return server, records

    frozen = replace(moving, method=Frozen)
    assert [result.accuracy.pooled for result in sweep([frozen, moving])] == alone


@pytest.mark.usefixtures("forgotten")
def test_classes_that_are_no_methods_are_refused():
    with pytest.raises(FedobpError, match="is no subclass of `Method`"):
        Config(method=int)
    with pytest.raises(FedobpError, match="is no subclass of `Method`"):
        Federation(Config(rounds=1)).run(dict)
    taken = type("FedAvg", (from_the_docs(),), {"name": "fedavg"})
    with pytest.raises(FedobpError, match="'fedavg' is the name of a built-in method"):
        Config(method=taken)
    assert Config(method=METHODS["fedavg"]).method == "fedavg"


def test_a_reference_is_found_in_the_current_folder(ran, tmp_path):
    (tmp_path / "here.py").write_text("print('loading')\ndef net(shape, classes):\n    raise ValueError('too small')\n")
    code, out, err = ran("-m", "fedobp", "run", "--model", "here:net", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert "ValueError: too small (model 'here:net', " in err
    assert "here.py:3)" in err
