"""Results as DataFrames: rows, columns and values."""

import sys

import pandas as pd
import pytest
from handmade import made

from fedobp import Config, Failure, FedobpError, Results
from fedobp.report.frames import flat, numbers_of

FAILED = Failure("local", 3, "it failed", Config(method="local", seed=3, lr=0.5), ValueError("why"))


def test_nested_values_become_flat():
    nested = {"a": 1, "b": {"c": 2.5, "d": {"e": "text", "f": None}}, "list": [1], "tuple": (1,), "none": None}
    assert flat(nested) == {"a": 1, "b.c": 2.5, "b.d.e": "text"}
    assert numbers_of({"round": 3, "loss": None, **nested}, "/") == {"a": 1, "b/c": 2.5}


@pytest.mark.essential
def test_a_row_a_run_with_what_it_is_its_numbers_and_its_settings(tmp_path):
    results = Results([made(out=tmp_path), made("fedprox", seed=2, pooled=90.0, options={"mu": 0.5}, lr=0.2)])
    frame = results.to_pandas()
    assert list(frame.columns[:5]) == ["method", "dataset", "seed", "options.mu", "accuracy.pooled"]
    assert frame["method"].tolist() == ["fedavg", "fedprox"]
    assert frame["seed"].tolist() == [1, 2]
    assert frame["lr"].tolist() == [0.01, 0.2]
    assert frame["options.mu"].tolist()[1] == 0.5
    assert pd.isna(frame["options.mu"][0])
    assert frame["accuracy.pooled"].tolist() == [80.0, 90.0]
    assert frame["last.client_mean"].tolist() == [84.0, 94.0]
    assert frame["personal.mean"].tolist() == [1.0, 1.0]
    assert frame["bytes.up_total"].tolist() == [2000, 2000]
    assert frame["seconds"].tolist() == [1.5, 1.5]
    assert frame["partition_hash"].tolist() == ["a hash"] * 2
    assert frame["out"].tolist()[0] == str(tmp_path)
    assert "finetuned.pooled" not in frame
    assert "error" not in frame


def test_a_failure_has_its_error_and_settings_and_no_numbers():
    frame = Results([made(), FAILED, Failure("plugin", None, "cannot be loaded")]).to_pandas()
    assert list(frame.columns[:4]) == ["method", "dataset", "seed", "error"]
    assert frame["method"].tolist() == ["fedavg", "local", "plugin"]
    assert frame["error"].tolist()[1:] == ["it failed", "cannot be loaded"]
    assert frame["lr"].tolist()[:2] == [0.01, 0.5]
    assert frame["accuracy.pooled"].isna().tolist() == [False, True, True]
    assert frame["error"].isna().tolist() == [True, False, False]


def test_a_row_an_evaluation():
    frame = Results([made(), FAILED, made("local", seed=2, pooled=90.0)]).to_pandas(history=True)
    assert list(frame.columns) == ["run", "method", "dataset", "seed", "round", "pooled", "client_mean"]
    assert frame.values.tolist() == [
        [0, "fedavg", "digits", 1, 2, 40.0, 39.0],
        [0, "fedavg", "digits", 1, 4, 80.0, 79.0],
        [2, "local", "digits", 2, 2, 45.0, 44.0],
        [2, "local", "digits", 2, 4, 90.0, 89.0],
    ]


def test_no_results_are_an_empty_frame():
    assert len(Results().to_pandas()) == len(Results().to_pandas(history=True)) == 0


def test_without_pandas_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FedobpError, match=r"a DataFrame needs pandas: pip install 'fedobp\[pandas\]'"):
        made().to_pandas()
