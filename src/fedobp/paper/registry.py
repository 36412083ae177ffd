"""All experiments by name."""

from fedobp.paper import ablation, accuracy, datasets, overhead, quantiles
from fedobp.paper.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {one.name: one for module in (accuracy, quantiles, ablation, datasets, overhead) for one in module.EXPERIMENTS}
