"""Races in small programs, written by hand in the form that Triton prints."""

import pytest

from fedobp.engine.kernels.hazards import UnreadableError, has_asynchronous_products, hazards, without_waits

TILE = "!ttg.memdesc<64x64xbf16, #shared, #smem, mutable>"
BARRIER = "!ttg.memdesc<1xi64, #shared1, #smem, mutable>"
CONSTANTS = (
    "\n".join(f"    %c{n} = arith.constant {n} : i32" for n in range(9))
    + """
    %last = arith.constant -1 : i32
    %true = arith.constant true
    %false = arith.constant false
    %sums = arith.constant dense<0.000000e+00> : tensor<64x64xf32, #mma>
"""
)


def program(body):
    return f"module {{\n  tt.func public @kernel(%p: !tt.ptr<bf16>) {{\n{CONSTANTS}{body}\n    tt.return\n  }}\n}}\n"


def alloc(name, slots=None):
    slots = "" if slots is None else f"{slots}x"
    return f"    %{name} = ttg.local_alloc : () -> !ttg.memdesc<{slots}64x64xbf16, #shared, #smem, mutable>\n"


def slot(name, of, index):
    buffer = "!ttg.memdesc<3x64x64xbf16, #shared, #smem, mutable>"
    return f"    %{name} = ttg.memdesc_index %{of}[%{index}] : {buffer} -> {TILE} loc(#loc1)\n"


def copy(to, mask=""):
    mask = f" mask %{mask}" if mask else ""
    return (
        f"    %t = ttg.async_copy_global_to_local %p, %{to}{mask} : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>\n"
        "    %g = ttg.async_commit_group tokens %t\n"
    )


def arrive(groups):
    return f"    %w = ttg.async_wait %g {{num = {groups} : i32}}\n"


def product(a, b, asynchronous=True):
    how = ", isAsync = true" if asynchronous else ""
    return f"    %z = ttng.warp_group_dot %{a}, %{b}, %sums {{inputPrecision = 0 : i32{how}}} : {TILE} * {TILE} -> t\n"


def finish(pendings):
    return f"    %y = ttng.warp_group_dot_wait %z {{pendings = {pendings} : i32}} : t\n"


def next_slot(name, of, slots):
    return (
        f"    %{name}_up = arith.addi %{of}, %c1 : i32\n"
        f"    %{name}_over = arith.cmpi sge, %{name}_up, %c{slots} : i32\n"
        f"    %{name} = arith.select %{name}_over, %c0, %{name}_up : i32\n"
    )


def pipeline(slots, pendings, waits=1, iterations=8, mask=""):
    """Copies run two tiles ahead of a loop of products."""
    body = alloc("a", slots) + slot("s0", "a", "c0") + copy("s0") + slot("s1", "a", "c1") + copy("s1")
    body += (
        f"    %r:2 = scf.for %i = %c0 to %c{iterations} step %c1 iter_args(%read = %last, %fill = %c1) -> (i32, i32) "
        ": i32 {\n"
    )
    body += next_slot("from", "read", slots) + next_slot("to", "fill", slots)
    body += (
        f"    %more = arith.cmpi slt, %i, %c{iterations - 2} : i32\n    %mask = tt.splat %more : i1 -> tensor<64xi1>\n"
    )
    body += arrive(waits) + slot("now", "a", "from") + product("now", "now") + finish(pendings)
    body += slot("next", "a", "to") + copy("next", mask)
    body += "    scf.yield %from, %to : i32, i32\n    }\n" + finish(0) + arrive(0)
    return program(body + "    ttg.local_dealloc %a : !ttg.memdesc<x>\n")


OVERWRITTEN = ["%a is overwritten while a product reads it"]


@pytest.mark.parametrize(
    ("slots", "pendings", "found"),
    [
        (3, 1, []),  # the copy fills the slot of the product before the last, which is done
        (2, 1, OVERWRITTEN),  # it fills the slot of the product that may still run
        (2, 0, []),
        (3, 2, OVERWRITTEN),
        (4, 2, []),
    ],
)
def test_a_copy_must_not_reach_a_slot_that_a_product_may_read(slots, pendings, found):
    assert hazards(pipeline(slots, pendings)) == found


