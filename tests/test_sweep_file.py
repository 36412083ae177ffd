"""Sweep files: grids, single runs, launches, and what is refused."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resolved import resolved

from fedobp import Config, FedobpError
from fedobp.sweep_file import MOST_RUNS, read_sweep_file, to_toml


def read(tmp_path: Path, text: str):
    (tmp_path / "grid.toml").write_text(text)
    return read_sweep_file(tmp_path / "grid.toml")


GRID = """
[settings]
dataset = "digits"
rounds = 5
seed = [1, 2]
alpha = [0.1, 0.5]

[methods.fedobp]
q = [0.9, 0.99]
score = "squared"

[methods.fedavg]

[[runs]]
name = "longer"
method = "local"
rounds = 9
seed = 7
alpha = 1.0
"""


def test_lists_stand_for_every_combination(tmp_path):
    text = GRID.replace('\n[[runs]]\nname = "longer"\nmethod = "local"\nrounds = 9\nseed = 7\nalpha = 1.0\n', "")
    runs = read(tmp_path, text).runs
    assert list(runs)[:3] == ["fedobp-q0.9-alpha0.1-seed1", "fedobp-q0.99-alpha0.1-seed1", "fedavg-alpha0.1-seed1"]
    assert len(runs) == 2 * 2 * 3
    assert runs["fedobp-q0.99-alpha0.5-seed2"] == {
        "dataset": "digits", "rounds": 5, "seed": 2, "alpha": 0.5, "method": "fedobp",
        "options": {"q": 0.99, "score": "squared"},
    }  # fmt: skip
    assert runs["fedavg-alpha0.5-seed1"]["method"] == "fedavg"


def test_a_single_run_takes_the_common_settings_and_its_own(tmp_path):
    text = GRID.replace("seed = [1, 2]", "").replace("alpha = [0.1, 0.5]", "")
    found = read(tmp_path, text)
    assert list(found.runs) == ["fedobp-q0.9-seed42", "fedobp-q0.99-seed42", "fedavg-seed42", "longer"]
    assert found.runs["longer"] == {"dataset": "digits", "rounds": 9, "method": "local", "seed": 7, "alpha": 1.0}
    assert (found.launches, found.memory) == (None, None)


def test_a_single_run_replaces_lists_of_the_common_settings(tmp_path):
    runs = read(tmp_path, GRID).runs
    assert [name for name, run in runs.items() if run["method"] == "local"] == ["longer"]
    assert runs["longer"] == {"dataset": "digits", "rounds": 9, "method": "local", "seed": 7, "alpha": 1.0}
    assert len(runs) == 2 * 2 * 3 + 1
    runs = read(tmp_path, GRID.replace('name = "longer"', "").replace("seed = 7\n", "")).runs
    assert [name for name, run in runs.items() if run["method"] == "local"] == ["local-seed1", "local-seed2"]
    text = "[settings]\noptions.q = [0.1, 0.2]\n[methods.fedobp]\n[methods.fedselect]\nq = [0.3, 0.4]\n"
    assert list(read(tmp_path, text).runs) == [
        "fedobp-q0.1-seed42",
        "fedselect-q0.3-seed42",
        "fedselect-q0.4-seed42",
        "fedobp-q0.2-seed42",
    ]


def test_the_file_in_the_docs_is_one(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "sweeps.md").read_text()
    [text] = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    runs = read(tmp_path, text).runs
    assert {"fedobp-q0.99-alpha0.5-seed43", "fedavg-alpha0.1-seed42", "long"} < set(runs)
    assert len(runs) == 3 * 2 * 4 + 1


def test_options_of_one_name_in_two_tables_are_both_in_the_name(tmp_path):
    text = "[settings]\npartition_options.k = [2, 3]\nmodel_options.k = [4, 5]\n"
    assert list(read(tmp_path, text).runs)[1] == "fedobp-k2-k5-seed42"


def test_methods_and_options_of_other_tables_may_be_lists(tmp_path):
    text = '[settings]\nmethod = ["local", "fedavg"]\npartition = "classes"\npartition_options.k = [2, 3]\n'
    runs = read(tmp_path, text).runs
    assert list(runs) == ["local-k2-seed42", "local-k3-seed42", "fedavg-k2-seed42", "fedavg-k3-seed42"]
    assert [run["partition_options"] for run in runs.values()] == [{"k": 2}, {"k": 3}, {"k": 2}, {"k": 3}]


def test_a_name_that_is_no_folder_is_made_one(tmp_path):
    runs = read(tmp_path, '[settings]\nmodel = ["nets:wide", "mlp"]\n').runs
    assert list(runs) == ["fedobp-modelnets_wide-seed42", "fedobp-modelmlp-seed42"]


def test_an_empty_file_is_one_default_run(tmp_path):
    assert read(tmp_path, "").runs == {"fedobp-seed42": {}}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("version = 1", "is of an older version of fedobp"),
        ("version = true", "is of an older version of fedobp"),
        ("version = 3", "is of version 3, and fedobp .* reads version 2: use a newer fedobp"),
        ("setting = 3", "unknown key in .* 'setting': did you mean 'settings'"),
        ("settings = 3", r"must be a table: write \[settings\]"),
        ("[settings]\nclient = 5", "unknown setting in .* 'client': did you mean 'clients'"),
        ("[settings]\noptions = 5", "must be a table of options"),
        ("[settings]\nname = 'a'", "unknown setting in .* 'name'"),
        ("methods = 3", "a table of options for each method"),
        ("[methods]\nlocal = 3", "a table of options for each method"),
        ("[methods.locale]", "unknown method in .* 'locale': did you mean 'local'"),
        ("[settings]\nmethod = 'local'\n[methods.fedavg]", "names methods in .settings. and in .methods."),
        ("runs = 3", r"must be tables of settings: write \[\[runs\]\]"),
        ("[[runs]]\nclient = 5", "unknown setting in .* 'client'"),
        ("[[runs]]\nseed = 1\n[[runs]]\nseed = 1", "two runs that are called fedobp-seed1: give each"),
        ("[[runs]]\nname = '../up'", r"'\.\./up' in .* is no name of a run"),
        ("[[runs]]\nname = '.hidden'", "is no name of a run"),
        ("[[runs]]\nname = 3", "is no name of a run"),
        (f"[[runs]]\nname = '{'a' * 151}'", "is no name of a run"),
        ("[[runs]]\nname = 'results.csv'", "is no name of a run: .*, and no ending of a file"),
        ("[settings]\nseed = []", "`seed` in .* lists no value: give it one, or leave it out"),
        ("[methods.fedobp]\nq = []", "`q` in .* lists no value"),
        ("[settings]\nseed = [1, 2]\n[[runs]]\nname = 'a'", "two runs that are called a: .* and single values"),
        ("memory = 'much'", "`memory` in .* must be a number of GiB"),
        ("memory = nan", "`memory` in .* must be a number of GiB"),
        ("memory = inf", "`memory` in .* must be a number of GiB"),
        ("launches = 3", "must be a list of launches, each a list of runs"),
        ("launches = [[]]", "must be a list of launches, each a list of runs"),
        ("launches = [['none']]", "names 'none', which is none of its runs"),
        ("launches = [[3]]", "names '3', which is none of its runs"),
        ("launches = [['fedobp-seed42', 'fedobp-seed42']]", "names fedobp-seed42 twice"),
        ("launches = []", "no launch in .* has the run fedobp-seed42"),
        (f"[settings]\nseed = {list(range(MOST_RUNS + 1))}", "has more than 10,000 runs"),
        ("[settings]\nseed = [1, 1]", "two runs that are called fedobp-seed1"),
        ("[settings", "is not valid TOML"),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path, text, complaint):
    with pytest.raises(FedobpError, match=complaint) as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)


def test_what_is_written_is_read_back(tmp_path):
    common = {"clients": 5, "rounds": 2, "partition": "classes", "partition_options": {"k": 3}, "partition_seed": 9}
    configs = {f"{m}{s}": resolved(**common, method=m, seed=s) for s in (3, 1) for m in ("fedobp", "apfl")}
    launches = [["fedobp3", "fedobp1"], ["apfl3"], ["apfl1"]]
    text = to_toml(configs, launches, 1.5)
    found = read(tmp_path, text)
    assert {name: Config(**run) for name, run in found.runs.items()} == configs
    assert (found.launches, found.memory) == (launches, 1.5)
    shared = tomllib.loads(text)["settings"]
    assert shared["partition_options"] == {"k": 3}
    assert "method" not in shared


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9._+-]{0,20}", fullmatch=True),
        st.fixed_dictionaries({"seed": st.integers(0, 2**32 - 1), "lr": st.floats(1e-300, 1e30)}),
        min_size=1,
        max_size=5,
    )
)
def test_any_settings_survive(tmp_path_factory, runs):
    """Also floats with many digits, and names with dots."""
    configs = {name: Config(method="fedobp", options={"q": 0.1 + 0.2}, **one) for name, one in runs.items()}
    found = read(tmp_path_factory.mktemp("file"), to_toml(configs, [list(configs)], 1.0))
    assert {name: Config(**run) for name, run in found.runs.items()} == configs


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FedobpError, match=re.compile("cannot read .*: give a sweep file")):
        read_sweep_file(tmp_path / "none.toml")


def test_combinations_that_make_no_run_are_bounded_too(tmp_path):
    """A run with values of its own replaces the lists, so that these combinations alone would take hours."""
    lists = [f"{name} = {list(range(1000))}" for name in ("seed", "clients", "rounds")]
    text = "\n".join(["[settings]", *lists, "[[runs]]", "seed = 1", "clients = 2", "rounds = 3"])
    with pytest.raises(FedobpError, match="has more than 1,000,000 combinations: use several sweeps"):
        read(tmp_path, text)
