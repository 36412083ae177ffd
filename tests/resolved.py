"""Complete settings, as `Federation.config` has them, without the cost of a partition."""

from fedobp import Config
from fedobp.data import Dataset
from fedobp.federation import read
from fedobp.resolution import resolve


def resolved(given: Config | None = None, source: Dataset | None = None, /, **settings: object) -> Config:
    """Return a `Config`, or the one that settings make, resolved with its dataset."""
    config = given or Config(**settings)
    return resolve(config, source or read(config))[0]
