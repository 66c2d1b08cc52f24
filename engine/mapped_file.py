"""A file's bytes, mapped: read when they are touched, and given back when they are done with."""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt


class MappedFile:
    """The bytes of a file that does not change while it is open."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when it cannot be read and ValueError when it is empty."""
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def release(self) -> None:
        """Takes the pages out of this process's memory; touching them reads them again."""
        self._map.madvise(mmap.MADV_DONTNEED)
