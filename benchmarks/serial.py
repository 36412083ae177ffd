"""The speed of the serial engine and of scoring, as ratios to a baseline in the same process: `make bench`.

Values are medians. On a shared machine times are noisy, and ratios in one process less so.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedobp import Config, Federation
from fedobp.importance import above, squared
from fedobp.models import Model
from fedobp.sampling import cohorts

PAPER_SIZE = Model("cnn", (3, 32, 32), 10).layout.size  # the paper's CNN on CIFAR10
COHORT = 10


def median_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median time of a piece of work, after a warm-up."""
    work()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def by_quantile(score: Tensor, q: float) -> Tensor:
    """Return the personal sets as the authors' code finds them: one interpolated quantile a client."""
    return score > torch.stack([torch.quantile(row, q) for row in score])[:, None]


def threshold() -> None:
    """Compare `above` with torch.quantile on a cohort of the paper's CNNs."""
    torch.manual_seed(0)
    score = squared(torch.randn(COHORT, PAPER_SIZE), torch.randn(PAPER_SIZE))
    for q in (0.99998, 0.995):
        assert torch.equal(above(score, q), by_quantile(score, q))
        ours, theirs = (median_seconds(partial(find, score, q)) for find in (above, by_quantile))
        line = f"threshold, {COHORT} x {PAPER_SIZE:,}, q={q}: top-k {ours * 1e3:.1f} ms, torch.quantile "
        print(f"{line}{theirs * 1e3:.1f} ms: {theirs / ours:.1f} times as fast")


def plain_rounds(federation: Federation, rounds: int) -> None:
    """Run FedAvg as a bare loop over one module: the smallest cost that the serial engine can have."""
    config, data = federation.config, federation.data
    module = federation.model.module()
    shared = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for _, cohort in zip(range(rounds), cohorts(config), strict=False):
        states, sizes = [], []
        for client in cohort.tolist():
            module.load_state_dict(shared)
            optimizer = torch.optim.SGD(module.parameters(), config.lr)
            x, y = data.inputs(client, "train"), data.targets(client, "train")
            for _ in range(config.epochs):
                for picked in torch.randperm(len(y)).split(config.batch_size):
                    if len(picked) > 1:
                        _step(module, optimizer, x[picked], y[picked])
            states.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
            sizes.append(len(y))
        for name in shared:
            shared[name] = sum(n * state[name] for n, state in zip(sizes, states, strict=True)) / sum(sizes)


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(module(x), y).backward()
    optimizer.step()


def engine() -> None:
    """Compare training rounds of the serial engine with the bare loop, on the demo's federation."""
    rounds = 10
    federation = Federation(Config(dataset="digits", rounds=rounds, eval_every=rounds, engine="serial"))
    ours = median_seconds(lambda: federation.run("fedavg"), 3)
    bare = median_seconds(lambda: plain_rounds(federation, rounds), 3)
    print(f"serial engine, digits, {rounds} rounds of FedAvg and one evaluation: {ours:.2f} s, bare loop without "
          f"evaluation {bare:.2f} s: {ours / bare:.2f} times its time")  # fmt: skip


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    threshold()
    engine()
