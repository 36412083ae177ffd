"""The examples run: the notebook cell by cell, and the scripts. Sweep files can be planned."""

import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from resolved import resolved

from fedobp import Config
from fedobp.resolution import check_names
from fedobp.sweep_file import read_sweep_file

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


@pytest.mark.parametrize(
    ("name", "cohorts", "visits"), [("participation", (1, 2, 5, 10, 20), 40), ("participation-digits", (1, 2, 4, 8), 8)]
)
def test_sweeps_over_participation_differ_in_it_and_not_in_the_visits(name, cohorts, visits):
    runs = read_sweep_file(EXAMPLES / "beyond" / f"{name}.toml").runs
    assert len(runs) == 6 * 3 * len(cohorts)
    found = set()
    for run, settings in runs.items():
        config = Config(**settings)
        assert config.cohort_size * config.rounds == visits * config.trainers
        assert config.rounds % config.eval_every == 0
        assert run == f"{config.method}-participation{config.participation}-seed{config.seed}"
        found.add((config.method, config.cohort_size))
    methods = ("fedavg", "fedavg-last", "fedavg-ft", "fedper", "fedobp", "fedobp-auto")
    assert found == {(method, size) for method in methods for size in cohorts}


def test_the_sweep_over_participation_of_digits_can_be_planned():
    """Every run has a federation; those on CIFAR10 would need the dataset."""
    for settings in read_sweep_file(EXAMPLES / "beyond" / "participation-digits.toml").runs.values():
        config = resolved(**settings)
        assert (config.trainers, config.save_models) == (20, "none")


@pytest.mark.parametrize("path", sorted((EXAMPLES / "beyond").glob("*.toml")), ids=lambda path: path.stem)
def test_sweep_files_name_settings_that_exist(path):
    """Values are checked when a `Config` is made, options of methods and partitions when its names are."""
    runs = read_sweep_file(path).runs
    for settings in runs.values():
        check_names(Config(**settings))
    assert f"fedobp sweep examples/beyond/{path.name} --out runs/{path.stem}" in path.read_text()
    if not path.stem.startswith("constants"):
        assert any(Config(**settings).method == "fedobp-auto" for settings in runs.values())
