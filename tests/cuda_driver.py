"""Drives a CudaExecutor as `tests.parity.driver` does a CpuExecutor: on a fake device or a real."""

from pathlib import Path
from typing import Any

from torch import Tensor

from engine.config import EngineConfig
from engine.cuda.device import Device
from engine.cuda.faces import Faces
from engine.cuda.runner import CudaExecutor
from tests.fake_device import FakeDevice, plain_faces
from tests.parity.driver import Driver

SMALL = {
    "max_running": 8, "max_batch_tokens": 128, "max_rank": 32, "device_memory_share": 1.0,
}  # fmt: skip


class CudaDriver(Driver):
    """`device`: None is a new fake one."""

    def __init__(
        self,
        base_model: Path,
        data_dir: Path,
        *,
        device: Device | None = None,
        faces: Faces | None = None,
        captures: bool = True,
        **options: Any,
    ) -> None:
        self.device = device or FakeDevice()
        self._faces = faces
        if isinstance(self.device, FakeDevice) and faces is None:
            self._faces = plain_faces(self.device)
        self._captures = captures
        super().__init__(base_model, data_dir, **{**SMALL, **options})

    def _open(self, config: EngineConfig) -> CudaExecutor:
        return CudaExecutor(config, device=self.device, faces=self._faces, captures=self._captures)

    def _logits(self, seqs: list[int]) -> list[Tensor]:
        assert isinstance(self.executor, CudaExecutor)
        return list(self.executor.logits[: len(seqs)].float().cpu().clone())

    def _let_copies_run(self) -> None:
        self.device.synchronize()
