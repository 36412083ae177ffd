"""Results made by hand, without a run."""

from pathlib import Path

import torch

from fedobp import Accuracy, Config
from fedobp.evaluation import Personal, make_protocol
from fedobp.models import Layout
from fedobp.result import Compute, Result, Traffic
from fedobp.storage import ClientModels


def accuracy(pooled: float) -> Accuracy:
    """Return accuracies that follow from the pooled one."""
    return Accuracy(pooled, pooled - 1, 2.0, pooled - 10, pooled - 2, 50.0)


def made(
    method: str = "fedavg", seed: int = 1, pooled: float = 80.0, out: Path | None = None, **settings: object
) -> Result:
    """Return the result of a run of four rounds, evaluated twice: first at half of its accuracy."""
    config = Config(
        **{"rounds": 4, "partition_seed": seed, "holdout_clients": 0, **settings, "method": method, "seed": seed}
    )
    return Result(
        config=config,
        protocol=make_protocol("default", config.rounds),
        accuracy=accuracy(pooled),
        last=accuracy(pooled + 5),
        finetuned=None,
        validation=None,
        new_clients=None,
        history=[(2, pooled / 2, pooled / 2 - 1), (4, pooled, pooled - 1)],
        personal=Personal(1.0, 0, 2, 0.25),
        bytes=Traffic(1000.0, 500.0, 4000, 2000),
        compute=Compute(1.0, 0.0),
        seconds=1.5,
        models=ClientModels(Layout(("classifier.weight",), ((2, 2),)), torch.zeros(4)),
        parameters=4,
        partition="a hash",
        out=out,
    )
