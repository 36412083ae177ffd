"""Federations of very many clients: what is kept of a client that took part, and nothing of the others."""

import json

import numpy as np
import pytest

from fedobp import Config, Federation
from fedobp.launch import StopTraining
from fedobp.storage.tensor_file import read_tensors

CLIENTS = 1_000_000


def make(client):
    random = np.random.default_rng(client)
    y = random.integers(3, size=8)
    return random.standard_normal((8, 5)).astype(np.float32) + y[:, None], y


def federation():
    config = Config(rounds=4, participation=5 / CLIENTS, epochs=1, eval_clients=6, eval_every=2, seed=1)
    return Federation.from_data(make, clients=CLIENTS, lazy=True, classes=3, config=config)


def stop(at):
    if at.round == 3:
        raise StopTraining


@pytest.mark.parametrize(("method", "models"), [("fedobp", 2), ("fedavg", 1)])
def test_a_million_clients_keep_the_state_of_those_that_took_part(method, models, tmp_path):
    """FedOBP keeps two models of a client: the record that the server scores, and its own. FedAvg: its last one."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    result = federation().run(method, out=whole)
    with pytest.raises(StopTraining):
        federation().run(method, out=cut, progress=stop, checkpoint_every=3)
    lines = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    took_part = {client for line in lines for client in line["cohort"]}
    assert len(took_part) == 15
    tensors, about = read_tensors(cut / "checkpoint" / "clients-3.safetensors")
    _, of_server = read_tensors(cut / "checkpoint" / "server-3.safetensors")
    assert {int(client) for client in of_server["clients"]} == took_part
    size = federation().model.layout.size
    vectors = [name for name, tensor in tensors.items() if tensor.numel() == size]
    assert len(vectors) == 15  # of a model that is held twice, the file has one
    assert len(vectors) + sum(name.endswith(".theta") for name in about["same"]) == 15 * models
    assert (whole / "clients.csv").read_text().count("\n") == 1 + 6
    assert result.protocol.clients == "6 of 1,000,000"
    federation().run(method, out=cut, resume=True)
    for name in ("metrics.jsonl", "clients.csv", "models/global.safetensors", "models/clients.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
