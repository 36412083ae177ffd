"""The examples run: the notebook cell by cell, and the scripts."""

import runpy
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_notebook_runs_and_shows_what_it_showed(tmp_path):
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", 4)
    kept = [[set(output.get("data", {})) for output in cell.get("outputs", [])] for cell in notebook.cells]
    assert sum(map(len, kept)) > 6
    for cell in notebook.cells:
        cell.pop("outputs", None) if cell.cell_type == "markdown" else cell.update(outputs=[])
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [[set(output.get("data", {})) for output in cell.get("outputs", [])] for cell in notebook.cells]
    assert shown == kept
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_next_characters_of_the_standard_library(monkeypatch, capsys):
    small = ["--clients", "4", "--windows", "12", "--length", "16", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["next_character.py", *small])
    runpy.run_path(str(EXAMPLES / "next_character.py"), run_name="__main__")
    head, *lines = capsys.readouterr().out.splitlines()
    assert "standard-library: 48 samples of shape 16, 97 labels, 4 clients" in head
    assert [line.split()[0] for line in lines] == ["fedavg", "fedavg-last", "fedper", "fedobp"]
    for line in lines:
        assert 1 < float(line.partition("perplexity ")[2].split(",")[0]) < 98 * 2


def test_windows_do_not_overlap():
    example = runpy.run_path(str(EXAMPLES / "next_character.py"))
    found = example["windows"]("abc\x00def", 2, 9)
    letters = [example["CHARACTERS"].index(one) + 1 for one in "abcdef"]
    assert found.tolist() == [letters[:3], [0, *letters[3:5]]]
    assert example["windows"]("ab", 2, 9).shape == (0, 3)
