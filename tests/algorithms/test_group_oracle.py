"""The group oracle: by hand, as a FedAvg of each group, as FedAvg without groups, and on nodes, which know none."""

from dataclasses import replace

import pytest
import torch
from by_hand import context, run_program, update_of, vector
from plain_loops import (
    batches,
    both_engines,
    each_round,
    flat,
    mean,
    network_loss,
    sgd,
    small_federation,
    theta_0,
)  # fmt: skip

from fedobp import Config, Federation, FedobpError, sweep
from fedobp.algorithms import METHODS
from fedobp.launch import StopTraining
from fedobp.method import RoundContext

ORACLE = METHODS["group-oracle"]()
GROUPED = {"clients": 6, "participation": 0.5, "partition": "concept", "partition_options": {"groups": 2},
           "rounds": 4, "epochs": 1, "model": "mlp", "precision": "fp64"}  # fmt: skip


def grouped(*cohort: int, groups=(0, 1, 1, 2)) -> RoundContext:
    return replace(context(*cohort, clients=len(groups)), groups=torch.tensor(groups))


def trained(ctx, download, *steps):
    """Return the clients of a cohort after their training."""
    program = ORACLE.client_update(ctx)
    return [
        run_program(None, program, {}, {"theta": theta}, [step])[0]
        for theta, step in zip(download["theta"], steps, strict=True)
    ]


def test_rounds_by_hand():
    server, record, state = ORACLE.init(None, vector(0, 0), 0)
    assert (record, state) == ({}, {})
    ctx = grouped(0, 2, 1)
    download, _ = ORACLE.download(ctx, server, {})
    assert download["theta"].tolist() == [[0, 0]] * 3
    clients = trained(ctx, download, vector(1, 1), vector(8, 0), vector(0, 4))
    server, _ = ORACLE.aggregate(ctx, server, {}, update_of(clients, 5, 1, 3))
    # Group 0: client 0 alone. Group 1: (1 (8, 0) + 3 (0, 4)) / 4. Group 2 has not trained.
    assert server["models"].tolist() == [[1, 1], [2, 3], [0, 0]]
    # The mean of all uploads, as FedAvg's: (5 (1, 1) + 1 (8, 0) + 3 (0, 4)) / 9.
    assert server["theta"].tolist() == pytest.approx([13 / 9, 17 / 9])
    ctx = grouped(3, 2)
    download, _ = ORACLE.download(ctx, server, {})
    assert download["theta"].tolist() == [[0, 0], [2, 3]]
    clients = trained(ctx, download, vector(5, 5), vector(1, 0))
    server, _ = ORACLE.aggregate(ctx, server, {}, update_of(clients, 2, 2))
    assert server["models"].tolist() == [[1, 1], [3, 3], [5, 5]]


def test_a_group_without_samples_in_the_cohort_keeps_its_model():
    server = {"theta": vector(0, 0), "models": torch.tensor([[1.0, 1], [2, 2], [3, 3]])}
    ctx = grouped(1, 3)
    clients = trained(ctx, ORACLE.download(ctx, server, {})[0], vector(9, 9), vector(1, 1))
    server, _ = ORACLE.aggregate(ctx, server, {}, update_of(clients, 0, 4))
    assert server["models"].tolist() == [[1, 1], [2, 2], [4, 4]]


def test_every_entry_is_personal_where_there_are_groups():
    for groups, mine in (((0, 1), True), ((0, 0), False)):
        program = ORACLE.personalize(grouped(0, groups=groups))
        client, _ = run_program(None, program, {}, {"theta": vector(1, 2)})
        assert client.theta.tolist() == [1, 2]
        assert client.scratch.get("mine", torch.tensor(False)).all() == mine


@pytest.mark.parametrize("call", ["download", "aggregate", "personalize"])
def test_nodes_know_no_groups(call):
    arguments = {"download": ({}, {}), "personalize": ()}
    update = update_of(trained(context(0), {"theta": vector(0, 0)[None]}, vector(1, 1)), 1)
    given = arguments.get(call, ({"theta": vector(0, 0)}, {}, update))
    with pytest.raises(FedobpError, match="needs the groups of clients, which only a simulation knows: use another"):
        getattr(ORACLE, call)(context(0), *given)


def test_a_plain_loop_agrees_on_both_engines():
    """Two groups of two clients, each as a federation of its own."""
    options = {"change": "contrast", "groups": 2}
    federation = small_federation(
        "group-oracle", "batches, momentum and decay", rounds=4, partition="feature", partition_options=options
    )
    groups = federation.data.groups.tolist()
    assert sorted(groups) == [0, 0, 1, 1]
    models, theta = [theta_0(federation)] * 2, theta_0(federation)
    seen = set()
    for number, cohort in each_round(federation):
        uploads = {
            client: sgd(federation, models[groups[client]], network_loss,
                        batches(federation, client, number, 1, federation.config.epochs))
            for client in cohort
        }  # fmt: skip
        theta = mean(federation, cohort, [uploads[client] for client in cohort])
        for group in range(2):
            if members := [client for client in cohort if groups[client] == group]:
                models[group] = mean(federation, members, [uploads[client] for client in members])
                seen.add((number, group))
    assert len(seen) > 4  # rounds with both groups, and with one
    both_engines(federation, theta, {client: models[groups[client]] for client in range(4)})


def test_without_groups_it_is_fedavg_to_the_last_bit(tmp_path):
    config = Config(clients=6, rounds=3, epochs=1, model="mlp", holdout_clients=2, save_models="all")
    ours, averaged = (Federation(config).run(method, out=tmp_path / method) for method in ("group-oracle", "fedavg"))
    for name in ("metrics.jsonl", "clients.csv"):
        assert (tmp_path / "group-oracle" / name).read_bytes() == (tmp_path / "fedavg" / name).read_bytes()
    for client in (None, *range(4)):
        assert torch.equal(flat(ours.state_dict(client).values()), flat(averaged.state_dict(client).values()))
    assert (ours.personal, ours.new_clients) == (averaged.personal, averaged.new_clients)


def test_held_out_clients_are_served_the_model_of_their_group():
    config = Config(**{**GROUPED, "participation": 1.0, "rounds": 1, "holdout_clients": 2, "eval_every": 1})
    federation = Federation(config)
    result = federation.run("group-oracle")
    alike = {int(group): client for client, group in enumerate(federation.data.groups[:4])}
    correct, total = 0, 0
    for client in (4, 5):
        theta = federation.model.layout.flatten(result.state_dict(alike[int(federation.data.groups[client])]))
        answers = federation.model.logits(theta, federation.data.inputs(client, "test")).argmax(dim=1)
        correct += int((answers == federation.data.targets(client, "test")).sum())
        total += len(answers)
    assert result.new_clients.served.pooled == pytest.approx(100 * correct / total)


def test_sweeps_and_checkpoints_give_the_same_run(tmp_path):
    config = Config(**GROUPED, method="group-oracle", save_models="all")
    whole = Federation(config).run(out=tmp_path / "whole")
    beside = sweep([config, replace(config, method="fedavg"), replace(config, partition="iid", partition_options={})])
    for client in range(6):
        expected = flat(whole.state_dict(client).values())
        torch.testing.assert_close(flat(beside[0].state_dict(client).values()), expected, rtol=0, atol=1e-10)

    def stop(progress):
        if progress.round == 3:
            raise StopTraining

    with pytest.raises(StopTraining):
        Federation(config).run(out=tmp_path / "cut", progress=stop, checkpoint_every=1)
    Federation(config).run(out=tmp_path / "cut", resume=True)
    for name in ("metrics.jsonl", "models/clients.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
