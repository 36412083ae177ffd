"""Folders of finished runs, written by hand: their numbers follow from a few that a test gives."""

import json
from pathlib import Path

from fedobp import Config
from fedobp.csv_rows import write_rows
from fedobp.evaluation import make_protocol
from fedobp.storage import write_result

SETTINGS = {
    "dataset": "digits", "clients": 4, "partition": "dirichlet", "alpha": 0.1, "val_ratio": 0.0, "holdout_clients": 0,
    "normalize": "train", "model": "mlp", "rounds": 4, "participation": 0.5, "eval_every": 2, "precision": "fp32",
}  # fmt: skip
TENSORS = ("conv.weight", "classifier.weight", "classifier.bias")


def accuracy(pooled):
    """Return accuracies that follow from the pooled one."""
    names = ("pooled", "client_mean", "client_std", "worst_decile", "balanced", "majority_class")
    return dict(zip(names, (pooled, pooled - 1, 2.0, pooled - 10, pooled - 2, 50.0), strict=True))


def clients_of(count, served, personal=lambda client: (0, 2 + client, 1)):
    """Return the rows of clients.csv: client i has 10 + i training samples and the accuracy `served(i)`."""
    return [
        {
            "client": i, "train": 10 + i, "test": 5, "entropy": i / count, "served": served(i), "last": 50.0,
            "finetuned": None, "personal": sum(personal(i)),
            **{f"personal.{name}": entries for name, entries in zip(TENSORS, personal(i), strict=True)},
        }
        for i in range(count)
    ]  # fmt: skip


def write_run(
    parent, method="fedavg", seed=1, pooled=80.0, *, name=None, clients=(), timings=True, provenance=True, **settings
):
    """Write a run of four rounds, evaluated in rounds 2 (at half of its accuracy) and 4; return its folder.

    It has 10 parameters, of which 1 and then 3 are personal on average; it sends 1,000 and receives 500 bytes a round.
    """
    config = Config(**{**SETTINGS, "partition_seed": seed, **settings, "method": method, "seed": seed})
    folder = Path(parent) / (name or f"{method}-seed{seed}")
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config.to_toml())
    result = {
        "method": method, "dataset": config.dataset, "seed": seed, "rounds": config.rounds,
        "protocol": make_protocol(config.protocol, config.rounds).to_json(), "accuracy": accuracy(pooled),
        "last": accuracy(pooled + 5), "finetuned": None, "history": [[2, pooled / 2, 1.0], [4, pooled, pooled - 1]],
        "personal": {"mean": 3.0, "min": 3, "max": 3, "share": 0.3},
        "bytes": {"down_per_round": 1000.0, "up_per_round": 500.0, "down_total": 4000, "up_total": 2000},
        "compute": {"visit": 1.0, "use": 0.0}, "seconds": 1.5, "out": str(folder),
        "partition": f"partition of seed {config.partition_seed}",
    }  # fmt: skip
    if provenance:
        result["provenance"] = {
            "config": f"hash{seed}", "partition": result["partition"], "seed": seed, "protocol": config.protocol,
            "fedobp": "9.8", "torch": "7.6", "triton": None, "python": "3.11", "device": "abacus", "precision": "fp32",
            "engine": "lanes", "threads": 3, "beside": [f"{method}-seed{seed}", "other-seed1"],
        }  # fmt: skip
    means = {2: (0.0, 1.0, 0.0), 4: (0.0, 2.0, 1.0)}
    lines = [
        {"round": at, **({"personal_by_tensor": dict(zip(TENSORS, means[at], strict=True))} if at in means else {})}
        for at in (1, 2, 3, 4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if timings:
        times = [{"round": at, "train": 0.4, "all": 1.0, "runs": 2, "occupancy": 1.0} for at in (1, 2, 3, 4)]
        (folder / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    if clients:
        write_rows(folder / "clients.csv", clients)
    write_result(folder, result)
    return folder
