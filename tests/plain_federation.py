"""FedAvg and FedOBP in the plainest form: one client after another, one nn.Module, plain loops.

Written from the description of the protocol alone and sharing no code with the package, it is a second opinion
on the package's accuracies. Partition, cohorts and initial model are those of the published code; the order of
the samples is the caller's, because it alone moves accuracies by several points in the first rounds.
"""

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

State = dict[str, Tensor]


def plain_model(classes: int) -> nn.Sequential:
    """The FedAvg CNN for grey 28x28 images: two convolutions, one hidden layer, the classifier."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def plain_partition(
    y: np.ndarray, classes: int, clients: int, alpha: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Share the samples label by label with Dirichlet draws; return each client's train and test indices."""
    rng = np.random.RandomState(seed)
    of_label = [np.flatnonzero(y == label) for label in range(classes)]
    smallest = 0
    while smallest < 10:
        pieces: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for indices in of_label:
            rng.shuffle(indices)  # in place: the next try starts from this order
            shares = rng.dirichlet(np.repeat(alpha, clients))
            cuts = (np.cumsum(shares) * len(indices)).astype(int)[:-1]
            for client, piece in enumerate(np.split(indices, cuts)):
                pieces[client].append(piece)
        smallest = min(sum(len(piece) for piece in own) for own in pieces)
    train, test = [], []
    for own in pieces:
        indices = np.concatenate(own)
        rng.shuffle(indices)
        n_test = int(0.25 * len(indices))
        test.append(indices[:n_test])
        train.append(indices[n_test:])
    return train, test


def plain_cohorts(clients: int, participation: float, rounds: int, seed: int) -> list[list[int]]:
    """Draw the clients of every round up front; the order inside a round is the training order."""
    rng = random.Random(seed)
    size = max(1, int(clients * participation))
    return [rng.sample(list(range(clients)), size) for _ in range(rounds)]


def copy_of(model: nn.Module) -> State:
    """The model's parameters, detached from it."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_merge(own: State, shared: State, q: float) -> State:
    """FedOBP: keep the client's own value where its squared distance from the global one exceeds the q-quantile."""
    scores = {name: (own[name].double() - shared[name].double()) ** 2 for name in shared}
    pool = torch.cat([score.flatten() for score in scores.values()]).numpy()
    threshold = float(np.quantile(pool, q))  # linear interpolation, over all parameters of the model together
    return {name: torch.where(scores[name] > threshold, own[name], shared[name]) for name in shared}


def plain_run(
    x: np.ndarray,
    y: np.ndarray,
    *,
    method: str,
    classes: int,
    clients: int,
    alpha: float,
    rounds: int,
    participation: float,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
    q: float,
    mean: float,
    std: float,
    order: Callable[[int, int, int, int], Tensor],
) -> float:
    """Run the federation; return the pooled test accuracy, in per cent, of the models clients would start from now.

    `order` gives the permutation of (round from 1, client, epoch from 0, number of samples).
    """
    if method not in ("fedavg", "fedobp"):
        raise ValueError(f"unknown method {method!r}")
    train, test = plain_partition(y, classes, clients, alpha, seed)
    cohorts = plain_cohorts(clients, participation, rounds, seed)
    images = ((torch.from_numpy(x).float() / 255 - mean) / std).unsqueeze(1)
    labels = torch.from_numpy(y.astype(np.int64))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = plain_model(classes)
    loss_of = nn.CrossEntropyLoss()

    shared = copy_of(model)
    uploads: list[State | None] = [None] * clients  # what each client uploaded last

    def start_of(client: int) -> State:
        own = uploads[client]
        if method == "fedavg" or own is None:  # before its first training a client has nothing of its own
            return shared
        return plain_merge(own, shared, q)

    for round, cohort in enumerate(cohorts, start=1):
        for client in cohort:
            model.load_state_dict(start_of(client))
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            indices = torch.from_numpy(train[client])
            for epoch in range(epochs):
                for batch in indices[order(round, client, epoch, len(indices))].split(batch_size):
                    if len(batch) == 1:
                        continue
                    optimizer.zero_grad()
                    loss_of(model(images[batch]), labels[batch]).backward()
                    optimizer.step()
            uploads[client] = copy_of(model)
        total = sum(len(train[client]) for client in cohort)
        average = {name: torch.zeros_like(value) for name, value in shared.items()}
        for client in cohort:
            upload = uploads[client]
            assert upload is not None
            for name in average:
                average[name] += upload[name] * (len(train[client]) / total)
        shared = average

    correct, tested = 0, 0
    with torch.no_grad():
        for client in range(clients):
            model.load_state_dict(start_of(client))
            indices = torch.from_numpy(test[client])
            correct += int((model(images[indices]).argmax(dim=1) == labels[indices]).sum())
            tested += len(indices)
    return 100 * correct / tested
