"""What makes a client's samples differ from the dataset's: changed inputs, changed labels, and the client's group."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray


@dataclass(frozen=True)
class ClientChange:
    """The change of a client's samples; none by default. Strengths are 0 to 1, that of noise may be larger."""

    turns: int = 0  # rotations of images by 90 degrees, counter-clockwise
    noise: float = 0.0  # standard deviation, relative to the largest byte or to a float feature's deviation
    seed: int = 0  # for the noise
    blur: float = 0.0  # Gaussian; at 1 its deviation is sqrt(side / 8) pixels, with the shorter side of an image
    contrast: float = 0.0  # the share of an image's contrast that is taken away
    colour: float = 0.0  # the share of each colour channel that is replaced by the one before it
    labels: tuple[int, ...] = ()  # what label 0, 1, ... becomes; (): labels stay
    group: int | None = None  # known in simulations; None: clients with the same rotation are a group

    def is_valid(self, clients: int, labels: int) -> bool:
        """Return whether it can be the change of one of so many clients, whose labels are 0 to `labels` - 1."""
        return (
            0 <= self.turns < 4
            and 0 <= self.noise < math.inf
            and self.seed >= 0
            and all(0 <= strength <= 1 for strength in (self.blur, self.contrast, self.colour))
            and len(self.labels) in (0, labels)
            and all(isinstance(label, int | np.integer) and 0 <= label < labels for label in self.labels)
            and (self.group is None or (isinstance(self.group, int | np.integer) and 0 <= self.group < clients))
        )

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Return why inputs of a shape cannot be changed so, and what can be done; None if they can."""
        images, noise = len(shape) > 1, "use --partition-set change=noise"
        if self.turns and not (images and shape[0] == shape[1]):
            return f"cannot be rotated: {noise}"
        if (self.blur or self.contrast) and not images:
            return f"are no images, so they have no {'sharpness' if self.blur else 'contrast'}: {noise}"
        if self.colour and (len(shape) < 3 or shape[2] < 2):
            return f"have no colour channels: use --partition-set change={'contrast' if images else 'noise'}"
        return None


UNCHANGED = ClientChange()


class InputRange(NamedTuple):
    """The range of all inputs of a dataset, and the unit of noise."""

    low: float
    high: float
    unit: NDArray[np.float64]

    @classmethod
    def of(cls, x: NDArray[Any]) -> "InputRange":
        """Return that of inputs: bytes, float images or tables."""
        if x.dtype == np.uint8:
            # The largest value is white: 255 in most datasets, 16 in the digits.
            return cls(0.0, float(x.max()), np.array(float(x.max())))
        unit = x.std(axis=(0, 1, 2)[: 1 if x.ndim == 2 else 3], dtype=np.float64)
        # Images are clipped to their range; features of tables have no bounds.
        return cls(float(x.min()), float(x.max()), unit) if x.ndim > 2 else cls(-math.inf, math.inf, unit)


def changed_inputs(x: NDArray[Any], change: ClientChange, within: InputRange) -> NDArray[Any]:
    """Return a client's inputs [n, H, W], [n, H, W, channels] or [n, features], changed."""
    found: NDArray[Any] = np.rot90(x, change.turns, axes=(1, 2)) if change.turns else x
    if change.blur:
        # One pixel in the digits, two in 32x32: visible and not destructive at both, as a share of the side is not.
        found = blurred(found, change.blur * math.sqrt(min(x.shape[1:3]) / 8))
    if change.contrast:
        mean = found.mean(axis=tuple(range(1, x.ndim)), keepdims=True, dtype=np.float64)
        found = mean + (1 - change.contrast) * (found - mean)
    if change.colour:
        found = (1 - change.colour) * found + change.colour * np.roll(found, 1, axis=3)
    if change.noise:
        found = found + change.noise * within.unit * default_rng(change.seed).standard_normal(found.shape)
    if found.dtype == x.dtype:
        return found
    clipped: NDArray[Any] = np.clip(np.rint(found) if x.dtype == np.uint8 else found, within.low, within.high)
    return clipped


def blurred(images: NDArray[Any], deviation: float) -> NDArray[np.float64]:
    """Return images [n, H, W, ...] after a Gaussian blur; beyond its edge an image goes on as at the edge."""
    reach = math.ceil(3 * deviation)
    with np.errstate(over="ignore"):  # a tiny deviation gives neighbours the weight exp(-inf) = 0
        kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    found = images.astype(np.float64)
    for axis in (1, 2):  # the kernel is a product of one along each axis
        size = found.shape[axis]
        padded = np.pad(found, [(reach, reach) if at == axis else (0, 0) for at in range(found.ndim)], mode="edge")
        windows = (np.take(padded, range(at, at + size), axis=axis) for at in range(2 * reach + 1))
        found = sum((weight * window for weight, window in zip(kernel, windows, strict=True)), np.zeros(()))
        found = found / kernel.sum()
    return found
