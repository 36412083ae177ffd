"""What runs write to disk: run folders and models."""

from fedobp.storage.client_models import ClientModels, load_state_dict
from fedobp.storage.run_folder import (
    RunFolder,
    claim,
    clear,
    new_run_folder,
    provenance,
    release,
    versions,
    write_result,
)

__all__ = [
    "ClientModels",
    "RunFolder",
    "claim",
    "clear",
    "load_state_dict",
    "new_run_folder",
    "provenance",
    "release",
    "versions",
    "write_result",
]
