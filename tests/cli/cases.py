"""Settings and files shared by the tests of commands."""

import numpy as np

TINY = ("--clients", 5, "--rounds", 2, "--epochs", 1, "--model", "mlp")


def write_npz(path, n=60, shape=(8, 8), labels=3, **more):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (n, *shape), dtype=np.uint8)
    np.savez(path, x=x, y=np.arange(n) % labels, **more)
    return path
