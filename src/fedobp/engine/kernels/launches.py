"""A kernel's launch, and its compilation for a card that need not be there."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedobp.engine.kernels.compilers import Description, compile_described
from fedobp.errors import first_line

_TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip


class CompileError(Exception):
    """Triton cannot compile a kernel: the first line of what it says."""


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, its arguments and the compiler's options: a call launches it."""

    kernel: Any
    grid: tuple[int] | tuple[int, int]
    args: tuple[Any, ...]  # tensors, and numbers that the compiler does not know
    constants: tuple[Any, ...]
    warps: int = 4
    stages: int = 3

    def __call__(self) -> None:
        """Launch the kernel; the first launch compiles it."""
        self.kernel[self.grid](*self.args, *self.constants, num_warps=self.warps, num_stages=self.stages)

    def compiled(self) -> Any:
        """Return the kernel compiled for the current card, as a launch would use it, without launching it.

        Its launcher, for which Triton 3.6 runs a C compiler, is then in Triton's cache on disk.
        """
        import triton

        options = {"num_warps": self.warps, "num_stages": self.stages}
        kernel = self.kernel.warmup(*self.args, *self.constants, grid=self.grid, **options)
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    @property
    def variant(self) -> Hashable:
        """What the compiler sees of it: launches of one variant share a compiled kernel."""
        types = tuple(one.dtype if isinstance(one, Tensor) else int for one in self.args)
        return self.kernel, types, self.constants, self.warps, self.stages

    def description(self, capability: tuple[int, int]) -> Description:
        """Return what the compiler needs to know, to compile it for a compute capability."""
        types = [_TYPES[value.dtype] if isinstance(value, Tensor) else "i32" for value in self.args]
        names = self.kernel.__module__, self.kernel.__name__
        return Description(*names, types, self.constants, self.warps, self.stages, capability)

    def compiled_for(self, capability: tuple[int, int]) -> Any:
        """Compile the kernel for a compute capability; no card is needed, and Triton caches the result."""
        try:
            return compile_described(self.description(capability))
        except Exception as error:  # the compiler and its assembler raise their own, unrelated classes
            raise CompileError(first_line(error)) from error
