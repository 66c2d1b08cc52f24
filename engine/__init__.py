"""The serving engine: one base model, many LoRA adapters, one continuously batched step."""
