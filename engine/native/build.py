"""Compiles `forward.cpp` for this machine's processor, once, and loads it.

The library lies in the user's cache folder under a name made of the sources, the compiler and the
processor, so that a change of any of them compiles anew. Two engines that start at once may both
compile; the last one's file stays, whole.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = sorted([*Path(__file__).parent.glob("*.h"), *Path(__file__).parent.glob("*.cpp")])
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-exceptions",
          "-fno-rtti", "-fno-math-errno", "-fPIC", "-shared", "-w"]  # fmt: skip
_COMPILE_S = 300.0

log = logging.getLogger(__name__)


class Library:
    """The compiled functions.

    `speed`: 3 with a matrix unit, 2 with bf16 products, 1 with fp32 vectors (AVX2), 0 without.
    """

    def __init__(self, loaded: ctypes.CDLL, speed: int) -> None:
        self.speed = speed
        self.forward = ctypes.cast(loaded.loramux_forward, ctypes.c_void_p).value
        self.adapters = ctypes.cast(loaded.loramux_adapters, ctypes.c_void_p).value
        self.logits = ctypes.cast(loaded.loramux_logits, ctypes.c_void_p).value
        self._size = loaded.loramux_size
        self._size.restype, self._size.argtypes = ctypes.c_int64, [ctypes.c_int64]

    @property
    def multiplies_bf16(self) -> bool:
        """Whether linears read bf16; else fp32."""
        return self.size(6) == 2

    @property
    def sum_bytes(self) -> int:
        """Of a row's sums over two panels, in a thread's scratch."""
        return self.size(7)

    def size(self, which: int) -> int:
        """Bytes of one of the structures, to compare with the caller's own declaration."""
        return int(self._size(which))


@functools.cache
def load() -> Library | None:
    """The library, compiled where it was not yet; None where that is not possible, with a log line.

    `LORAMUX_NATIVE=0` in the environment keeps it off; `CXX` names the compiler.
    """
    if os.environ.get("LORAMUX_NATIVE", "1") == "0":
        return None
    compiler = _compiler()
    if compiler is None:
        log.warning("no C++ compiler here (apt install g++): the base model runs in torch alone")
        return None
    try:
        path = cache_folder() / f"forward-{_key(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("the native forward pass cannot be built: %s", str(reason).strip()[-500:])
        return None
    loaded.loramux_begin.restype = ctypes.c_int64
    speed = int(loaded.loramux_begin())
    return None if speed < 0 else Library(loaded, speed)


def cache_folder() -> Path:
    """Where compiled libraries lie; only its owner may write there."""
    given = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(given) if given else Path.home() / ".cache") / "loramux"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _key(compiler: str) -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=30)
    digest.update(version.stdout + _processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What decides which instructions may be used."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, path: Path) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    source = next(source for source in _SOURCES if source.suffix == ".cpp")
    try:
        subprocess.run(
            [compiler, *_FLAGS, "-o", name, str(source)],
            capture_output=True, text=True, check=True, timeout=_COMPILE_S,
        )  # fmt: skip
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
