"""Memory in large pages."""

from engine.huge_pages import Region, zeros

PAGE = 2 << 20


def test_memory_is_zero_and_begins_on_a_large_page() -> None:
    memory = zeros(3 * PAGE + 5)
    assert memory.numel() == 3 * PAGE + 5
    assert memory.data_ptr() % PAGE == 0
    assert memory.storage_offset() == 0, "views by offset would lie elsewhere"
    assert not memory.any()


def test_pieces_of_a_region_are_aligned_and_never_overlap() -> None:
    region = Region()
    pieces = [region.take(size) for size in (1, 100, 9 << 20, 7 << 20, 64, 8 << 20, 0, 5)]
    for number, piece in enumerate(pieces, 1):
        piece.fill_(number)
    assert [int(piece.max()) for piece in pieces if piece.numel()] == [1, 2, 3, 4, 5, 6, 8]
    assert [int(piece.min()) for piece in pieces if piece.numel()] == [1, 2, 3, 4, 5, 6, 8]
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
