"""Kernels of hf_kvret, one folder per operation; import the operation from its folder.

Each operation has a public wrapper (checks its arguments once, chooses a backend), a readable
torch version, and a Triton kernel for CUDA devices. On a CPU the compiled library (``csrc``) does
the work of many, and torch that of the others.
"""
