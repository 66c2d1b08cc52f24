"""Fuse or separate: whether a 4-bit linear adds its rows' adapters itself.

Fused, the expand of multi-LoRA is a part of the product: y is not read again, and a launch is
saved. Each tile of rows then multiplies by every adapter that any of its rows uses, so with many
adapters a tile the separate expand is cheaper: at K = 4096 and 16 adapters a tile the product grows
by 12 %; with an adapter a row by 12 % at 16 rows a tile, 50 % at 64, 100 % at 128 (counted).

The engine does not read this table: `engine.cuda` always runs the product and the adapters apart.
`fused_cuda.Int4LoraLinear` follows it, and only tests and benchmarks call that. An entry therefore
changes nothing that is served; it records a shape that a GPU has shown to be faster fused, with the
device it was measured on (`python -m benchmarks.gpu` prints both times), for whoever lets the
engine call the fused linear.
"""

from engine.kernels.metadata import SliceGroup

MOST_ADAPTERS: dict[tuple[int, int], int] = {}
"""(out, in) of the whole product -> the most adapters of a tile of rows for which it is fused."""


def fuses(group: SliceGroup, tile_columns: int, tile_adapters: int) -> bool:
    """Whether a product with tiles of so many columns and adapters adds them itself."""
    if not fusable(group, tile_columns):
        return False
    return tile_adapters <= MOST_ADAPTERS.get((group.width, group.in_features), -1)


def fusable(group: SliceGroup, tile_columns: int) -> bool:
    """Whether it can: no tile may lie across two slices."""
    return all(width % tile_columns == 0 for width in group.out_features)
