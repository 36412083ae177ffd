"""Finished runs, read from their folders."""

import json
import math
import shutil
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from saved import accuracy, clients_of, write_run

from fedobp import Config, Federation, FedobpError, load_results
from fedobp.csv_rows import write_rows
from fedobp.files import read_checked_json
from fedobp.report.tidy import read_tidy, tidy_rows
from fedobp.saved_runs import find_runs, read_run
from fedobp.storage import write_result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    federation = Federation(Config(rounds=2, clients=5, participation=0.4, eval_every=1, finetune_epochs=1, alpha=1.0))
    return federation, federation.run(out=folder)


def test_a_run_comes_back(finished):
    _, result = finished
    saved = read_run(result.out)
    assert saved.name == "one"
    assert saved.config == result.config
    assert saved.history == result.history
    assert saved.result["accuracy"] == result.accuracy.to_json()
    assert [line["round"] for line in saved.metrics()] == [1, 2] == [line["round"] for line in saved.timings()]
    assert saved.clients() == list(result.clients)


def test_results_come_back_from_their_folders(finished):
    """Tables, curves and DataFrames are those of the result that the run returned; so are models."""
    _, result = finished
    [again] = load_results(result.out)
    for spec in fields(result):
        if spec.name not in ("models", "labels"):  # labels are written where a confusion matrix needs them
            assert getattr(again, spec.name) == getattr(result, spec.name), spec.name
    assert again.to_json() == result.to_json()
    for client in (None, 3):
        mine, read = result.state_dict(client), again.state_dict(client)
        assert all(torch.equal(mine[name], read[name]) for name in mine)


def test_metrics_and_new_clients_come_back(tmp_path: Path):
    config = Config(
        rounds=1, clients=6, alpha=1.0, model="mlp", metrics="loss,confusion", val_ratio=0.2, holdout_clients=2
    )
    result = Federation(config).run(out=tmp_path / "run")
    [again] = load_results(tmp_path / "run")
    assert again.to_json() == result.to_json()
    assert again.metrics == result.metrics
    assert again.launch == result.launch


def test_results_of_older_versions_have_fewer_columns(tmp_path: Path):
    """Neither a second visit nor clients without labels, and no visits in clients.csv."""
    folder = write_run(tmp_path, holdout_clients=1, clients=clients_of(3, lambda i: 60.0 + i))
    values = read_checked_json(folder / "result.json")
    values["new_clients"] = {name: accuracy(50.0) for name in ("served", "visited", "last")}
    values |= {"parameters": 10, "metrics": {}}
    write_result(folder, values)
    [again] = load_results(folder)
    assert (again.new_clients.served.pooled, again.new_clients.visited_twice) == (50.0, None)
    assert again.to_json()["new_clients"].keys() == {"served", "visited", "last"}
    assert "visits" not in again.clients[0]
    assert tidy_rows(read_run(folder))[0]["smallest_quarter"] == 60.0


def test_a_row_a_client(finished):
    """The rows agree with the data, the accuracies and the personal entries of all clients."""
    federation, result = finished
    data, rows = federation.data, result.clients
    assert [row["client"] for row in rows] == list(range(5))
    assert [row["train"] for row in rows] == [data.size(client, "train") for client in range(5)]
    visits = Counter(client for line in read_run(result.out).metrics() for client in line["cohort"])
    assert [row["visits"] for row in rows] == [visits[client] for client in range(5)]
    correct = sum(row["served"] * row["test"] for row in rows) / sum(row["test"] for row in rows)
    assert correct == pytest.approx(result.accuracy.pooled)
    assert sum(row["last"] for row in rows) / 5 == pytest.approx(result.last.client_mean)
    assert sum(row["finetuned"] for row in rows) / 5 == pytest.approx(result.finetuned.client_mean)
    for row in rows:
        shares = [n / row["train"] for n in data.counts(row["client"]).tolist() if n]
        assert row["entropy"] == pytest.approx(-sum(share * math.log2(share) for share in shares))
        own = [name for name in row if name.startswith("personal.")]
        assert row["personal"] == sum(row[name] for name in own)
    assert sum(row["personal"] for row in rows) / 5 == pytest.approx(result.personal.mean)
    means = {name: sum(row[f"personal.{name}"] for row in rows) / 5 for name in federation.model.layout.names}
    assert read_run(result.out).metrics()[-1]["personal_by_tensor"] == pytest.approx(means)
    assert result.personal.mean > 0


def test_what_a_number_depends_on_travels_with_it(finished):
    _, result = finished
    origin = json.loads((result.out / "result.json").read_text())["provenance"]
    assert origin["config"] == result.config.hash
    assert origin["partition"] == result.partition
    assert (origin["seed"], origin["protocol"], origin["device"], origin["precision"]) == (42, "default", "cpu", "fp32")
    assert origin["beside"] == ["fedobp-seed42"]
    assert {"fedobp", "torch", "triton", "python", "threads", "engine"} < set(origin)


def test_tidy_rows(finished, tmp_path: Path):
    """A row for each model that clients are tested with; they survive a CSV file."""
    _, result = finished
    rows = tidy_rows(read_run(result.out))
    assert [row["model"] for row in rows] == ["served", "last", "finetuned"]
    assert [row["pooled"] for row in rows] == [result.accuracy.pooled, result.last.pooled, result.finetuned.pooled]
    assert rows[0]["config_hash"] == result.config.hash
    assert "q=" in rows[0]["options"]
    write_rows(tmp_path / "rows.csv", rows)
    assert read_tidy(tmp_path / "rows.csv") == rows


