"""Races in a compiled kernel: shared memory that is overwritten while a matrix product still reads it.

A kernel's loop copies tiles into the slots of shared-memory buffers ahead of their use, and on compute capability 9.0
and 10.0 products read these slots asynchronously. Whether a copy may reach a slot that is still read depends on how
many slots the compiler gives a buffer and where it waits. Triton 3.6 and 3.7 give one slot too few to a tile with two
readers (Triton's issue 6691): a race that sometimes makes a sum wrong.

`hazards` executes the memory operations of a kernel's TTGIR, the last form of the program in which buffers have names:
scalar arithmetic, loops and both sides of branches. It reports each read of a slot before its copy has arrived, and
each slot that is written or freed while a product may read it or a copy is on its way to it. What it does not know
makes it raise `UnreadableError`, so another version of Triton cannot pass by looking different.
"""

import operator
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest

_ITERATIONS = 16  # of a loop whose end is not known: more than twice the slots of any buffer
_MOST = 1_000  # iterations of any loop
_NAME = re.compile(r"%[\w$.\-]+(?:#\d+)?")
_OPERATION = re.compile(r"^\s*(?:(%[\w$.\-]+)(?::(\d+))? = )?\"?([a-z]+\.[\w.]+)\"?(.*)$")
_LABEL = re.compile(r"\^bb\d+")
_LOCATION = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*$")
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "arith.addi": operator.add, "arith.subi": operator.sub, "arith.muli": operator.mul, "arith.xori": operator.xor,
    "arith.andi": operator.and_, "arith.ori": operator.or_, "arith.maxsi": max, "arith.minsi": min,
    "arith.remsi": operator.mod, "arith.divsi": operator.floordiv,  # of numbers that are not negative
    "arith.remui": operator.mod, "arith.divui": operator.floordiv,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "slt": operator.lt, "sle": operator.le, "sgt": operator.gt,
    "sge": operator.ge, "ult": operator.lt, "ule": operator.le, "ugt": operator.gt, "uge": operator.ge,
}  # fmt: skip
_VIEWS = ("ttg.memdesc_trans", "ttg.memdesc_reshape", "ttg.memdesc_reinterpret", "ttg.memdesc_subslice")
_NO_ACCESS = ("ttng.fence_async_shared",)


class UnreadableError(Exception):
    """The IR has an operation on shared memory that this check does not know."""


@dataclass(frozen=True)
class Slot:
    """A part of a buffer; `index` is None for a buffer as a whole."""

    buffer: str
    index: int | None = None

    def overlaps(self, other: "Slot") -> bool:
        """Return whether both may be the same memory."""
        return self.buffer == other.buffer and (self.index == other.index or None in (self.index, other.index))


Value = int | Slot | None  # of a name: a number, a part of a buffer, or not known


@dataclass
class _Operation:
    """One operation: the names that it defines, what it does, and the operations inside it."""

    results: tuple[str, ...]
    name: str
    text: str  # its operands, attributes and types
    operands: tuple[str, ...]
    regions: list[list["_Operation"]] = field(default_factory=list)

    def number(self, attribute: str) -> int:
        """Return an attribute that is a number."""
        found = re.search(rf"\b{attribute} = (\d+)", self.text)
        if found is None:
            raise UnreadableError(f"{self.name} has no {attribute}")
        return int(found[1])


@dataclass
class _Product:
    """An asynchronous product that may still run. On 10.0 a barrier's phase tells when it is done."""

    reads: tuple[Slot, ...]
    writes: Slot | None = None
    barrier: Slot | None = None
    phase: int = 0


@dataclass
class _InFlight:
    """Copies and products that were started and not waited for."""

    uncommitted: list[Slot] = field(default_factory=list)
    groups: list[list[Slot]] = field(default_factory=list)  # of copies
    products: list[_Product] = field(default_factory=list)
    arrivals: dict[Slot, int] = field(default_factory=dict)  # of a barrier: phases that products will end
    passed: dict[Slot, int] = field(default_factory=dict)  # of a barrier: phases that are known to be over

    def joined(self, other: "_InFlight") -> "_InFlight":
        """Return what may be in flight after one of two branches."""
        if self == other:
            return self
        none: list[Slot] = []
        pairs = zip_longest(reversed(self.groups), reversed(other.groups), fillvalue=none)
        groups = [one + another for one, another in pairs][::-1]
        products = [one for one in self.products if one not in other.products] + other.products
        arrivals = {slot: max(self.arrivals.get(slot, 0), n) for slot, n in (self.arrivals | other.arrivals).items()}
        passed = {slot: min(self.passed[slot], n) for slot, n in other.passed.items() if slot in self.passed}
        return _InFlight(self.uncommitted + other.uncommitted, groups, products, arrivals, passed)


