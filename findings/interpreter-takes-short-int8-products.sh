#!/usr/bin/env bash
# Triton 3.9.0: products of int8 that pass under TRITON_INTERPRET=1 can be none that a GPU compiles.
#
# Expected: tl.dot has one set of allowed shapes. A test under the interpreter shows whether a product of
#   [16, 16] and [16, 16] is one of them, as it is in fp16.
# Seen: the interpreter multiplies int8 tiles over 16 numbers, and the result is right. Compiled for sm_90
#   the same kernel raises: products of int8 go over 32 numbers or more. In fp16 it compiles with 16. Tiles
#   of one byte have to be padded, or compiled in a test, too; that needs no GPU.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
"$place/venv/bin/pip" install -q --no-deps triton==3.9.0
cat >"$place/product.py" <<'EOF'
import os

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError


@triton.jit
def product(left, right, out, K: tl.constexpr):
    side, inner = tl.arange(0, 16), tl.arange(0, K)
    first = tl.load(left + side[:, None] * K + inner[None, :])
    second = tl.load(right + inner[:, None] * 16 + side[None, :])
    tl.store(out + side[:, None] * 16 + side[None, :], tl.dot(first, second))


def compiles(kind, total, length):
    types = {"left": f"*{kind}", "right": f"*{kind}", "out": f"*{total}"}
    try:
        triton.compile(ASTSource(product, types, {"K": length}), target=GPUTarget("cuda", 90, 32))
    except CompilationError as error:
        return str(error).splitlines()[-1]
    return "compiles"


if os.environ.get("TRITON_INTERPRET"):
    torch.manual_seed(0)
    left, right = torch.randint(-128, 128, (2, 16, 16), dtype=torch.int8)
    out = torch.empty(16, 16, dtype=torch.int32)
    product[(1,)](left, right, out, K=16)
    assert torch.equal(out, left.int() @ right.int())
    print("int8 over 16 numbers, interpreted: right")
else:
    results = [compiles("i8", "i32", 16), compiles("i8", "i32", 32), compiles("fp16", "fp32", 16)]
    for name, result in zip(("int8 over 16", "int8 over 32", "fp16 over 16"), results, strict=True):
        print(f"{name} numbers, for sm_90: {result}")
    assert "K >= 32" in results[0] and results[1:] == ["compiles", "compiles"]
EOF
TRITON_INTERPRET=1 "$place/venv/bin/python" -W ignore "$place/product.py"
"$place/venv/bin/python" -W ignore "$place/product.py"