def test_settings_that_say_the_same_have_one_hash():
    config = Config(rounds=3)
    assert config.hash == Config(rounds=3, data_dir="/elsewhere", save_models="none").hash
    assert config.hash != Config(rounds=4).hash
    assert config.hash != Config(rounds=3, options={"q": 0.5}).hash


def test_runs_are_found(finished, tmp_path: Path):
    _, result = finished
    assert [run.name for run in find_runs([result.out.parent, result.out])] == ["one"]
    with pytest.raises(FedobpError, match=r"there is no folder .*absent"):
        find_runs([tmp_path / "absent"])
    with pytest.raises(FedobpError, match="there is no finished run in"):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        ([], "load_results has no folder to read: give that of a run"),
        ([""], "`folder` is empty: give the path of a folder"),
        ([["r1"]], r"`folder` must be the path of a folder, a text or a pathlib.Path, not \['r1'\]"),
    ],
)
def test_what_names_no_folder_is_a_user_error(folders: list, said: str):
    with pytest.raises(FedobpError, match=said):
        load_results(*folders)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "clients.csv"])
def test_a_file_that_is_lost_is_a_user_error(finished, tmp_path: Path, name: str):
    _, result = finished
    shutil.copytree(result.out, tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    with pytest.raises(FedobpError, match=rf"run/{name} is lost: take a whole copy of its folder, or run it again"):
        [(run.metrics(), run.clients()) for run in find_runs([tmp_path / "run"])]


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is damaged"), ("[]", "is damaged"), ('{"method": 3}', "is not the result of a run")],
)
def test_a_damaged_result_is_a_user_error(tmp_path: Path, content: str, said: str):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(FedobpError, match=said):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("clients.csv", "entropy", "entrop"),
        ("clients.csv", "\n0,", "\nzero,"),
        ("config.toml", "alpha =", "# alpha ="),
        ("result.json", '"history": [', '"history": [3, '),
        ("result.json", '"history": [', '"history": [[1e999, 0, 0], '),
        ("result.json", '"history": [', '"history": [[[], 0, 0], '),
        ("result.json", '"history": [', '"history": [], "other": ['),
        ("result.json", '"seconds": ', '"seconds": null, "other": '),
        ("result.json", '"parameters": ', '"parameters": "many", "other": '),
        ("result.json", '"share": ', '"share": 1e400, "other": '),
        ("result.json", '"pooled": ', '"pooled": "most", "other": '),
        ("clients.csv", "\n0,", "\n0.5,"),
        ("clients.csv", "\n0,", "\n99999999999999999999,"),
        ("result.json", '"provenance": {', '"provenance": 3, "other": {'),
    ],
)
def test_damage_that_can_be_parsed_is_a_user_error(finished, tmp_path: Path, name: str, old: str, new: str):
    _, result = finished
    shutil.copytree(result.out, tmp_path / "run")
    text = (tmp_path / "run" / name).read_text()
    assert old in text
    (tmp_path / "run" / name).write_text(text.replace(old, new, 1))
    with pytest.raises(FedobpError, match=f"{name} is damaged.*(checksum|not JSON)"):
        load_results(tmp_path / "run")
    if "1e999" in new or "1e400" in new:
        return  # no run can have written it
    found = json.loads((tmp_path / "run" / "result.json").read_text())  # as a run would have written it
    left_out = ("format", "sha256", "files")
    write_result(tmp_path / "run", {key: value for key, value in found.items() if key not in left_out})
    with pytest.raises(FedobpError, match=f"{name} is .*: remove .*, and run it again"):
        load_results(tmp_path / "run")


@pytest.mark.parametrize("name", ["result.json", "config.toml", "clients.csv", "metrics.jsonl"])
def test_a_changed_digit_is_a_user_error(finished, tmp_path: Path, name: str):
    """Every tenth of them: what can be parsed and looks right is not believed."""
    _, result = finished
    shutil.copytree(result.out, tmp_path / "run")
    text = (result.out / name).read_text()
    for at in [at for at, one in enumerate(text) if one.isdigit()][::10]:
        changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
        if name == "result.json" and json.loads(changed) == json.loads(text):
            continue  # the last digit of a float that is nearest to both
        (tmp_path / "run" / name).write_text(changed)
        with pytest.raises(FedobpError, match=f"{name} .*(damaged|format)"):
            [run.metrics() for run in find_runs([tmp_path / "run"]) if run.to_result()]


def test_copies_that_are_not_complete_are_not_found(finished, tmp_path: Path):
    _, result = finished
    for name in ("run", ".other.part"):
        shutil.copytree(result.out, tmp_path / name)
    assert [run.name for run in find_runs([tmp_path])] == ["run"]


@pytest.mark.parametrize("name", ["metrics", "timings"])
def test_a_line_that_is_no_table_is_a_user_error(finished, tmp_path: Path, name: str):
    _, result = finished
    shutil.copytree(result.out, tmp_path / "run")
    [run] = find_runs([tmp_path])
    for line in (
        "3",
        "[]",
        '{"round": "one"}',
        '{"round": 1, "runs": 0}',
        '{"round": 1, "personal_by_tensor": {"a": []}}',
    ):
        (tmp_path / "run" / f"{name}.jsonl").write_text(line + "\n")
        result = {key: value for key, value in run.result.items() if key != "files"}
        write_result(tmp_path / "run", result)  # as if the run had written that line
        [run] = find_runs([tmp_path])
        if name == "timings" or "runs" not in line:
            with pytest.raises(FedobpError, match=rf"{name}.jsonl is damaged \(a line (is no table|has no numbers)"):
                getattr(run, name)()