def hazards(ttgir: str) -> list[str]:
    """Return the races of a kernel, one phrase each."""
    execution = _Execution()
    try:
        execution.run(_parsed(ttgir))
    except (IndexError, KeyError, ValueError) as error:  # an operation that is written in another way
        raise UnreadableError(f"it has an operation in a form that is not known ({error})") from error
    return list(dict.fromkeys(execution.found))


def has_asynchronous_products(ttgir: str) -> bool:
    """Return whether products read shared memory by themselves; otherwise they read registers, and cannot race."""
    return bool(re.search(r"warp_group_dot .*isAsync = true|tc_gen5_mma", ttgir))


def without_waits(ttgir: str) -> str:
    """Return a program that waits for nothing: `hazards` must find races in it, or it does not read this IR."""
    text = re.sub(r"(async_wait .*?\bnum = )\d+", r"\g<1>99", ttgir)
    text = re.sub(r"(warp_group_dot_wait .*?\bpendings = )\d+", r"\g<1>99", text)
    return re.sub(r".*\bwait_barrier .*\n", "", text)


def _parsed(ttgir: str) -> list[_Operation]:
    """Return the operations of a program, nested as its regions are."""
    regions: list[list[_Operation]] = [[]]
    owners: list[_Operation | None] = []
    last: _Operation | None = None

    def enter(owner: _Operation | None) -> None:
        owners.append(owner)
        regions.append([] if owner else regions[-1])
        if owner:
            owner.regions.append(regions[-1])

    for line in ttgir.splitlines():
        code = _LOCATION.sub("", line).strip()
        if code.startswith("}"):
            if not owners:
                raise UnreadableError("its brackets do not match")
            regions.pop()
            owner = owners.pop()
            if code.endswith("{"):  # `} else {`
                enter(owner)
            continue
        if label := _LABEL.match(code):
            regions[-1].append(_Operation((), "label", label[0], ()))
        if match := _OPERATION.match(code):
            result, count, name, text = match.groups()
            results = [f"{result}#{i}" for i in range(int(count))] if count else [result] if result else []
            last = _Operation(tuple(results), name, text, tuple(_NAME.findall(text.split(" : ", 1)[0])))
            regions[-1].append(last)
        if code.endswith("{"):
            enter(last if match else None)
    return regions[0]


def _in_order(operations: Sequence[_Operation]) -> Sequence[_Operation]:
    """Return the operations of a region with each block after those that lead to it."""
    if not any(one.name == "label" for one in operations):
        return operations
    blocks: dict[str, list[_Operation]] = {"": []}
    before: dict[str, set[str]] = {"": set()}
    block = ""
    for one in operations:
        if one.name == "label":
            block = one.text
            before.setdefault(block, set())
        for target in _LABEL.findall(one.text) if one.name.startswith("cf.") else ():
            before.setdefault(target, set()).add(block)
        blocks.setdefault(block, []).append(one)
    try:
        return [one for block in TopologicalSorter(before).static_order() for one in blocks[block]]
    except CycleError as error:
        raise UnreadableError("it has a loop that is not written as one") from error


