"""Compile the kernels without a card, for all cards: python tests/compile_kernels.py [--all] [--cards 8.6,9.0].

The interpreter accepts code that the compiler rejects. By default one tile shape of every kernel is compiled for every
card in bf16; with --all, every entry of every table in all precisions, with both image sizes, small and large batches
and numbers of classes, every term of the update, evaluation and custom losses. Errors are: a kernel that does not
compile, needs more shared memory than the card or its bound says, or has a race; a race that the check does not find in
the known bad specimens; and on 9.0 spilled registers in the paper's setting (not in `tf32`).
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fedobp.engine.kernels.cards import known_card
from fedobp.engine.kernels.checks import hazard_check, problems
from fedobp.engine.kernels.convolutions import ConvConfig, Convolutions, _Gradients
from fedobp.engine.kernels.diagnosis import compilable
from fedobp.engine.kernels.launches import CompileError, Launch
from fedobp.engine.kernels.param_layout import arrange
from fedobp.engine.kernels.shapes import Shapes
from fedobp.engine.kernels.shared_memory import fitting_table, shared_bound
from fedobp.engine.kernels.step import StepConfig
from fedobp.engine.kernels.tiles import EXACT, default_table, shipped_table

CARDS = "8.0,8.6,8.9,9.0,10.0,12.0"
USAGE = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "--dump-resource-usage"]
CIFAR, MNIST = Shapes(32, 3, 10, 32), Shapes(28, 1, 10, 32)
REGISTERS = "a race cannot occur: products read registers on this card"
RACES = {"9.0": "finds the known race in summed_too", "10.0": "finds the known race in read_twice"}
if triton.__version__.startswith("3.6."):
    RACES["10.0"] = "the known races do not occur: the compiler waits for the products"


class Compiler:
    """Compiles launches for a card, each variant once, and notes what is wrong."""

    def __init__(self, version):
        self.card, self.wrong, self.seen, self.largest = known_card(version), [], set(), 0

    def check(self, launch, name="", bound=None, may_spill=True):
        if launch.variant in self.seen:
            return
        self.seen.add(launch.variant)
        name = name or launch.kernel.__name__
        about = f"{self.card.version}: {name}, {launch.warps} warps, {launch.stages} stages, {launch.constants}"
        try:
            kernel = launch.compiled_for(self.card.capability)
            self.wrong += [f"{about} {problem}" for problem in problems(kernel, self.card)]
        except CompileError as error:
            self.wrong.append(f"{about}: {error}")
            return
        self.largest = max(self.largest, kernel.metadata.shared)
        if bound is not None and kernel.metadata.shared > bound:
            self.wrong.append(f"{about} needs {kernel.metadata.shared} bytes, more than its bound {bound}")
        if not may_spill and (spilled := spills(kernel)):
            self.wrong.append(f"{about} spills {spilled} bytes")

    def check_specimens(self):
        found, expected = hazard_check(self.card), RACES.get(self.card.version, REGISTERS)
        if found != (True, expected):
            self.wrong.append(f"{self.card.version}: expected the check to say '{expected}', and it says {found}")

    def check_step(self, config, entry, padded):
        shapes, precision = config.shapes, config.precision
        [tiles] = fitting_table([entry], shapes, precision, self.card)
        paper = (shapes, config.part, config.rule) == (CIFAR, "all", 0) and precision != "tf32"
        for name, launch in compilable(config, tiles, padded).items():
            tile = getattr(tiles, name, None)
            bound = shared_bound(name, tile, shapes, precision, self.card.capability) if tile else None
            self.check(launch, name, bound, may_spill=self.card.version != "9.0" or not paper)

    def check_custom_losses(self, shapes, table, precision, lanes):
        """The kernels of custom losses' gradients, for batches and for single samples."""
        config = ConvConfig(shapes.side, shapes.channels, precision, table.entries, self.card)
        sizes = ((32, shapes.channels, 5, 5), (32,), (64, 32, 5, 5), (64,))
        weights = [torch.zeros(lanes, *size) for size in sizes]
        for batch in (shapes.batch, 1):
            x = torch.zeros(lanes, batch, shapes.channels, shapes.side, shapes.side)
            out, *saved = Convolutions.apply(config, x, *weights)
            _Gradients.apply(config, out, *saved)


