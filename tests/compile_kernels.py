"""Compile every kernel for sm_90 without a GPU: python tests/compile_kernels.py [0|1], half of them or all.

The interpreter accepts code that the compiler rejects. This compiles the tile shapes of all tables in every precision;
both image sizes, every term of the update, evaluation and custom losses in each; other parts, batch sizes and numbers
of classes in `bf16`. Errors are: more shared memory than the GPU has, spilled registers in the paper's setting (not in
`tf32`), and tiles that are overwritten while they are still read.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fedobp.engine.kernels.convolutions import ConvConfig, Convolutions, _Gradients
from fedobp.engine.kernels.param_layout import arrange
from fedobp.engine.kernels.shapes import Shapes
from fedobp.engine.kernels.step import Buffers, Samples, StepConfig, launches, refresh, splits_of
from fedobp.engine.kernels.tiles import EXACT, tiles_for

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8", torch.uint8: "*u8", torch.int32: "*i32",
         torch.int64: "*i64"}  # fmt: skip
SHARED = 227 * 1024
USAGE = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "--dump-resource-usage"]
PAPER_SETTING = False  # whether this is the paper's setting
compiled_keys: set[object] = set()
problems: list[str] = []


def overwritten_buffers(text):
    """Return the buffers that asynchronous copies in a loop write while they are still read.

    A buffer has a few slots, of which copies before the loop fill some. A copy in the loop fills the next slot, which
    must differ from the slot that this iteration's product reads, and from the previous iteration's if that product may
    still be running. A load into registers reads at once, but must not follow a copy into the same slot.
    """
    slots = {name: int(n) for name, n in re.findall(r"(%\S+) = ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x", text)}
    place, found = {}, set()
    for view in re.finditer(r"(%\S+) = ttg.memdesc_\w+ ([^\s\[]+)", text):
        place[view[1]] = place.get(view[2], view[2])
    into = re.compile(r"async_copy_global_to_local %\S+ (%[^\s,]+)")
    for loop in re.finditer(r"^( *)%\S+ = scf.for .*?^\1}", text, re.MULTILINE | re.DOTALL):
        ahead = Counter(place.get(to, to) for to in into.findall(text[: loop.start()]))
        reading, copied = [], {}
        for iteration, line in product((1, 2), loop[0].splitlines()):
            if dot := re.search(r"warp_group_dot ([^\s,]+), ([^\s,]+),.*isAsync = true", line):
                reading.append((iteration, {place.get(operand, operand) for operand in dot.groups()}))
            if wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
                reading = reading[max(0, len(reading) - int(wait[1])) :]
            if to := into.search(line):
                buffer = place.get(to[1], to[1])
                if any(
                    buffer in read and slots[buffer] <= ahead[buffer] + iteration - since for since, read in reading
                ):
                    found.add(buffer)
                copied[buffer] = iteration
            if load := re.search(r"local_load (%\S+)", line):
                buffer = place.get(load[1], load[1])
                if buffer in copied and slots[buffer] <= ahead[buffer] + copied[buffer] - iteration:
                    found.add(buffer)
    return found


@triton.jit
def summed_too(a, b, out, TILES: tl.constexpr):
    """A tile that a product reads and that is also summed: Triton 3.6 compiles this incorrectly."""
    r, n = tl.arange(0, 64), tl.arange(0, 64)
    z = tl.zeros((64, 64), tl.float32)
    total = tl.zeros((64,), tl.float32)
    for i in range(TILES):
        tile = tl.load(a + (i * 64 + r)[:, None] * 64 + n[None, :])
        z = tl.dot(tl.trans(tile), tl.load(b + (i * 64 + r)[:, None] * 64 + n[None, :]), z)
        total += tl.sum(tile.to(tl.float32), 0)
    tl.store(out + r[:, None] * 64 + n[None, :], z + total[None, :])


def compile_instead(self, *args, grid, warmup, **options):
    """Compile a kernel instead of launching it, and return its TTGIR; replaces JITFunction.run."""
    signature, constants, hints = {}, {}, {}
    for index, (parameter, value) in enumerate(zip(self.params, args, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], hints[index,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
    key = (self.__name__, tuple(signature.items()), tuple(constants.items()), tuple(options.items()))
    if key in compiled_keys:
        return None
    compiled_keys.add(key)
    about = f"{self.__name__} {options} {list(constants.values())}"
    kernel = triton.compile(
        ASTSource(self, signature, constants, hints), target=GPUTarget("cuda", 90, 32), options=options
    )
    if kernel.metadata.shared > SHARED:
        problems.append(f"{about} needs {kernel.metadata.shared} bytes of shared memory")
    # Triton 3.6 makes this kernel read beyond its shared memory where its operands are not copied asynchronously.
    text = kernel.asm["ttgir"]
    for place in re.findall(r"^(#\w+) = #ttg.nvmma_shared", text, re.MULTILINE):
        if self.__name__ == "weights_backward" and re.search(rf"local_alloc %\S+ : .*{place}, #smem", text):
            problems.append(f"{about} is not pipelined")
    if buffers := overwritten_buffers(text):
        problems.append(f"{about} overwrites {', '.join(sorted(buffers))} while it is read")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([*USAGE, file.name], capture_output=True, text=True, check=True).stdout
    spilled = int(re.search(r"STACK:(\d+)", usage)[1])  # these kernels use the stack for nothing else
    if spilled and PAPER_SETTING:
        problems.append(f"{about} spills {spilled} bytes")
    return text


def compile_custom_losses(shapes, precision, lanes):
    """Compile the kernels of custom losses' gradients, for batches and for single samples."""
    config = ConvConfig(shapes.side, shapes.channels, precision, tiles_for((9, 0), precision))
    sizes = ((32, shapes.channels, 5, 5), (32,), (64, 32, 5, 5), (64,))
    weights = [torch.zeros(lanes, *size) for size in sizes]
    for batch in (shapes.batch, 1):
        x = torch.zeros(lanes, batch, shapes.channels, shapes.side, shapes.side)
        out, *saved = Convolutions.apply(config, x, *weights)
        _Gradients.apply(config, out, *saved)