class _Execution:
    """Executes operations, and notes races."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._values: dict[str, Value] = {}
        self._now = _InFlight()

    def run(self, operations: Sequence[_Operation]) -> tuple[Value, ...]:
        """Execute the operations of a region; return what it yields."""
        for operation in _in_order(operations):
            if operation.name == "scf.yield":
                return self._of(operation.operands)
            self._execute(operation)
        return ()

    def _of(self, names: Sequence[str]) -> tuple[Value, ...]:
        return tuple(self._values.get(name) for name in names)

    def _execute(self, one: _Operation) -> None:
        name, kind = one.name, one.name.split(".")[0]
        if name == "scf.for":
            self._loop(one)
        elif name == "scf.if":
            self._branch(one)
        elif name in ("tt.func", "tt.reduce", "tt.scan"):
            for region in one.regions:
                self.run(region)
        elif name == "arith.constant":
            self._set(one, _constant(one.text))
        elif name == "tt.get_program_id" and one.text.split()[0] == "z":
            self._set(one, 0)  # a `Launch` has at most two dimensions
        elif name in _ARITHMETIC or name in ("arith.cmpi", "arith.select", "tt.splat"):
            self._set(one, self._scalar(one))
        elif kind in ("ttg", "ttng") and ("memdesc" in one.text or "async" in name or "wait" in name):
            self._access(one)
        elif "memdesc" in one.text or one.regions or kind == "scf":
            raise UnreadableError(f"it has the operation {name}")

    def _set(self, one: _Operation, *values: Value) -> None:
        self._values.update(zip(one.results, values, strict=False))

    def _scalar(self, one: _Operation) -> Value:
        values = self._of(one.operands)
        if one.name == "tt.splat":
            return values[0]
        if one.name == "arith.select":
            if isinstance(values[0], int):
                return values[1] if values[0] else values[2]
            return values[1] if values[1] == values[2] else None
        first, second = values
        if one.name == "arith.andi" and 0 in values:
            return 0
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        if one.name == "arith.cmpi":
            return int(_COMPARISONS[one.text.split()[0].rstrip(",")](first, second))
        if second == 0 and ("div" in one.name or "rem" in one.name):
            return None
        return _ARITHMETIC[one.name](first, second)

    # Control flow.

    def _loop(self, one: _Operation) -> None:
        """Execute a loop; if its end is not known, until all slots have been used again."""
        index, low, high, step = one.operands[:4]
        inside, carried = one.operands[4::2], self._of(one.operands[5::2])
        start, end, by = (value if isinstance(value, int) else None for value in self._of((low, high, step)))
        start, by = start or 0, max(1, by or 1)
        for at in range(start, start + by * _ITERATIONS if end is None else min(end, start + by * _MOST), by):
            self._values.update(zip((index, *inside), (at, *carried), strict=True))
            carried = self.run(one.regions[0])
            self._check_lifetimes(one, carried)
        self._set(one, *carried)

    def _branch(self, one: _Operation) -> None:
        """Execute the side of a branch that is taken, or both if that is not known."""
        [condition] = self._of(one.operands[:1])
        sides = [*one.regions, []][:2]
        if isinstance(condition, int):
            self._set(one, *self.run(sides[not condition]))
            return
        before = deepcopy(self._now)
        first = self.run(sides[0])
        after, self._now = self._now, before
        second = self.run(sides[1])
        self._now = after.joined(self._now)
        self._set(one, *(a if a == b else None for a, b in zip(first, second, strict=False)))

    def _check_lifetimes(self, loop: _Operation, carried: Sequence[Value]) -> None:
        """Find buffers that an iteration allocates, which are free at its end, and that a product still reads."""
        inside = {one.results[0] for one in loop.regions[0] if one.name == "ttg.local_alloc"}
        kept = {value.buffer for value in carried if isinstance(value, Slot)}
        for slot in (slot for product in self._now.products for slot in product.reads):
            if slot.buffer in inside - kept:
                self.found.append(f"{slot.buffer} is freed while a product reads it")

    # Memory.

    def _access(self, one: _Operation) -> None:
        name, now = one.name, self._now
        if name in ("ttg.local_alloc", "ttng.tmem_alloc"):
            [result] = one.results
            self._set(one, Slot(result))
            if one.operands:
                self._write(Slot(result))
        elif name == "ttng.init_barrier":
            for phases in (now.arrivals, now.passed):
                phases.pop(self._slot(one, 0), None)
        elif name == "ttg.memdesc_index":
            buffer, index = self._of(one.operands[:2])
            if not isinstance(buffer, Slot) or not isinstance(index, int):
                raise UnreadableError("it indexes a buffer by a number that is not known")
            self._set(one, Slot(buffer.buffer, index))
        elif name in _VIEWS or name == "ttng.tmem_subslice":
            self._set(one, *self._of(one.operands[:1]))
        elif name == "ttg.async_copy_global_to_local":
            self._write(self._slot(one, 1))  # where it is masked out it writes zeros
            now.uncommitted.append(self._slot(one, 1))
        elif name == "ttg.async_commit_group":
            now.groups.append(now.uncommitted)
            now.uncommitted = []
        elif name == "ttg.async_wait":
            number = one.number("num")
            now.groups = now.groups[max(0, len(now.groups) - number) :]
        elif name == "ttg.local_load":
            self._read(self._slot(one, 0))
        elif name == "ttg.local_store":
            self._write(self._slot(one, 1))
        elif name == "ttng.inval_barrier":
            self._write(self._slot(one, 0), "freed")
        elif name == "ttg.local_dealloc":
            self._write(Slot(self._slot(one, 0).buffer), "freed")
        elif name == "ttng.warp_group_dot":
            reads = self._operands(one, one.text.split("->")[0].count("!ttg.memdesc"))
            if "isAsync = true" in one.text:
                now.products.append(_Product(reads))
            else:  # it waits for itself, and with that for those before it
                now.products = []
        elif name == "ttng.warp_group_dot_wait":
            number = one.number("pendings")
            now.products = now.products[max(0, len(now.products) - number) :]
            self._set(one, *self._of(one.operands))
        elif name == "ttng.tc_gen5_mma":
            self._tensor_product(one)
        elif name == "ttng.wait_barrier":
            self._wait(one)
        elif name == "ttng.tmem_load":
            self._result(self._slot(one, 0))
        elif name == "ttng.tmem_store":
            self._result(self._slot(one, 1))
            self._write(self._slot(one, 1))  # it may hold an operand
        elif name not in _NO_ACCESS:
            raise UnreadableError(f"it has the operation {name}")

    def _slot(self, one: _Operation, at: int) -> Slot:
        value = self._values.get(one.operands[at])
        if not isinstance(value, Slot):
            raise UnreadableError(f"{one.name} has an operand whose buffer is not known")
        return value

    def _operands(self, one: _Operation, count: int) -> tuple[Slot, ...]:
        """Return the operands of a product that are in shared memory, of which there must be `count`, and read them."""
        slots = tuple(value for value in self._of(one.operands[:2]) if isinstance(value, Slot))
        if len(slots) != count:
            raise UnreadableError(f"{one.name} has an operand whose buffer is not known")
        for slot in slots:
            self._read(slot)
        return slots

    def _read(self, slot: Slot) -> None:
        if any(slot.overlaps(copy) for group in (*self._now.groups, self._now.uncommitted) for copy in group):
            self.found.append(f"{slot.buffer} is read before its copy has arrived")

    def _write(self, slot: Slot, how: str = "overwritten") -> None:
        if any(slot.overlaps(copy) for group in (*self._now.groups, self._now.uncommitted) for copy in group):
            self.found.append(f"{slot.buffer} is {how} while a copy is on its way to it")
        if any(slot.overlaps(read) for product in self._now.products for read in product.reads):
            self.found.append(f"{slot.buffer} is {how} while a product reads it")

    def _result(self, slot: Slot) -> None:
        if any(product.writes and slot.overlaps(product.writes) for product in self._now.products):
            self.found.append(f"{slot.buffer} is used before its product is complete")

    def _tensor_product(self, one: _Operation) -> None:
        """Start a product of 10.0: `mma a, b, sums, use_sums, predicate, barrier[predicate]`."""
        if not self._is_on(one.operands[4]):
            return
        reads, sums, barrier = self._operands(one, 2), self._slot(one, 2), self._slot(one, 5)
        phase = self._now.arrivals.get(barrier, 0)
        self._now.arrivals[barrier] = phase + 1
        self._now.products.append(_Product((*reads, barrier), sums, barrier, phase))

    def _is_on(self, predicate: str) -> bool:
        value = self._values.get(predicate)
        if not isinstance(value, int):
            raise UnreadableError("it starts a product, or waits for one, on a condition that is not known")
        return value != 0

    def _wait(self, one: _Operation) -> None:
        """Wait until the phase of a barrier with the given parity is over; products end in order.

        The operation is `wait barrier, parity[, predicate] [deps ...]`.
        """
        predicate = _NAME.findall(one.text.split(" deps ")[0].split(" : ")[0])[2:]
        if predicate and not self._is_on(predicate[0]):
            return
        barrier, parity = self._slot(one, 0), self._values.get(one.operands[1])
        if not isinstance(parity, int):
            raise UnreadableError("it waits for a phase that is not known")
        passed = self._now.passed.get(barrier, 0)
        passed += (passed - 1) % 2 != parity
        self._now.passed[barrier] = passed
        done = [at for at, p in enumerate(self._now.products) if p.barrier == barrier and p.phase < passed]
        self._now.products = self._now.products[done[-1] + 1 :] if done else self._now.products


def _constant(text: str) -> Value:
    """Return the value of a constant, or the value that all entries of a tensor have."""
    found = re.match(r"\s*(?:dense<)?(true|false|-?\d+)>?(?: : |$)", text)
    if not found:
        return None
    return {"true": 1, "false": 0}.get(found[1]) if found[1] in ("true", "false") else int(found[1])
