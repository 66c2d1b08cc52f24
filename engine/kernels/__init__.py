"""One operation a file, three faces under one name: Triton (CUDA), torch (CPU), plain reference."""