class Driver:
    """A driver without a card, for Triton's own way from a launch to a compiled kernel."""

    @staticmethod
    def launcher_cls(src, metadata):
        """Make no launcher: that needs CUDA's library."""

    def __init__(self, capability):
        major, minor = capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self._target


def program(kernel):
    """A kernel's IR without the lines of the source."""
    return re.sub(r" loc\(.*", "", kernel.asm["ttgir"])


def check_launches(version):
    """A launch on the card uses the kernels that are compiled here; a process has one card."""
    compiler = Compiler(version)
    driver.set_active(Driver(compiler.card.capability))
    table = shipped_table(compiler.card.capability, "bf16") or default_table(compiler.card.capability)
    for name, launch in compilable(StepConfig(CIFAR, "bf16", "all"), table.entries[0], padded=False).items():
        # Also the same entry of Triton's cache, in which a launch finds what other processes have compiled.
        here, launched = launch.compiled_for(compiler.card.capability), launch.compiled()
        if (launched.hash, program(launched)) != (here.hash, program(here)):
            compiler.wrong.append(f"{version}: {name} is another kernel when it is launched")
    return compiler.wrong


def spills(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([*USAGE, file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])  # these kernels use the stack for nothing else


def tables(everything, capability, precision):
    """A card's tables: where it has none of its own, with --all also that of 9.0, whose shapes tuning may find."""
    own, hopper = shipped_table(capability, precision), shipped_table((9, 0), precision)
    if not own and everything:
        warps = 2 if capability[0] == 10 else None  # with more the compiler fails
        entries = [
            replace(one, weights_backward=one.weights_backward._replace(warps=warps or one.weights_backward.warps))
            for one in hopper.entries
        ]
        yield replace(hopper, entries=tuple(entries))
    yield own or default_table(capability)


def steps(everything, precision, table):
    """The configurations, entries and kinds of lanes to compile."""
    last = table.entries[-1]
    if not everything:
        yield StepConfig(CIFAR, precision, "all"), last, True
        yield StepConfig(Shapes(32, 3, 10, 64), precision, None), last, True
        return
    for entry in table.entries:
        for padded in {entry.lanes > EXACT, len(table.entries) == 1}:
            yield StepConfig(CIFAR, precision, "all"), entry, padded
            yield StepConfig(Shapes(32, 3, 128, 64), precision, "all", 1), entry, padded
            yield StepConfig(Shapes(32, 3, 100, 64), precision, None), entry, padded
    for entry, padded in ((table.entries[0], False), (last, True)):
        yield StepConfig(MNIST, precision, "all", 31), entry, padded
        yield StepConfig(Shapes(28, 1, 2, 16), precision, "base", 5), entry, padded
        yield StepConfig(Shapes(32, 4, 100, 64), precision, "head", 16), entry, padded
        yield StepConfig(Shapes(28, 1, 62, 64), precision, None), entry, padded


def main():
    """Compile, and exit with what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--cards", default=CARDS)
    given = parser.parse_args()
    assert not triton.knobs.runtime.interpret, "unset TRITON_INTERPRET"
    wrong = check_launches(given.cards.split(",")[0])
    for version in given.cards.split(","):
        compiler = Compiler(version)
        # Custom losses launch their kernels by themselves.
        Launch.compiled = lambda launch, card=compiler.card: launch.compiled_for(card.capability)
        Launch.__call__ = lambda launch, compiler=compiler: compiler.check(launch)
        compiler.check_specimens()
        for precision in ("bf16", "tf32", "fp32") if given.all else ("bf16",):
            for table in tables(given.all, compiler.card.capability, precision):
                for config, entry, padded in steps(given.all, precision, table):
                    compiler.check_step(config, entry, padded)
                for shapes, lanes in ((CIFAR, 1), (CIFAR, 20), (MNIST, 10)) if given.all else ((MNIST, 20),):
                    compiler.check_custom_losses(shapes, table, precision, lanes)
        vector, index = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
        compiler.check(Launch(arrange, (1, 1), (vector, vector, index, 878538, 881696), (1024,)))
        masks = vector.to(torch.uint8), vector.to(torch.int8)
        compiler.check(Launch(arrange, (1, 1), (*masks, index, 878538, 881696), (1024,)))
        sys.stdout.write(
            f"Triton {triton.__version__}, {version}: {len(compiler.seen)} kernels, at most {compiler.largest} bytes "
            f"of shared memory, {len(compiler.wrong)} problems\n"
        )
        sys.stdout.flush()
        wrong += compiler.wrong
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
