"""The CPU's own forward pass: C++ beside this file, compiled on this machine where a compiler is.

`build` compiles and loads it, `layout` brings weights into the order that it reads, `model` is the
model that runs on it. Without a compiler, `engine.model.llama` serves in torch operations.
"""
