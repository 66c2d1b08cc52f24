"""What makes a compiled kernel unfit is found: a kernel, or a dump, that has each fault."""

import triton
import triton.language as tl

from engine.kernels.compile import SHARED_BYTES, Binary, compile_kernel, read_dumps

USAGE = "Function rows:\n  REG:{} STACK:{} SHARED:0 LOCAL:{} CONSTANT[0]:392 TEXTURE:0\n"
MULTIPLIES = "        /*0120*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;\n"


@triton.jit
def hold(x_ptr, COUNT: tl.constexpr):
    """Needs every number until the last is read."""
    at = tl.arange(0, COUNT)
    x = tl.load(x_ptr + at)
    tl.store(x_ptr + at, x * tl.sum(x, 0))


@triton.jit
def end_in_a_trap(x_ptr):
    one = tl.inline_asm_elementwise(
        "trap; mov.u32 $0, 1;", "=r,r", [tl.load(x_ptr)], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(x_ptr, one)


def compiled(kernel: object, kind: str, **constants: int) -> Binary:
    return compile_kernel(kernel, {"x_ptr": kind}, constants, capability=80, warps=1, stages=1)


def dumped(*, stack: int = 0, local: int = 0, shared: int = 0, sass: str = MULTIPLIES) -> Binary:
    return read_dumps(USAGE.format(40, stack, local), sass, shared)


def test_a_sound_kernel_has_no_fault():
    assert compiled(hold, "*fp32", COUNT=1024).faults(80, multiplies=False) == []
    assert dumped(shared=SHARED_BYTES[80]).faults(80) == []


def test_a_kernel_that_holds_more_than_its_registers_spills_onto_the_stack():
    binary = compiled(hold, "*fp32", COUNT=16384)
    faults = binary.faults(80, multiplies=False)
    assert faults == [f"{binary.stack_bytes} bytes of stack", "registers spilled"]
    assert binary.stack_bytes > 0


def test_a_trap():
    assert compiled(end_in_a_trap, "*i32").faults(80, multiplies=False) == ["a trap"]


def test_a_product_without_tensor_cores():
    assert compiled(hold, "*fp32", COUNT=1024).faults(80) == ["no tensor core instruction"]


def test_stack_and_local_memory():
    assert dumped(stack=128).faults(80) == ["128 bytes of stack"]
    assert dumped(local=16).faults(80) == ["16 bytes of local memory"]


def test_a_spill_under_a_predicate():
    for opcode in ("STL.64 [R1+0x8], R2", "LDL R7, [R1]"):
        line = f"        /*0130*/              @!P0 {opcode} ;\n"
        assert dumped(sass=MULTIPLIES + line).faults(80) == ["registers spilled"]


def test_more_shared_memory_than_a_block_may_use():
    beyond = SHARED_BYTES[80] + 1
    assert dumped(shared=beyond).faults(90) == []
    assert dumped(shared=beyond).faults(80) == [
        f"{beyond} bytes of shared memory, limit {SHARED_BYTES[80]}"
    ]
