"""Runs with `--partition-file`: they equal runs with the same settings, and what contradicts the file is refused."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from fedobp.files import read_checked_json, write_checked_json

RUN = ("run", "--rounds", 2, "--epochs", 1, "--model", "mlp")


def saved(command, *more):
    """Save a partition as `six`, and return its hash."""
    said = command("partition", "--clients", 6, "--alpha", 0.5, "--partition-seed", 3, *more, "--save", "six", "--json")
    assert (said.code, said.err) == (0, "")
    return said.json["hash"]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--partition", "dirichlet-equal", "--holdout-clients", 2, "--val-ratio", 0.2),
        ("--partition", "classes", "--partition-set", "k=3"),
        ("--partition", "feature"),
        ("--partition", "feature", "--partition-set", "change=blur", "--partition-set", "groups=3"),
        ("--partition", "concept", "--partition-set", "labels=dirichlet"),
    ],
)
def test_a_run_with_the_file_is_the_run_with_the_arguments(command, more):
    found = saved(command, *more)
    asked = ("--clients", 6, "--alpha", 0.5, "--partition-seed", 3, *more)
    assert command(*RUN, *asked, "--out", "asked").code == 0
    assert command(*RUN, "--partition-file", "six", "--out", "given").code == 0
    for name in ("metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
        assert Path("asked", name).read_bytes() == Path("given", name).read_bytes()
    asked, given = (tomllib.loads(Path(name, "config.toml").read_text()) for name in ("asked", "given"))
    assert given.pop("partition_file") == str(Path("six").absolute())
    assert asked == given
    for name in ("asked", "given"):
        assert json.loads(Path(name, "result.json").read_text())["partition"] == found
        assert f"# Partition {found}" in Path(name, "config.toml").read_text().splitlines()
    assert command("run", "--config", "given/config.toml", "--out", "again").code == 0
    assert Path("again/metrics.jsonl").read_bytes() == Path("given/metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--clients", 7), r"--clients 7 is not what the partition .*six was made with \(6\): leave it out"),
        (("--alpha", 0.2), r"--alpha 0.2 is not .* \(0.5\)"),
        (("--partition", "iid"), r"--partition iid is not .* \(dirichlet\)"),
        (("--partition-seed", 4), r"--partition-seed 4 is not .* \(3\)"),
        (("--holdout-clients", 1), r"--holdout-clients 1 is not .* \(0\)"),
        (("--val-ratio", 0.5), r"--val-ratio 0.5 is not .* \(0.0\)"),
        (("--partition-set", "k=2"), r"--partition-set k=2 is not .* \(no options\)"),
        (("--dataset", "wards"), "is a partition of 'digits' .* and 'wards' .* has other labels"),
    ],
)
def test_what_contradicts_the_file_is_refused(command, wards, more, sentence):
    saved(command)
    said = command(*RUN, "--partition-file", "six", *more)
    assert (said.code, said.out) == (2, "")
    assert re.search(sentence, said.err)


@pytest.mark.parametrize(
    "default", [("--partition", "dirichlet"), ("--alpha", "0.1"), ("--holdout-clients", "0"), ("--val-ratio", "0.0")]
)
def test_a_default_contradicts_the_file_too_if_it_is_asked_for(command, default):
    saved(command, "--partition", "dirichlet-equal", "--holdout-clients", 2, "--val-ratio", 0.2)
    said = command(*RUN, "--partition-file", "six", *default)
    assert said.code == 2
    assert f"{' '.join(default)} is not what the partition" in said.err


def test_what_the_file_says_too_is_no_contradiction(command):
    saved(command)
    assert command(*RUN, "--partition-file", "six.npz", "--clients", 6, "--alpha", 0.5, "--seed", 9).code == 0


def test_seeds_of_a_comparison_share_the_files_partition(command):
    found = saved(command)
    said = command("compare", *RUN[1:], "--methods", "fedavg", "--seeds", 2, "--partition-file", "six", "--json")
    assert [run["partition"] for run in said.json["runs"]] == [found, found]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"clients": "six"}, "--clients must be a whole number, not 'six'"),
        ({"partition_options": {"k": 2}}, "partition 'dirichlet' has no options, so 'k' cannot be set"),
        ({"alpha": None}, "does not say its alpha"),
        ({"partition_options": 3}, "does not say its partition_options"),
        ({"clients": 7}, "does not have the content that its json file names"),
    ],
)
def test_settings_of_a_file_are_checked_like_any_others(command, change, sentence):
    saved(command)
    about = read_checked_json(Path("six.json"))
    about["settings"] = {k: v for k, v in {**about["settings"], **change}.items() if v is not None}
    write_checked_json(Path("six.json"), about)
    said = command(*RUN, "--partition-file", "six")
    assert said.code == 2
    assert sentence in said.err


def test_a_file_that_is_not_there_is_refused(command):
    said = command(*RUN, "--partition-file", "nothing")
    assert said.code == 2
    assert "cannot read the partition" in said.err


def test_another_partition_than_the_files_starts_with_its_own_options(command):
    assert command(*RUN, "--partition", "classes", "--partition-set", "k=5", "--out", "five").code == 0
    again = ("run", "--config", "five/config.toml")
    assert command(*again, "--out", "kept").code == 0
    assert command(*again, "--partition", "shards", "--out", "shards").code == 0
    kept, shards = (tomllib.loads(Path(name, "config.toml").read_text()) for name in ("kept", "shards"))
    assert kept["partition_options"] == {"k": 5}
    assert shards["partition_options"] == {"per_client": 2}
