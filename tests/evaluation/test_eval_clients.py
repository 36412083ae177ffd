"""`eval_clients`: a sample of clients is evaluated; training does not change, and every result says so."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fedobp import Config, Federation, FedobpError, load_results
from fedobp.csv_rows import read_rows
from fedobp.report.page import report_html
from fedobp.report.tables import compare_table, run_table
from fedobp.sampling import evaluated_clients
from fedobp.saved_runs import find_runs

SMALL = {"rounds": 4, "clients": 9, "epochs": 1, "alpha": 1.0, "eval_every": 2, "model": "mlp", "holdout_clients": 2,
         "finetune_epochs": 1, "metrics": "loss"}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """The same run with all of 7 clients evaluated, and with 3 of them."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        Federation(Config(**SMALL, eval_clients=count)).run("fedobp", out=folder / str(count)) for count in (None, 3)
    ]


def test_training_is_the_same_and_the_numbers_are_those_of_the_sample(runs):
    everyone, sample = runs
    chosen = evaluated_clients(sample.config).tolist()
    assert [row["client"] for row in sample.clients] == chosen
    assert list(sample.clients) == [everyone.clients[client] for client in chosen]
    assert read_rows(sample.out / "clients.csv") == list(sample.clients)
    for name, tensor in everyone.state_dict().items():
        assert tensor.equal(sample.state_dict()[name])
    for name in ("accuracy", "last", "finetuned"):
        found, whole = getattr(sample, name), getattr(everyone, name)
        assert found.per_client == tuple(whole.per_client[client] for client in chosen)
        assert found.client_mean == pytest.approx(sum(found.per_client) / 3)
        losses = [whole.metrics["loss"].per_client[client] for client in chosen]
        assert found.metrics["loss"].per_client == pytest.approx(losses)
    assert sample.new_clients == everyone.new_clients  # all that are held out
    assert sample.personal.mean == pytest.approx(sum(row["personal"] for row in sample.clients) / 3)


def test_every_result_says_how_many_clients_were_evaluated(runs):
    everyone, sample = runs
    assert json.loads((everyone.out / "result.json").read_text())["protocol"]["clients"] == "all"
    assert json.loads((sample.out / "result.json").read_text())["protocol"]["clients"] == "3 of 7"
    told = "Accuracy in per cent on the test parts of 3 of 7 clients, drawn by the seed, round 4"
    for table in (run_table(sample), compare_table([sample])):
        assert any(note.startswith(told) for note in table.notes)
    assert any(
        note.startswith("Accuracy in per cent on all clients' test parts, ") for note in run_table(everyone).notes
    )
    out = io.StringIO()
    Console(file=out, width=200).print(run_table(sample))
    assert told in out.getvalue()
    page = report_html(find_runs([sample.out]))
    assert "accuracy in per cent on the test parts of 3 of 7 clients, drawn by the seed" in page
    assert "These are the clients that were evaluated: 3 of 7." in page


def test_a_sample_comes_back_from_its_folder(runs):
    _, sample = runs
    [again] = load_results(sample.out)
    assert again.to_json() == sample.to_json()
    assert (again.config.eval_clients, again.protocol) == (3, sample.protocol)
    client = next(client for client in range(7) if client not in [row["client"] for row in sample.clients])
    for run in (again, sample):
        run.state_dict(sample.clients[0]["client"])
        with pytest.raises(FedobpError, match=f"no model of client {client}.*(3 evaluated clients|clients are)"):
            run.state_dict(client)


def test_the_command_line(command):
    small = ("--rounds", 1, "--epochs", 1, "--clients", 6, "--model", "mlp")
    said = command("run", *small, "--eval-clients", 2, "--json", "--out", "here")
    assert said.json["protocol"]["clients"] == "2 of 6"
    assert "eval_clients = 2" in Path("here/config.toml").read_text()
    assert command("run", *small, "--eval-clients", 7).err.startswith(
        "error: --eval-clients 7 is more than the 6 clients"
    )
    assert "--eval-clients must be at least 1" in command("run", *small, "--eval-clients", 0).err
