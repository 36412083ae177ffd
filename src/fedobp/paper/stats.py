"""Statistics of tables: means over seeds, paired tests, and whether a published number lies within noise."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TOLERANCE = 0.5  # points: what counts as noise where one seed was run
SIGNIFICANT = 0.05
NOISE_RULE = (
    "Within noise: the measured mean of n seeds with deviation s differs from the published p ± s_p by at most "
    f"2 sqrt(s²(1 + 1/n) + s_p²); with one seed by at most {TOLERANCE:g} points. The published number counts as one "
    "run, because its four runs share a seed."
)
TEST_RULE = (
    f"Tests: paired t-test over seeds, two-sided, not corrected for the number of comparisons; 'better' needs "
    f"p < {SIGNIFICANT:g}. Fewer than two pairs: no test."
)


class Spread(NamedTuple):
    """Mean and standard deviation (n - 1; None for one value) over seeds."""

    mean: float
    std: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ± {self.std:.2f}" if self.std is not None else "")


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and deviation of values; None if there are none."""
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def within_noise(ours: Spread, theirs: float, their_std: float = 0.0) -> bool:
    """Return whether a published number lies within the noise of a measured one, by `NOISE_RULE`."""
    limit = TOLERANCE if ours.std is None else 2 * math.sqrt(ours.std**2 * (1 + 1 / ours.n) + their_std**2)
    return abs(ours.mean - theirs) <= limit + 1e-9


def beside_published(measured: Spread | None, theirs: tuple[float, float] | None) -> str:
    """Return a published number, with a mark that says whether it lies within noise of the measured one."""
    if theirs is None:
        return ""
    return f"{theirs[0]:.2f}" + ("" if measured is None else " ✓" if within_noise(measured, *theirs) else " ✗")


class Paired(NamedTuple):
    """A paired comparison: mean difference over the seeds that both have, and the p of a paired t-test."""

    difference: float
    p: float | None  # None: fewer than two pairs, or differences that are all the same
    pairs: int

    @property
    def verdict(self) -> str:
        """What the test shows: better, worse, no difference shown, or no test."""
        if self.p is None:
            return "no test"
        if self.p >= SIGNIFICANT:
            return "no difference shown"
        return "better" if self.difference > 0 else "worse"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired | None:
    """Compare values by seed; None if there is no seed that both have."""
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return None
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    mean = statistics.fmean(differences)
    if len(seeds) < 2 or statistics.stdev(differences) <= 1e-12 * max(1.0, abs(mean)):
        return Paired(mean, None, len(seeds))
    from scipy.stats import ttest_rel

    test = ttest_rel([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
    return Paired(mean, float(test.pvalue), len(seeds))


def probability(p: float) -> str:
    """Return a p in words."""
    return f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def ranks(values: Mapping[str, float]) -> dict[str, int]:
    """Return which of several values is the best (1) and the second (2), as printed with two decimals; ties share."""
    shown = {name: round(value, 2) for name, value in values.items()}
    best = sorted(set(shown.values()), reverse=True)[:2]
    return {name: best.index(value) + 1 for name, value in shown.items() if value in best}
