"""The documentation is true: its Python runs, its links lead somewhere, its flags exist."""

import re
from pathlib import Path

import pytest

from fedobp.algorithms import METHODS
from fedobp.models import NETS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", ["README.md", "docs/models.md"])
def test_python_examples_run(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks
    known = set(NETS)
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    assert float(capsys.readouterr().out.split()[0]) > 50
    for name in set(NETS) - known:
        del NETS[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_flag_in_the_docs_exists(command):
    commands = [["run"], ["compare"], ["partition"], ["bench"], ["data", "import"], ["data", "fetch"]]
    texts = [command(*words, "--help").out for words in commands]
    known = set(re.findall(r"--[a-z][a-z-]*", " ".join(texts))) | {"--version"}
    for page in PAGES:
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text()))
        assert used - known - {"--strict"} == set(), page.name


def test_every_method_has_a_page_that_names_its_options():
    index = (ROOT / "docs/methods/README.md").read_text()
    for name, method in METHODS.items():
        page = ROOT / ("docs/fedobp.md" if name == "fedobp" else f"docs/methods/{name}.md")
        assert f"[{name}](" in index
        assert method.summary in index
        assert name == "fedobp" or f"fedobp run --method {name}" in page.read_text()
        for option in method.options():
            assert re.search(rf"[`.0-9 ]{option.name}\b", page.read_text()), (name, option.name)
