"""All experiments by name: those of the paper in its order, then those beyond it."""

from fedobp.paper import ablation, accuracy, claims, datasets, explained, law, overhead, quantiles, theory
from fedobp.paper.experiment import Experiment

_ORDER = (
    "table1", "table2", "quantiles", "convergence", "scores", "ablation", "layers", "communication", "medmnist",
    "datasets", "overhead", "participation", "theory", "claims",
    "explained", "law",
)  # fmt: skip
_MODULES = (accuracy, quantiles, ablation, datasets, overhead, theory, claims, explained, law)
_FOUND = {one.name: one for module in _MODULES for one in module.EXPERIMENTS}
EXPERIMENTS: dict[str, Experiment] = {name: _FOUND[name] for name in _ORDER}
