"""Run folders and saved models."""

from fedobp.runs.folder import RunFolder, claim, fresh, made_by, release
from fedobp.runs.models import Models, load_state_dict

__all__ = ["Models", "RunFolder", "claim", "fresh", "load_state_dict", "made_by", "release"]
