"""What it costs to fit a client's last layer before use, as a ratio to one local epoch in the same run.

    python benchmarks/calibration.py             # the digits; with FEDOBP_DATA also Fashion-MNIST

All clients of a federation at once, on the lanes engine, medians of 5: one forward pass and the fit of
`--calibrate bias` and `--calibrate head`, and one epoch of SGD.
"""

import os
import statistics
import sys
import time

import torch

from fedobp import Config, Federation
from fedobp.algorithms.fedavg import FedAvg, take_global
from fedobp.data import data_dir, describe
from fedobp.engine import Budget, ClientPool, PoolJob
from fedobp.grouping import batch_size_for, engine_for
from fedobp.label_prior import label_prior
from fedobp.method import Program, Record, RoundContext, Train
from fedobp.options import Calibrate
from fedobp.run import hparams_of

TIMES = 5
KINDS: tuple[Calibrate, ...] = ("bias", "head")


def measure(config: Config) -> None:
    """Print the milliseconds a client, and the ratios."""
    federation = Federation(config)
    config, model, data = federation.config, federation.model, federation.data
    theta = model.initial(config.seed).to(data.x.device, data.dtype)
    engine = engine_for(config, model, batch_size_for(config, [data]))
    pool = ClientPool(data, {}, theta, config.seed, Budget())
    ctx = RoundContext(model, 1, 1, config.clients, 1, torch.arange(config.clients))
    download: Record = {"theta": theta.expand(config.clients, -1)}
    programs: dict[str, Program] = {"one epoch": [take_global, Train(1)]}
    for kind in KINDS:
        programs[f"calibrate {kind}"] = label_prior(FedAvg(), "off", kind).personalize(ctx)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(TIMES + 1):
        for name, program in programs.items():
            job = PoolJob(ctx, program, hparams_of(config, federation.method, config.lr), download, clients=pool)
            started = time.perf_counter()
            engine.personalize(job)
            seconds[name].append(time.perf_counter() - started)
    epoch = statistics.median(seconds["one epoch"][1:])
    mean = sum(data.size(client, "train") for client in range(config.clients)) / config.clients
    sys.stdout.write(f"{config.dataset}, {model.name}, {config.clients} clients of {mean:.0f} samples\n")
    for name, values in seconds.items():
        took = statistics.median(values[1:])
        sys.stdout.write(f"  {name:15} {1000 * took / config.clients:7.2f} ms a client, {took / epoch:5.2f} epochs\n")


def main() -> None:
    """Measure on the data that there is."""
    measure(Config(device="cpu"))
    if os.environ.get("FEDOBP_DATA") and describe("fmnist", data_dir()).available:
        measure(Config(dataset="fmnist", model="mlp", device="cpu"))
        measure(Config(dataset="fmnist", clients=20, device="cpu"))


if __name__ == "__main__":
    main()
