"""The engine on a CUDA device: the same seam as `engine.runner`, see docs/cuda.md."""
