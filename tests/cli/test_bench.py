"""`fedobp bench`: its table, its JSON and its errors."""

import numpy as np
import pytest

from fedobp.bench import Bench, Speed

ARGUMENTS = ("bench", "--dataset", "digits", "--model", "mlp", "--clients", 5, "--seconds", 1)


def test_the_table_is_read_without_a_terminal(command):
    said = command(*ARGUMENTS, "--participation", 1, "--alpha", 0.5, "--batch-size", 16, "--precision", "fp64")
    assert (said.code, said.err) == (0, "")
    for word in ("serial", "lanes", "full", "FLOP/s", "of peak", "60 rounds", "Dirichlet(0.5)", "fp64", "5 a round"):
        assert word in said.out
    assert "Random images" not in said.out
    assert "fedobp bench --" in command("bench", "--help").out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seconds", "0"], "--seconds must be between 1 and 3600"),
        (["--seconds", "soon"], "not a valid float"),
        (["--runs", "0"], "--runs must be between"),
        (["--dataset", "mnst"], "did you mean 'mnist'"),
        (["--model", "mpl"], "did you mean 'mlp'"),
        (["--clients", "0"], "--clients must be at least 1"),
        (["--clients", "50000"], "use fewer --clients"),
        (["--participation", "2"], "--participation must be at most 1"),
        (["--batch-size", "1"], "--batch-size must be at least 2"),
        (["--precision", "tf32", "--device", "cpu"], "use --precision fp32"),
        (["--dataset", "digits", "--model", "cnn"], "at least 16x16"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_code_2(command, arguments, sentence):
    said = command("bench", *arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert sentence in said.err


def test_json_has_exactly_the_documented_keys_and_needs_nothing_but_torch_numpy_typer_and_rich(ran, tmp_path):
    code = """
import sys
sys.modules.update(dict.fromkeys(("sklearn", "scipy", "pooch", "matplotlib", "safetensors")))  # as if not there
from fedobp.cli import main
sys.argv = "fedobp bench --dataset mnist --model mlp --data-dir none --seconds 1 --epochs 1 --runs 2 --json".split()
main()
"""
    said = ran("-c", code, cwd=tmp_path)
    assert (said.code, said.err, said.out.count("\n")) == (0, "", 1)
    found = said.json
    assert set(found) == set(Bench.__dataclass_fields__)
    assert [set(row) for row in found["engines"]] == [set(Speed.__dataclass_fields__)] * 2
    assert (found["runs"], found["epochs"], found["batch_size"]) == (2, 1, 32)
    assert (found["dataset"], found["random_data"], found["samples"]) == ("mnist", True, 70_000)


def test_the_note_about_chosen_values_comes_before_the_work(command, tmp_path):
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "few.npz", x=np.zeros((3, 3), np.float32), y=np.arange(3) % 2)
    note, error = command("bench", "--dataset", "few").err.splitlines()
    assert note == "note: 'few' has no published settings: --clients 1 --alpha 0.1 was chosen by its size"
    assert error.startswith("error: 3 samples are fewer than 10 for each of 1 clients")
