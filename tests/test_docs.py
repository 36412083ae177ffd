"""The documentation is true: its Python runs, its links lead somewhere, its flags exist."""

import re
from inspect import getsource
from pathlib import Path
from textwrap import dedent

import pytest
from paper.cases import row

from fedobp import FedobpError
from fedobp.algorithms import METHODS
from fedobp.csv_rows import write_rows
from fedobp.paper.claims import Evidence, read_evidence
from fedobp.paper.docs import draw, pages
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


def test_the_example_of_the_wire_format_prints_what_the_page_shows(capsys):
    page = (ROOT / "docs/wire-format.md").read_text()
    [block], [shown] = (re.findall(rf"```{kind}\n(.*?)```", page, flags=re.DOTALL) for kind in ("python", "text"))
    exec(compile(block, "docs/wire-format.md", "exec"), {})
    assert capsys.readouterr().out == shown


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
        "paper",
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
        "deploy init",
        "deploy keys",
        "deploy local",
    )
    texts = [command(*one.split(), "--help").out for one in words]
    existing = set(re.findall(r"--[a-z][a-z-]*", " ".join(texts))) | {"--version"}
    for page in PAGES:
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text()))
        # Of mypy, tests/fuzz.py and benchmarks:
        others = {"--strict", "--inputs", "--reader", "--processes", "--cold", "--minutes"}
        assert used - existing - others == set(), page.name


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


def test_pages_are_those_of_the_result_files():
    """`python -m fedobp.paper.docs` would change nothing."""
    evidence = read_evidence([ROOT / "results"])
    written = pages(evidence, ROOT / "docs")
    baselines = set(METHODS) - {"group-oracle", "fedobp-auto", "fedacg", "counterdrift"}
    assert len(written) == 3 + len(baselines)
    for page, text in written.items():
        assert text == page.read_text(), page.name


def test_smoke_results_never_enter_the_pages(tmp_path):
    (tmp_path / "docs" / "methods").mkdir(parents=True)
    for page in ("results.md", "claims.md"):
        (tmp_path / "docs" / page).write_text("<!-- measured claims -->\n<!-- end of measured -->\n")
    write_rows(tmp_path / "results.csv", [row("fedobp", rounds=10, protocol="default", dataset="digits")])
    written = pages(read_evidence([tmp_path]), tmp_path / "docs")
    assert set(written) == {tmp_path / "docs" / "results.md", tmp_path / "docs" / "claims.md"}
    assert "digits" not in written[tmp_path / "docs" / "results.md"]


def test_curves_are_drawn_from_the_result_files(tmp_path):
    (tmp_path / "methods" / "curves").mkdir(parents=True)
    evidence = read_evidence([ROOT / "results"])
    evidence.results = [one for one in evidence.results if one["method"] in ("fedobp", "apfl")]
    draw(evidence, tmp_path)
    curves = {path.name: path.read_text() for path in (tmp_path / "methods" / "curves").iterdir()}
    assert set(curves) == {"all-cifar10.svg", "apfl.svg", "fedobp.svg"}
    assert all(name in curves["apfl.svg"] for name in ("apfl, as published", "fedobp", "accuracy, per cent"))


def test_results_without_a_place_on_the_page_are_an_error(tmp_path):
    (tmp_path / "results.md").write_text("# Results\n")
    with pytest.raises(FedobpError, match=r"add the lines <!-- measured fmnist 0\.5 -->"):
        pages(Evidence([row("local", dataset="fmnist", alpha=0.5)]), tmp_path)
