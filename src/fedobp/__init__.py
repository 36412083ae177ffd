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
    from fedobp import trackers as trackers
    from fedobp.callbacks import Callback
    from fedobp.config import Config
    from fedobp.data import Dataset
    from fedobp.evaluation import Accuracy
    from fedobp.federation import Federation
    from fedobp.launch import Progress
    from fedobp.models import Model
    from fedobp.result import Failure, Result, Results
    from fedobp.saved_runs import load_results
    from fedobp.storage import load_state_dict
    from fedobp.sweep_folder import resume_sweep
    from fedobp.sweeps import SweepError, sweep

__all__ = [
    "Accuracy", "Callback", "Config", "Dataset", "Failure", "Federation", "FedobpError", "Model", "Progress", "Result",
    "Results", "SweepError", "__version__", "load_results", "load_state_dict", "method", "resume_sweep", "sweep",
    "trackers",
]  # fmt: skip

_MODULES = {
    "Accuracy": "evaluation",
    "Callback": "callbacks",
    "Config": "config",
    "Dataset": "data",
    "Failure": "result",
    "Federation": "federation",
    "Model": "models",
    "Progress": "launch",
    "Result": "result",
    "Results": "result",
    "SweepError": "sweeps",
    "load_results": "saved_runs",
    "load_state_dict": "storage",
    "resume_sweep": "sweep_folder",
    "sweep": "sweeps",
}


def __getattr__(name: str) -> object:
    if name in ("method", "trackers"):
        return import_module(f"fedobp.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedobp' has no attribute '{name}'")
    return getattr(import_module(f"fedobp.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
