"""One client's visit with sweeps, by hand: batches are the test's, padded with samples that must not count."""

from dataclasses import replace

import torch

from fedobp.method import Batch, Client, Sweep, Train


def numbers(**values):
    """Return `hp`."""
    usual = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in {**usual, **values}.items()}


def draw(seed, sizes, classes=3, features=4):
    """Return batches (x, y) of the given sizes."""
    stream = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, features, generator=stream, dtype=torch.float64),
            torch.randint(classes, (size,), generator=stream),
        )
        for size in sizes
    ]


def visit(model, program, own, download, hparams, batches, step=0.0):
    """Run one client's program; `batches` says which ones an epoch has, and training adds `step`.

    Return the client and the epochs that each sweep took.
    """
    n = torch.tensor(sum(len(y) for _, y in batches(0)))
    client, epochs = Client(own, download, {}, {}, hparams, {"n": n}), []
    for item in program:
        if isinstance(item, Train):
            client = client.set(**{name: client.scratch[name] + step for name in item.learn})
        elif isinstance(item, Sweep):
            taken = count = 0
            while taken < item.epochs and (item.more is None or item.more(model, client)):
                for x, y in batches(taken):
                    if len(y) >= item.smallest:
                        after = item.step(model, client, padded(x, y, count, taken))
                        assert after == replace(client, scratch=after.scratch)
                        client, count = after, count + 1
                taken += 1
                if not batches(0):
                    break
            epochs.append(taken)
        else:
            client = item(model, client)
    return client, epochs


def padded(x, y, step, epoch):
    """Return a batch with two samples more than it has."""
    more = torch.full((2, *x.shape[1:]), 50.0, dtype=x.dtype)
    weight = torch.cat([torch.ones(len(y)), torch.zeros(2)]).to(x.dtype)
    times = torch.tensor(step), torch.tensor(epoch)
    return Batch(torch.cat([x, more]), torch.cat([y, y.new_zeros(2)]), weight, torch.tensor(0), *times)
