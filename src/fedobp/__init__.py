"""Personalised federated learning: many clients share one model, and each keeps a few parameters of its own.

    import fedobp

    federation = fedobp.Federation(fedobp.Config(dataset="digits", clients=20, alpha=0.1))
    result = federation.run("fedobp", q=0.999)
    print(result.accuracy.pooled, result.history[-1])
    module = federation.model.module()
    module.load_state_dict(result.state_dict(client=7))

User errors raise `FedobpError`. Names are loaded on first use: torch takes its time.
"""

from importlib import import_module

from fedobp._version import __version__
from fedobp.errors import FedobpError

TYPE_CHECKING = False  # `typing` alone takes longer to load than all that is above
if TYPE_CHECKING:
    from fedobp import method as method
    from fedobp.config import Config
    from fedobp.data import Dataset
    from fedobp.evaluation import Accuracy
    from fedobp.federation import Federation
    from fedobp.launch import Progress
    from fedobp.models import Model
    from fedobp.result import Result
    from fedobp.storage import load_state_dict
    from fedobp.sweeps import SweepError, sweep

__all__ = [
    "Accuracy", "Config", "Dataset", "Federation", "FedobpError", "Model", "Progress", "Result", "SweepError",
    "__version__", "load_state_dict", "method", "sweep",
]  # fmt: skip

_MODULES = {
    "Accuracy": "evaluation",
    "Config": "config",
    "Dataset": "data",
    "Federation": "federation",
    "Model": "models",
    "Progress": "launch",
    "Result": "result",
    "SweepError": "sweeps",
    "load_state_dict": "storage",
    "sweep": "sweeps",
}


def __getattr__(name: str) -> object:
    if name == "method":
        return import_module("fedobp.method")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedobp' has no attribute '{name}'")
    return getattr(import_module(f"fedobp.{_MODULES[name]}"), name)
