"""Kernels in Triton's interpreter: for tests without a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it exists for Linux only")

from fedobp.engine.kernels.fused import Fused
from fedobp.engine.kernels.tiles import Tile, Tiles

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted only without a GPU")
CPU = torch.device("cpu")
# Few large tiles: the interpreter is slow, and its time grows with their number.
LARGE = Tiles(
    1 << 30, Tile(256, 3, 4, 1), Tile(256, 0, 4, 1), Tile(128, 256, 4, 1), Tile(256, 0, 4, 1), Tile(64, 256, 4, 1),
    Tile(256, 2, 4, 1), Tile(256, 256, 4, 1), (3, 2),
)  # fmt: skip


def interpreted(problem, tiles=LARGE):
    return Fused(problem.model, problem.case.batch, "fp32", [tiles], problem.device)
