"""Models: ordinary modules that the rest of the library sees as one flat vector with a layout."""

from fedobp.models import networks, residual, tokens  # noqa: F401  they register the built-in networks
from fedobp.models.batch_norm import is_statistic
from fedobp.models.layout import Inside, Layout
from fedobp.models.losses import sample_losses
from fedobp.models.model import Model
from fedobp.models.registry import NETS, Network, network, network_names, network_options, register

__all__ = [
    "NETS", "Inside", "Layout", "Model", "Network", "is_statistic", "network", "network_names", "network_options",
    "register", "sample_losses",
]  # fmt: skip
