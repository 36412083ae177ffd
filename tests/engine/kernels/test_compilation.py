import os
import subprocess
from pathlib import Path

import pytest

from engine.kernels.interpreted import WITHOUT_GPU

pytestmark = WITHOUT_GPU


@pytest.mark.parametrize("half", [0, 1])
def test_every_kernel_compiles_for_the_gpu(half, ran):
    """In a separate process, because the kernels of this one are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = ran(Path(__file__).parents[2] / "compile_kernels.py", half, env=environment, stderr=subprocess.STDOUT)
    assert done.code == 0, done.out
