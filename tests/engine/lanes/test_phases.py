"""Which phases of several runs train together."""

from dataclasses import dataclass, replace

import pytest
import torch
from lanes_cases import (
    CLIENTS,
    FAST,
    PHASES,
    Plan,
    dataset,
    federated,
    fit_scale,
    make_job,
    make_model,
    make_pool,
    scaled_loss,
    shards,
)

from fedobp.engine.lanes.phases import Phase
from fedobp.keys import fold
from fedobp.method import Client, Sweep, Train

MODEL = make_model("mlp")
DATA = federated()


def phase_of(item, plan=None, data=DATA, scratch=None):
    plan = plan or Plan()
    pool = make_pool(MODEL, seed=plan.seed, data=data)
    theta = MODEL.initial(3).double()
    job = make_job(plan, pool, theta)
    scratch = scratch or {"theta": theta.expand(len(plan.cohort), -1)}
    hparams = {name: torch.full((len(plan.cohort),), value) for name, value in job.hparams.items()}
    client = Client(pool.state.gather(plan.cohort), job.download, scratch, {}, hparams)
    return Phase(job, item, client, fold(plan.seed, torch.tensor(plan.cohort)))


@pytest.mark.parametrize("name", ["plain", "everything", "a sweep"])
def test_runs_with_other_numbers_cohorts_seeds_and_partitions_train_together(name):
    item = PHASES[name][0]
    group = phase_of(item).group
    assert phase_of(item, Plan(hparams=FAST, seed=9)).group == group
    assert phase_of(item, Plan(cohort=(4, 1))).group == group
    assert phase_of(item, data=DATA.repartitioned(dataset(), shards(1))).group == group
    hash(group)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_training_phases_with_other_epochs_train_together(name):
    item = PHASES[name][0]
    assert phase_of(replace(item, epochs=7)).group == phase_of(item).group


def test_phases_on_other_samples_do_not_train_together():
    for item in (Train(1), Train(1, loss=scaled_loss), Sweep(fit_scale)):
        assert phase_of(item, data=federated()).group != phase_of(item).group


def test_phases_with_other_terms_do_not_train_together():
    items = [
        Train(1), Train(1, part="head"), Train(1, mask="mask"), Train(1, pull=("anchor", "mu")),
        Train(1, drift="drift"), Train(1, loss=scaled_loss), Train(1, loss=lambda model, client, batch: batch.x.sum()),
        Sweep(fit_scale), Sweep(fit_scale, 2), Sweep(fit_scale, whole=True),
    ]  # fmt: skip
    assert len({phase_of(item).group for item in items}) == len(items)


def test_a_function_may_read_all_of_a_client_so_names_and_shapes_must_agree():
    theta = torch.zeros(CLIENTS, MODEL.layout.size, dtype=torch.float64)
    scratches = [
        {"theta": theta}, {"theta": theta, "other": theta}, {"theta": theta, "other": theta[:, :3]},
        {"theta": theta, "another": theta[:, :3]},
    ]  # fmt: skip
    with_loss = {phase_of(Train(1, loss=scaled_loss), scratch=scratch).group for scratch in scratches}
    plain = {phase_of(Train(1), scratch=scratch).group for scratch in scratches}
    assert (len(with_loss), len(plain)) == (len(scratches), 1)


@dataclass(frozen=True)
class WithLoss:
    """A method whose loss is a bound method."""

    mu: float

    def loss(self, model, client, batch):
        return self.mu * client.theta.sum()


def test_bound_methods_of_equal_objects_are_the_same_loss():
    groups = [phase_of(Train(1, loss=WithLoss(mu).loss)).group for mu in (1.0, 1.0, 2.0)]
    assert groups[0] == groups[1] != groups[2]