def test_a_tile_must_have_arrived_before_it_is_read():
    assert hazards(pipeline(4, 1, waits=2)) == ["%a is read before its copy has arrived"]
    early = alloc("a", 3) + slot("s", "a", "c0") + copy("s")
    load = f"    %x = ttg.local_load %s : {TILE} -> tensor<64x64xbf16>\n"
    assert hazards(program(early + load)) == ["%a is read before its copy has arrived"]
    assert hazards(program(early + arrive(0) + load)) == []
    assert hazards(program(early + arrive(0) + load + copy("s"))) == []


def test_a_slot_is_left_alone_while_a_copy_is_on_its_way():
    start = alloc("a", 3) + slot("s", "a", "c0") + slot("other", "a", "c1") + copy("s")
    wrong = "while a copy is on its way to it"
    store = f"    ttg.local_store %x, %s : tensor<64x64xbf16> -> {TILE}\n"
    assert hazards(program(start + store)) == hazards(program(start + copy("s"))) == [f"%a is overwritten {wrong}"]
    assert hazards(program(start + "    ttg.local_dealloc %a : !ttg.memdesc<x>\n")) == [f"%a is freed {wrong}"]
    assert hazards(program(start + copy("other"))) == []
    assert hazards(program(start + arrive(0) + store + copy("s"))) == []


def test_a_synchronous_product_ends_those_before_it():
    start = alloc("a") + alloc("b") + product("a", "a") + product("b", "b", asynchronous=False)
    store = f"    ttg.local_store %x, %a : tensor<64x64xbf16> -> {TILE}\n"
    assert hazards(program(start + store)) == []


def test_loops_are_executed_to_their_end():
    """Sixteen iterations are not enough: a race in the last of 40 is found, and what is switched off there is not."""
    long = program(
        alloc("a") + "    %c40 = arith.constant 40 : i32\n    %c39 = arith.constant 39 : i32\n"
        "    scf.for %i = %c0 to %c40 step %c1 : i32 {\n    %end = arith.cmpi eq, %i, %c39 : i32\n    scf.if %end {\n"
        + product("a", "a") + f"      ttg.local_store %x, %a : tensor<64x64xbf16> -> {TILE}\n    }}\n    }}\n"
    )  # fmt: skip
    assert hazards(long) == OVERWRITTEN
    assert hazards(long.replace("eq, %i", "slt, %c39")) == []


def test_a_copy_that_is_masked_out_writes_zeros():
    """Two slots are too few for a loop of two products, although nothing is left to copy."""
    assert hazards(pipeline(2, 1, iterations=2, mask="mask")) == OVERWRITTEN
    assert hazards(pipeline(3, 1, iterations=2, mask="mask")) == []


def test_synchronous_products_cannot_race():
    text = pipeline(2, 1).replace(", isAsync = true", "")
    assert hazards(text) == []
    assert not has_asynchronous_products(text)
    assert has_asynchronous_products(pipeline(3, 1))


def test_without_its_waits_every_pipeline_has_a_race():
    text = without_waits(pipeline(3, 1))
    assert hazards(text) == [
        "%a is read before its copy has arrived",
        "%a is overwritten while a copy is on its way to it",
        *OVERWRITTEN,
        "%a is freed while a copy is on its way to it",
        "%a is freed while a product reads it",
    ]


def test_a_buffer_is_freed_after_its_last_product():
    made = "    %a = ttg.local_alloc %x : (tensor<64x64xbf16>) -> " + TILE + "\n"
    loop = "    scf.for %i = %c0 to %c3 step %c1 : i32 {\n{}    }\n"
    freed = "%a is freed while a product reads it"
    assert hazards(program(loop.replace("{}", made + product("a", "a") + finish(1)))) == [freed, *OVERWRITTEN]
    assert hazards(program(loop.replace("{}", made + product("a", "a") + finish(0)))) == []
    assert hazards(program(alloc("a") + product("a", "a") + "    ttg.local_dealloc %a : !ttg.memdesc<x>\n")) == [freed]


