"""Compiles a Triton kernel for a GPU that is not here, and reads what the compiler made of it.

Needs no driver: `ptxas` and `cuobjdump` come with Triton. A kernel that was decorated under
TRITON_INTERPRET=1 cannot be compiled, so this runs in a process without it.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one block may use, by compute capability."""


@dataclass(frozen=True, slots=True)
class Binary:
    """Resources of one compiled kernel, a thread (registers, stack, local) or a block (shared)."""

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    instructions: Counter[str]  # opcode with its modifiers: "HMMA.16816.F32.BF16"

    def count(self, opcode: str) -> int:
        """Instructions whose opcode begins so."""
        return sum(n for name, n in self.instructions.items() if name.startswith(opcode))

    @property
    def wide_copies(self) -> int:
        """Asynchronous copies into shared memory, of 16 bytes a thread."""
        return sum(
            n
            for name, n in self.instructions.items()
            if name.startswith("LDGSTS") and name.endswith(".128")
        )

    def faults(self, capability: int, *, multiplies: bool = True) -> list[str]:
        """What makes this kernel unfit: spills, too much shared memory, no tensor cores, a trap.

        `multiplies`: whether its work is a matrix product.
        """
        limit = SHARED_BYTES[capability]
        checks = {
            f"{self.stack_bytes} bytes of stack": self.stack_bytes == 0,
            f"{self.local_bytes} bytes of local memory": self.local_bytes == 0,
            "registers spilled": self.count("STL") + self.count("LDL") == 0,
            f"{self.shared_bytes} bytes of shared memory, limit {limit}": self.shared_bytes
            <= limit,
            "no tensor core instruction": not multiplies
            or self.count("HMMA") + self.count("HGMMA") > 0,
            "a trap": self.count("BPT.TRAP") == 0,
        }
        return [fault for fault, passed in checks.items() if not passed]


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int,
    warps: int,
    stages: int,
    divisible: frozenset[str] = frozenset(),
) -> Binary:
    """Compiles for sm_`capability`.

    `types`: Triton's name of every argument that is not in `constants` ("*bf16", "i32");
    pointers, and the integers in `divisible`, are taken as multiples of 16.
    """
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name in divisible or (name not in constants and types[name].startswith("*"))
        },
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
    )
    return _inspect(compiled.asm["cubin"], compiled.metadata.shared)


def _inspect(cubin: bytes, shared_bytes: int) -> Binary:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        assembly = _cuobjdump("--dump-sass", file.name)
    return read_dumps(usage, assembly, shared_bytes)


def read_dumps(usage: str, assembly: str, shared_bytes: int) -> Binary:
    """From what cuobjdump says of one kernel: its resource usage and its SASS."""
    figures = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", assembly)
    return Binary(
        registers=int(figures["REG"]),
        stack_bytes=int(figures["STACK"]),
        local_bytes=int(figures["LOCAL"]),
        shared_bytes=shared_bytes,
        instructions=Counter(opcodes),
    )


def _cuobjdump(option: str, path: str) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
