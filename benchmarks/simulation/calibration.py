"""What an engine has learned of its device at start-up: steps of all sizes, run and observed."""

from benchmarks.simulation.step_models import Device, StepContents
from engine.step_time import StepShape, StepTimes, attended_pairs

DECODES = (1, 4, 16, 64, 128, 256)
CHUNKS = (16, 64, 256, 512, 1024, 2048)
CONTEXTS = (64, 512, 2048)
ADAPTERS = (0, 4, 32)
RANK = 16
ROUNDS = 2


def calibrated(device: Device) -> StepTimes:
    """A step-time model that has seen decodes, prefill chunks and adapters on this device."""
    times = StepTimes()
    most = int(device.settings.get("max_batch_tokens", 512))
    for _ in range(ROUNDS):
        for context in CONTEXTS:
            for rows in (r for r in DECODES if r <= most):
                for adapters in ADAPTERS:
                    _observe(times, device, rows, context, 0, min(adapters, rows))
                for chunk in (c for c in CHUNKS if c + rows <= most):
                    _observe(times, device, rows, context, chunk, 0)
    times.anchor()
    return times


def _observe(
    times: StepTimes, device: Device, rows: int, context: int, chunk: int, adapters: int
) -> None:
    adapter_bytes = adapters * RANK * device.rank_bytes
    pairs = attended_pairs(0, chunk)
    shape = StepShape(chunk, rows, rows * context + chunk, pairs, adapter_bytes)
    contents = StepContents(
        prefill_tokens=chunk,
        decode_rows=rows,
        sampled_rows=rows + (chunk > 0),
        kv_tokens=rows * context + chunk,
        attention_pairs=rows * context + pairs,
        adapter_bytes=adapter_bytes,
        token_ranks=rows * RANK if adapters else 0,
    )
    times.observe(shape, device.steps.step_ms(contents, copying=False))