# Compute capability 10.0: products tell barriers when they are done.


def barrier(name):
    return f"    %{name} = ttg.local_alloc : () -> {BARRIER}\n    ttng.init_barrier %{name}, 1 : {BARRIER}\n"


def tensor_product(a, b, sums, tells, predicate="true"):
    return f"    ttng.tc_gen5_mma %{a}, %{b}, %{sums}, %false, %{predicate}, %{tells}[%true] {{is_async}} : {TILE}\n"


def wait(name, parity, predicate=""):
    return f"    ttng.wait_barrier %{name}, %{parity}{predicate} deps %a : {BARRIER}, {TILE}\n"


def two_readers(waits):
    """Each iteration stores a tile that two products read; `waits`: for which of them the next one waits first."""
    late = [name for name in ("first", "second") if name not in waits]
    body = alloc("a") + alloc("b") + barrier("first") + barrier("second")
    body += (
        "    %sums1 = ttng.tmem_alloc : () -> !ttg.memdesc<x>\n    %sums2 = ttng.tmem_alloc : () -> !ttg.memdesc<x>\n"
    )
    store = f"    ttg.local_store %x, %a : tensor<64x64xbf16> -> {TILE}\n"
    both = tensor_product("a", "b", "sums1", "first") + tensor_product("a", "b", "sums2", "second")
    body += store + both
    body += "    %p0 = scf.for %i = %c0 to %c7 step %c1 iter_args(%parity = %c0) -> (i32) : i32 {\n"
    body += "".join(wait(name, "parity") for name in waits) + store + both
    body += "".join(wait(name, "parity") for name in late)
    body += "    %other = arith.xori %parity, %c1 : i32\n    scf.yield %other : i32\n    }\n"
    body += wait("first", "p0") + wait("second", "p0")
    return program(
        body + "    %z = ttng.tmem_load %sums2 : !ttg.memdesc<x> -> t\n    ttg.local_dealloc %a : !ttg.memdesc<x>\n"
    )


def test_a_tile_with_two_readers_waits_for_both():
    """With Triton 3.7 the compiler waits for the first product only, although the second one starts later."""
    assert hazards(two_readers(["first", "second"])) == []
    assert hazards(two_readers(["second"])) == []  # products end in the order in which they start
    assert hazards(two_readers(["first"])) == OVERWRITTEN
    assert hazards(two_readers([])) == OVERWRITTEN


def test_sums_are_used_after_their_product():
    start = alloc("a") + barrier("done") + "    %sums1 = ttng.tmem_alloc : () -> !ttg.memdesc<x>\n"
    use = "    %z = ttng.tmem_load %sums1 : !ttg.memdesc<x> -> t\n"
    one = tensor_product("a", "a", "sums1", "done")
    assert hazards(program(start + one + use)) == ["%sums1 is used before its product is complete"]
    assert hazards(program(start + one + wait("done", "c0") + use)) == []
    assert hazards(program(start + one + wait("done", "c1") + use)) != []  # the phase before it is over at once
    assert hazards(program(start + one + wait("done", "c0", ", %false") + use)) != []  # the wait is switched off
    assert hazards(program(start + tensor_product("a", "a", "sums1", "done", "false") + use)) == []


def test_a_barrier_is_kept_until_its_product_has_told_it():
    start = alloc("a") + barrier("done") + "    %sums1 = ttng.tmem_alloc : () -> !ttg.memdesc<x>\n"
    one, end = tensor_product("a", "a", "sums1", "done"), f"    ttng.inval_barrier %done : {BARRIER}\n"
    assert hazards(program(start + one + end)) == ["%done is freed while a product reads it"]
    assert hazards(program(start + one + wait("done", "c0") + end)) == []


def test_an_operand_in_tensor_memory_is_not_overwritten_either():
    start = alloc("b") + barrier("done")
    start += "".join(f"    %{name} = ttng.tmem_alloc : () -> !ttg.memdesc<x>\n" for name in ("a", "sums1"))
    one, store = tensor_product("a", "b", "sums1", "done"), "    ttng.tmem_store %x, %a, %true : t -> !ttg.memdesc<x>\n"
    assert hazards(program(start + store + one + store)) == OVERWRITTEN
    assert hazards(program(start + store + one + wait("done", "c0") + store)) == []