def compile_step(config, tiles, lanes):
    """Compile a step's kernels."""
    buf = Buffers(config, 1, 1, splits_of(config.shapes, tiles), torch.device("cpu"))
    samples = Samples(torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    for launch in launches(config, buf, tiles, lanes, lanes > EXACT, samples).values():
        launch()
    refresh(config, buf, lanes, samples)()


def main():
    """Compile all kernels, or the half that is asked for."""
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    JITFunction.run = compile_instead
    global PAPER_SETTING
    cifar, mnist = Shapes(32, 3, 10, 32), Shapes(28, 1, 10, 32)
    jobs, table = [], tiles_for((9, 0), "bf16")
    for tiles in table:
        jobs.append((StepConfig(cifar, "bf16", "all"), tiles, min(tiles.lanes, 160)))
        jobs.append((StepConfig(mnist, "bf16", "all", 31), tiles, min(tiles.lanes, 160)))
    jobs.append((StepConfig(Shapes(32, 3, 100, 64), "bf16", None), table[-1], 160))
    jobs.append((StepConfig(Shapes(28, 1, 62, 16), "bf16", "base", 5), table[0], 1))
    jobs.append((StepConfig(Shapes(32, 3, 128, 64), "bf16", "head", 16), table[-1], 160))
    for precision in ("tf32", "fp32"):
        table = tiles_for((9, 0), precision)
        jobs += [(StepConfig(cifar, precision, "all"), tiles, min(tiles.lanes, 160)) for tiles in table]
        jobs.append((StepConfig(mnist, precision, "all", 31), table[0], 1))
        jobs.append((StepConfig(Shapes(28, 1, 62, 64), precision, None), table[-1], 160))
    half = slice(int(sys.argv[1]), None, 2) if len(sys.argv) > 1 else slice(None)
    for job in jobs[half]:
        PAPER_SETTING = job[0] in (StepConfig(cifar, "bf16", "all"), StepConfig(cifar, "fp32", "all"))
        compile_step(*job)
    custom = [(cifar, "bf16", 1), (cifar, "bf16", 20), (mnist, "bf16", 10), (cifar, "tf32", 20), (mnist, "fp32", 10)]
    for job in custom[half]:
        PAPER_SETTING = job[:2] == (cifar, "bf16")
        compile_custom_losses(*job)
    vector, index = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    arrange[1, 1](vector, vector, index, 878538, 881696, 1024)
    arrange[1, 1](vector.to(torch.uint8), vector.to(torch.int8), index, 878538, 881696, 1024)
    if problems:
        sys.exit("\n".join(problems))
    tile = torch.zeros(1, dtype=torch.bfloat16)
    text = summed_too[1,](tile, tile, torch.zeros(1), 8, num_warps=4, num_stages=3)
    assert "overwrites %tile" in "".join(problems), "the check misses the race, or Triton no longer compiles it"
    [load] = re.findall(r".*local_load .*\n", text)
    waiting = text.replace("isAsync = true", "")
    assert not overwritten_buffers(waiting)
    assert overwritten_buffers(waiting.replace(load, "").replace("      scf.yield", f"{load}      scf.yield"))


if __name__ == "__main__":
    main()
