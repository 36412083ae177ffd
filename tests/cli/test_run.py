"""`fedobp run`: its JSON, its folder, and a configuration that is run again."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

import fedobp
from cli.cases import TINY, write_npz
from fedobp.storage import load_state_dict

ACCURACY = {"pooled", "client_mean", "client_std", "worst_decile", "balanced", "majority_class"}


@pytest.mark.essential
def test_run_json_has_exactly_the_documented_shape(command):
    said = command("run", *TINY, "--finetune-epochs", 1, "--out", "here", "--json")
    assert (said.code, said.err) == (0, "")
    assert said.out.count("\n") == 1
    run = said.json
    assert set(run) == {
        "method", "dataset", "seed", "rounds", "protocol", "accuracy", "last", "finetuned", "history",
        "personal", "bytes", "compute", "seconds", "parameters", "partition", "out", "provenance",
    }  # fmt: skip
    assert (run["method"], run["dataset"], run["seed"], run["rounds"]) == ("fedobp", "digits", 42, 2)
    assert set(run["accuracy"]) == set(run["last"]) == set(run["finetuned"]) == ACCURACY
    assert set(run["personal"]) == {"mean", "min", "max", "share"}
    assert set(run["compute"]) == {"visit", "use"}
    assert set(run["bytes"]) == {"down_per_round", "up_per_round", "down_total", "up_total"}
    assert [len(point) for point in run["history"]] == [3, 3]
    assert run["history"][-1] == [2, run["accuracy"]["pooled"], run["accuracy"]["client_mean"]]
    assert run["protocol"]["name"] == "default"
    assert run["out"] == "here"
    saved = json.loads(Path("here/result.json").read_text())
    assert {name: saved[name] for name in run} == run
    assert saved.keys() - run.keys() == {"format", "files", "sha256"}


def test_finetuned_is_null_without_finetune_epochs(command):
    assert command("run", *TINY, "--json").json["finetuned"] is None


def test_a_run_folder_holds_config_metrics_timings_models_and_result(command):
    assert command("run", *TINY, "--out", "here").code == 0
    assert {path.name for path in Path("here").iterdir()} == {
        "config.toml", "metrics.jsonl", "timings.jsonl", "clients.csv", "models", "result.json",
    }  # fmt: skip
    config = tomllib.loads(Path("here/config.toml").read_text())
    assert "out" not in config
    assert config["clients"] == 5
    lines = [json.loads(line) for line in Path("here/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    assert all(not {"seconds", "time"} & set(line) for line in lines)


def test_a_runs_own_config_runs_it_again_to_the_same_bytes(command):
    command("run", *TINY, "--q", 0.9, "--set", "score=product", "--out", "first")
    assert command("run", "--config", "first/config.toml", "--out", "second").code == 0
    for name in ("config.toml", "metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()


def test_flags_win_over_the_configuration_file(command):
    command("run", *TINY, "--q", 0.9, "--out", "first")
    command("run", "--config", "first/config.toml", "--seed", 7, "--method", "fedavg", "--out", "second")
    config = tomllib.loads(Path("second/config.toml").read_text())
    assert (config["seed"], config["clients"], config["method"], config["options"]) == (7, 5, "fedavg", {})


@pytest.mark.essential
def test_a_folder_that_holds_a_run_is_refused_and_left_alone(command):
    command("run", *TINY, "--out", "here")
    before = {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    said = command("run", *TINY, "--out", "here", "--json")
    assert (said.code, said.out) == (2, "")
    assert "already holds a run" in said.err
    assert {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()} == before


def test_the_default_folder_is_always_new_and_named_at_the_end(command):
    first, second = command("run", *TINY), command("run", *TINY)
    folders = [said.out.strip().splitlines()[-1].removeprefix("Run folder: ") for said in (first, second)]
    assert len(set(folders)) == 2
    assert all(Path(folder, "result.json").exists() for folder in folders)


@pytest.mark.parametrize(("choice", "files"), [("none", set()), ("global", {"global"}), ("all", {"global", "clients"})])
def test_save_models(command, choice, files):
    command("run", *TINY, "--save-models", choice, "--out", "here")
    assert {path.stem for path in Path("here").glob("models/*.safetensors")} == files


def test_a_saved_client_loads_into_an_ordinary_module_and_predicts_the_same(command):
    command("run", *TINY, "--method", "fedper", "--out", "here")
    result = fedobp.Federation(fedobp.Config(clients=5, rounds=2, epochs=1, model="mlp")).run("fedper")
    module = fedobp.Model("mlp", (1, 8, 8), 10).module()
    module.load_state_dict(load_state_dict("here", client=3))
    again = fedobp.Model("mlp", (1, 8, 8), 10).module()
    again.load_state_dict(result.state_dict(client=3))
    x = torch.linspace(-1, 1, 64 * 5).reshape(5, 1, 8, 8)
    assert torch.equal(module(x), again(x))


def test_a_refused_run_makes_no_folder(command):
    command("run", "--clients", 400)
    command("run", "--dataset", "mnist")
    assert not Path("runs").exists()


def test_a_run_that_cannot_start_leaves_no_folder(command):
    """Its samples suffice for a partition, and no client has one to test with."""
    write_npz("few.npz", n=12, shape=(3,), labels=2)
    command("data", "import", "few", "few.npz")
    for out in ((), ("--out", "here")):
        said = command("run", "--dataset", "few", "--clients", 6, "--partition", "iid", *out)
        assert said.code == 2
        assert "no client has a sample to evaluate on" in said.err
    assert not list(Path("runs").iterdir())
    assert not Path("here").exists()


def test_the_note_about_chosen_values_comes_before_an_error(command):
    write_npz("few.npz", n=3, shape=(3,), labels=2)
    command("data", "import", "few", "few.npz")
    note, error = command("run", "--dataset", "few").err.splitlines()
    assert note.startswith("note: 'few' has no published settings: --clients 1 ")
    assert error.startswith("error: 3 samples are fewer than 10")


def test_an_unwritable_folder_is_refused(command):
    Path("file").write_text("")
    said = command("run", *TINY, "--out", "file/run")
    assert said.code == 2
    assert "cannot write" in said.err


def test_a_batch_larger_than_all_data_is_all_data(command):
    sizes = (2**31 - 1, 2000)
    whole, same = (command("run", *TINY, "--batch-size", size, "--json").json for size in sizes)
    assert whole["history"] == same["history"]