# Control flow, and what cannot be read.


def test_both_sides_of_a_branch_are_executed():
    start = alloc("a") + product("a", "a")
    write = f"      ttg.local_store %x, %a : tensor<64x64xbf16> -> {TILE}\n"
    branch = "    scf.if %unknown {\n{}    } else {\n[]    }\n"
    first, second = branch.replace("{}", write).replace("[]", ""), branch.replace("{}", "").replace("[]", write)
    for text in (first, second):
        assert hazards(program(start + text)) == OVERWRITTEN
        assert hazards(program(start + finish(0) + text)) == []
    taken = second.replace("%unknown", "%true")
    assert hazards(program(start + taken)) == []
    either = branch.replace("{}", product("a", "a")).replace("[]", finish(0))
    assert hazards(program(alloc("a") + either + write)) == OVERWRITTEN


def test_grids_have_two_dimensions():
    """A program's number in the third is 0; its other numbers may be any."""
    write = f"    ttg.local_store %x, %a : tensor<64x64xbf16> -> {TILE}\n"
    body = "    %id = tt.get_program_id z : i32\n    %later = arith.cmpi ne, %id, %c0 : i32\n"
    body += alloc("a") + "    scf.if %later {\n" + product("a", "a") + "    }\n" + write
    assert hazards(program(body)) == []
    assert hazards(program(body.replace("ne, %id", "eq, %id"))) == OVERWRITTEN
    assert hazards(program(body.replace("program_id z", "program_id x"))) == OVERWRITTEN


def test_blocks_are_executed_in_the_order_of_their_jumps():
    write = f"    ttg.local_store %x, %a : tensor<64x64xbf16> -> {TILE}\n"
    jumps = "    cf.cond_br %unknown, ^bb1, ^bb3\n  ^bb1:  // pred\n    cf.br ^bb3\n"
    body = alloc("a") + jumps + "  ^bb2:  // pred\n" + write + "    cf.br ^bb4\n"
    body += "  ^bb3:  // 2 preds\n" + product("a", "a") + "    cf.br ^bb2\n  ^bb4:  // pred\n"
    assert hazards(program(body)) == OVERWRITTEN
    with pytest.raises(UnreadableError, match="a loop that is not written as one"):
        hazards(program("    cf.br ^bb1\n  ^bb1:\n    cf.br ^bb2\n  ^bb2:\n    cf.br ^bb1\n"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"    ttg.remote_copy %p, %a : {TILE}\n", "the operation ttg.remote_copy"),
        (f"    %x = tt.gather %a : {TILE} -> tensor<64xbf16>\n", "the operation tt.gather"),
        ("    ttng.async_tma_store_wait {pendings = 0 : i32}\n", "the operation ttng.async_tma_store_wait"),
        ("    scf.while %x {\n    }\n", "the operation scf.while"),
        ("    ttg.warp_specialize(%p) {\n    }\n", "the operation ttg.warp_specialize"),
        (slot("s", "a", "unknown"), "a number that is not known"),
        (product("unknown", "a"), "an operand whose buffer is not known"),
        (f"    ttg.local_store %x, %unknown : t -> {TILE}\n", "an operand whose buffer is not known"),
        ("    %w = ttg.async_wait %g\n", "ttg.async_wait has no num"),
        (f"    ttg.local_store : {TILE}\n", "in a form that is not known"),
        (wait("a", "unknown"), "a phase that is not known"),
        (wait("a", "c0", ", %unknown"), "a condition that is not known"),
        (tensor_product("a", "a", "a", "a", "unknown"), "a condition that is not known"),
        ("    }\n    }\n    }\n", "brackets do not match"),
    ],
)
def test_what_cannot_be_read_is_refused(line, reason):
    with pytest.raises(UnreadableError, match=reason):
        hazards(program(alloc("a", 3) + line))
