"""`--metrics`: what `fedobp run` and `fedobp compare` write and print, and what they refuse."""

import json
import re
from pathlib import Path

import pytest

from cli.cases import TINY, write_npz

ALL = ("loss", "f1", "auc", "ece", "confusion", "perplexity")


def test_json_result_and_log_have_the_metrics_that_were_asked_for(command):
    said = command("run", *TINY, "--metrics", "confusion,f1,loss", "--finetune-epochs", 1, "--out", "here", "--json")
    assert (said.code, said.err) == (0, "")
    found = said.json["metrics"]
    assert json.loads(Path("here/result.json").read_text())["metrics"] == found
    assert list(found) == ["served", "last", "finetuned"]
    for column in found.values():
        assert list(column) == ["loss", "f1", "confusion"]
        assert list(column["loss"]) == ["pooled", "client_mean", "client_std", "per_client"]
        assert list(column["confusion"]) == ["pooled", "per_client"]
        assert len(column["loss"]["per_client"]) == len(column["confusion"]["per_client"]) == 5
    lines = [json.loads(line) for line in Path("here/metrics.jsonl").read_text().splitlines()]
    assert [list(line["metrics"]) for line in lines] == [["served"], ["served", "last", "finetuned"]]
    last = lines[-1]["metrics"]["served"]
    assert last == {name: {key: found["served"][name][key] for key in last[name]} for name in ("loss", "f1")}
    assert list(last["loss"]) == ["pooled", "client_mean", "client_std"]


def test_a_run_with_metrics_is_repeated_to_the_same_bytes(command):
    command("run", *TINY, "--metrics", "auc,loss", "--out", "first")
    assert 'metrics = "loss,auc"' in Path("first/config.toml").read_text()
    assert command("run", "--config", "first/config.toml", "--out", "second").code == 0
    for name in ("config.toml", "metrics.jsonl"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()


def test_the_table_of_a_run_shows_metrics_and_the_confusion_matrix(command):
    said = command("run", *TINY, "--metrics", ",".join(ALL), "--out", "here")
    found = json.loads(Path("here/result.json").read_text())["metrics"]
    heads = r"model\s+loss\s+macro F1\s+AUC\s+ECE\s+perplexity"
    assert re.search(heads, said.out)
    for model, column in (("as served", "served"), ("own last local model", "last")):
        metrics = (found[column][name] for name in ("loss", "f1", "auc", "ece"))
        cells = (f"{metric['pooled']:.4f} ({metric['client_mean']:.4f})" for metric in metrics)
        assert re.search(rf"^ ?{model}\s+" + r"\s+".join(map(re.escape, cells)), said.out, re.MULTILINE)
    for label, counts in enumerate(found["served"]["confusion"]["pooled"]):
        assert re.search(rf"^ ?{label}\s+" + r"\s+".join(map(str, counts)) + r"\s*$", said.out, re.MULTILINE)


def test_without_metrics_there_is_no_such_table_and_no_such_key(command):
    assert "macro F1" not in command("run", *TINY, "--out", "here").out
    assert "metrics" not in json.loads(Path("here/result.json").read_text())
    assert "metrics" not in Path("here/metrics.jsonl").read_text()
    assert "metrics" not in Path("here/config.toml").read_text()


@pytest.mark.parametrize(("metrics", "shown"), [("confusion", "matrix of 21 classes is too wide"), ("f1", "macro F1")])
def test_a_wide_confusion_matrix_is_left_to_the_json(command, tmp_path, metrics, shown):
    (tmp_path / "data").mkdir()
    write_npz(tmp_path / "data" / "wide.npz", n=420, labels=21)
    wide = ("--dataset", "wide", "--partition", "iid", "--metrics", metrics)
    said = command("run", *TINY, *wide, "--out", "here")
    assert shown in said.out
    assert ("matrix" in said.out) == (metrics == "confusion")
    found = json.loads(Path("here/result.json").read_text())["metrics"]["served"]
    assert metrics != "confusion" or len(found["confusion"]["pooled"]) == 21


def test_a_comparison_has_pooled_metrics_in_its_table(command):
    methods = ("--methods", "fedavg,local", "--seeds", 2, "--metrics", "auc,loss,confusion")
    said = command("compare", *TINY, *methods, "--out", "here")
    assert re.search(r"method\s+pooled\s+client mean\s+loss\s+AUC\s+personal", said.out)
    found = json.loads(Path("here/compare.json").read_text())
    for row in found["table"]:
        runs = [run["metrics"]["served"] for run in found["runs"] if run["method"] == row["method"]]
        for name in ("loss", "auc"):
            assert row[name]["mean"] == pytest.approx(sum(run[name]["pooled"] for run in runs) / 2)
            assert row[name]["std"] > 0
            assert f"{row[name]['mean']:.4f} ± {row[name]['std']:.4f}" in said.out
        assert "confusion" not in row
    again = command("compare", "--config", "here/compare.toml", "--out", "again", "--json").json
    assert [run["metrics"] for run in again["runs"]] == [run["metrics"] for run in found["runs"]]


def test_an_auc_that_is_not_defined_is_null_and_a_dash(command, tmp_path):
    """Each of the two clients has one label; both together have two."""
    (tmp_path / "data").mkdir()
    write_npz(tmp_path / "data" / "one.npz", n=60, labels=2)
    one = ("--dataset", "one", "--clients", 2, "--partition", "classes", "--partition-set", "k=1")
    small = ("--rounds", 1, "--epochs", 1, "--model", "mlp", "--metrics", "auc")
    found = command("run", *one, *small, "--json").json["metrics"]["served"]["auc"]
    assert found["pooled"] is not None
    assert (found["client_mean"], found["client_std"], found["per_client"]) == (None, None, [None, None])
    assert re.search(r"as served\s+\d\.\d{4} \(-\)", command("run", *one, *small).out)


@pytest.mark.parametrize("command_name", ["run", "compare"])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("losss", "error: unknown metric 'losss': did you mean 'loss'? choose from loss, f1, auc, ece, confusion,"),
        ("loss,,auc", "error: unknown metric '': choose from"),
        ("", "error: --metrics must not be empty"),
    ],
)
def test_an_unknown_metric_is_refused_before_anything_is_written(command, command_name, given, sentence):
    said = command(command_name, *TINY, "--metrics", given, "--out", "here")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(sentence)
    assert said.err.count("\n") == 1
    assert not Path("here").exists()


def test_scikit_learn_is_imported_for_metrics_alone(ran, tmp_path):
    write_npz(tmp_path / "mine.npz", n=120)
    code = """
import sys
from fedobp import Config, Federation
config = {"dataset": "mine", "data_dir": sys.argv[1], "clients": 3, "partition": "iid", "batch_size": 8}
config |= {"rounds": 1, "epochs": 1, "model": "mlp"}
Federation(Config(**config)).run()
Federation(Config(**config, metrics="loss,ece,perplexity")).run()
assert "sklearn" not in sys.modules
Federation(Config(**config, metrics="auc,f1")).run()
assert "sklearn.metrics" in sys.modules
"""
    assert ran("-c", code, tmp_path) == (0, "", "")
