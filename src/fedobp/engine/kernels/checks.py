"""Whether a compiled kernel can be trusted: it fits the card, and no operation overwrites what another one reads."""

import re
from typing import Any, NamedTuple

from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.hazards import UnreadableError, has_asynchronous_products, hazards, without_waits
from fedobp.engine.kernels.launches import CompileError


def problems(kernel: Any, card: Card, *, must_read: bool = True) -> list[str]:
    """Return what is wrong with a compiled kernel on a card, one phrase each.

    IR that cannot be read is a problem unless `must_read` is false: `--kernels on` allows it.
    """
    found, ttgir = [], kernel.asm["ttgir"]
    if kernel.metadata.shared > card.shared:
        found.append(f"needs {kernel.metadata.shared:,} bytes of shared memory, and a block has {card.shared:,}")
    if kernel.metadata.name == "weights_backward" and _is_stored_from_registers(ttgir):
        found.append("has a product whose operand is not copied asynchronously")
    try:
        return found + hazards(ttgir)
    except UnreadableError as error:
        return [*found, f"has IR that cannot be read: {error}"] if must_read else found


def _is_stored_from_registers(ttgir: str) -> bool:
    """Return whether a product of 9.0 reads an operand that was stored from registers.

    Triton 3.6 makes `weights_backward` read beyond its shared memory then, on an H200.
    """
    operands = re.findall(r"warp_group_dot %[^\s,]+, (%[^\s,]+),", ttgir)
    return any(re.search(rf"{re.escape(name)} = ttg.local_alloc %", ttgir) for name in operands)


class HazardCheck(NamedTuple):
    """Whether the check for races reads what the installed Triton compiles for a card."""

    readable: bool
    sentence: str


def hazard_check(card: Card) -> HazardCheck:
    """Compile known bad kernels for a card and look for their races.

    The check must also find races where the waits of these kernels are removed: then it reads copies, products and
    waits as this version of Triton writes them.
    """
    from fedobp.engine.kernels.specimens import specimens

    raced, asynchronous = [], False
    for name, launch in specimens(card.capability).items():
        try:
            ttgir = launch.compiled_for(card.capability).asm["ttgir"]
            asynchronous |= has_asynchronous_products(ttgir)
            if not hazards(without_waits(ttgir)):
                return HazardCheck(False, f"no race is found in {name} without its waits")
            if hazards(ttgir):
                raced.append(name)
        except UnreadableError as error:
            return HazardCheck(False, f"the IR of {name} cannot be read: {error}")
        except CompileError as error:
            return HazardCheck(False, f"{name} cannot be compiled: {error}")
    if not asynchronous:
        return HazardCheck(True, "a race cannot occur: products read registers on this card")
    if raced:
        return HazardCheck(True, f"finds the known race in {', '.join(raced)}")
    return HazardCheck(True, "the known races do not occur: the compiler waits for the products")
