"""Kernels of hf_kvret, one folder per operation; import the operation from its folder.

Each operation has a public wrapper (checks its arguments once, chooses a backend), a readable
torch version, which is also what runs on a CPU, and a Triton kernel for CUDA devices.
``host_attention`` has C++ instead, for rows that stay in host memory, which ``gather_attention``
uses for CPU tensors.
"""
