"""What the kernels would do on a card, whether or not it is there: for `fedobp doctor`, and for tests."""

from typing import TYPE_CHECKING, Any

import torch

from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.dispatch import Unusable, card_problem, checked, known_table, triton_problem
from fedobp.engine.kernels.shared_memory import fitting_table
from fedobp.engine.kernels.tiles import EXACT, Table, Tiles, default_table, shipped_table
from fedobp.errors import first_line
from fedobp.models import Model
from fedobp.progress import report

if TYPE_CHECKING:
    from fedobp.engine.kernels.launches import Launch
    from fedobp.engine.kernels.step import KernelPrecision, StepConfig


def diagnosis(card: Card, precision: "KernelPrecision", *, present: bool) -> dict[str, Any]:
    """Return whether the kernels would run on a card, why, and with which tile shapes.

    Where Triton is installed, the kernels of the paper's CIFAR10 step are compiled for the card, with the first and
    the last entry of the table, and checked. `present` says that the card is in this machine.
    """
    problem = card_problem(card) or triton_problem(launches=present)
    # The user's own tables are kept by Triton's version.
    known = shipped_table(card.capability, precision) if problem else known_table(card, precision)
    table = known or default_table(card.capability)  # from which a run would tune first
    found: dict[str, Any] = {
        "card": card.name,
        "capability": card.version,
        "shared_memory": card.shared,
        "precision": precision,
        "table": {"source": table.source, "hash": table.hash},
        "hazards": None,
        "kernels": [],
    }
    if problem:
        return {**found, "on": False, "why": problem}
    from fedobp.engine.kernels.checks import hazard_check

    check = hazard_check(card)
    found["hazards"] = check.sentence
    if not check.readable:
        return {**found, "on": False, "why": f"kernels cannot be checked for races: {check.sentence}"}
    found["kernels"] = _compiled(card, table, precision)
    wrong = [f"{one['kernel']} {problem}" for one in found["kernels"] for problem in one["problems"]]
    if wrong:
        return {**found, "on": False, "why": "; ".join(wrong)}
    why = "every kernel compiles, fits and has no race"
    if not present:
        return {**found, "on": True, "why": f"{why} (compiled, not run)"}
    if table.source == "default":
        return {**found, "on": True, "why": f"{why}; the first run tunes for up to a minute"}
    try:
        checked(Model("cnn", (3, 32, 32), 10), 32, precision, "auto", torch.device("cuda"))
    except Unusable as reason:
        return {**found, "on": False, "why": str(reason)}
    except torch.OutOfMemoryError as error:
        return {**found, "on": False, "why": f"the card has too little memory for the self-check ({first_line(error)})"}
    return {**found, "on": True, "why": f"{why}; the self-check has passed"}


def _compiled(card: Card, table: Table, precision: "KernelPrecision") -> list[dict[str, Any]]:
    """Compile a step's kernels with the first and the last entry; return what each needs, and what is wrong with it."""
    from fedobp.engine.kernels.checks import problems
    from fedobp.engine.kernels.launches import CompileError
    from fedobp.engine.kernels.shapes import Shapes
    from fedobp.engine.kernels.step import StepConfig

    config = StepConfig(Shapes(32, 3, 10, 32), precision, "all")
    ends = list(dict.fromkeys([table.entries[0], table.entries[-1]]))
    chosen = [
        (name, min(entry.lanes, EXACT + 1), launch)
        for entry in fitting_table(ends, config.shapes, precision, card)
        for name, launch in compilable(config, entry, entry.lanes > EXACT).items()
    ]
    rows = []
    for at, (name, lanes, launch) in enumerate(chosen):
        report(f"compiling {name} for {card.version}", at / len(chosen))
        try:
            kernel = launch.compiled_for(card.capability)
            row = {"shared_memory": kernel.metadata.shared, "problems": problems(kernel, card)}
        except CompileError as error:
            row = {"shared_memory": None, "problems": [f"does not compile ({error})"]}
        rows.append({"kernel": name, "lanes": lanes, **row})
    return rows


def compilable(config: "StepConfig", tiles: Tiles, padded: bool) -> "dict[str, Launch]":
    """Return the launches of a step on buffers of one lane on the CPU, which can be compiled for any card."""
    from fedobp.engine.kernels.step import Buffers, Samples, launches, refresh, splits_of

    buffers = Buffers(config, 1, 1, splits_of(config.shapes, tiles), torch.device("cpu"))
    samples = Samples(torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    step = launches(config, buffers, tiles, 1, padded, samples)
    return {**step, "first batch": refresh(config, buffers, 1, samples)}
