"""The base model: how its weights are read, kept quantized, and run."""
