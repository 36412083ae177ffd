"""The documentation is true: its Python runs, its links lead somewhere, its flags exist."""

import re
from argparse import Namespace
from importlib.util import module_from_spec, spec_from_file_location
from inspect import getsource
from pathlib import Path
from textwrap import dedent

import pytest

from fedobp.algorithms import METHODS
from fedobp.run import Run

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_python_examples_of_the_readme_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[0]) > 50


OWN = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/your-own/*.md"))


@pytest.mark.parametrize("page", ["docs/python.md", "docs/callbacks.md", "docs/sweeps.md", *OWN])
def test_python_examples_of_a_page_run_one_after_the_other(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert blocks
    assert capsys.readouterr().out


def test_the_architecture_page_shows_the_round_as_it_is():
    [shown] = re.findall(r"```python\n(def round.*?)```", (ROOT / "docs/architecture.md").read_text(), flags=re.DOTALL)
    head, docstring, body = re.split(r'(    """.*?"""\n)', dedent(getsource(Run.round)), maxsplit=1)
    assert docstring
    assert shown == head + body


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.essential
def test_every_flag_in_the_docs_exists(command):
    words = (
        "run",
        "compare",
        "sweep",
        "collect",
        "report",
        "plot",
        "partition",
        "bench",
        "doctor",
        "tune",
        "data import",
        "data fetch",
    )
    texts = [command(*one.split(), "--help").out for one in words]
    existing = set(re.findall(r"--[a-z][a-z-]*", " ".join(texts))) | {"--version"}
    for page in PAGES:
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text()))
        assert used - existing - {"--strict"} == set(), page.name


def test_every_method_has_a_page_that_names_its_options():
    index = (ROOT / "docs/methods/README.md").read_text()
    for name, method in METHODS.items():
        page = ROOT / ("docs/fedobp.md" if name == "fedobp" else f"docs/methods/{name}.md")
        assert f"[{name}](" in index
        modes = "both" if "mode" in [option.name for option in method.options()] else ""
        assert f"{method.summary} | {modes} |" in index
        assert name == "fedobp" or f"fedobp run --method {name}" in page.read_text()
        for option in method.options():
            assert re.search(rf"[`.0-9 ]{option.name}\b", page.read_text()), (name, option.name)


@pytest.mark.parametrize(("dataset", "alpha"), [("cifar10", 0.1), ("mnist", 0.1), ("cifar10", 0.5)])
def test_measured_tables_are_those_of_the_result_files(dataset, alpha, capsys):
    """What benchmarks/methods.py would write is there: in results.md, and for CIFAR10 on the methods' pages."""
    spec = spec_from_file_location("methods", ROOT / "benchmarks" / "methods.py")
    methods = module_from_spec(spec)
    spec.loader.exec_module(methods)
    methods.table(Namespace(dataset=dataset, alpha=alpha, out=methods.RESULTS))
    lines, written = capsys.readouterr().out.splitlines(), (ROOT / "docs" / "results.md").read_text().splitlines()
    assert len(lines) > 8
    assert set(lines) - set(written) == set()
    for name, runs in methods.found(methods.RESULTS, dataset).items() if (dataset, alpha) == ("cifar10", 0.1) else []:
        page = ROOT / "docs" / ("fedobp.md" if name == "fedobp" else f"methods/{runs[0]['method']}.md")
        assert f"| {' | '.join(methods.row(name, runs))} |" in page.read_text().splitlines(), page.name
