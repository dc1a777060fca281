#!/usr/bin/env bash
# torch 2.13.0: counting the FLOPs of a compiled function once leaves it uncompiled for good.
#
# Expected: FlopCounterMode watches one call. Beneath it a compiled function may run as it is; later calls
#   compile it.
# Seen: where the first call is beneath the mode, no later call compiles, without a word, and neither does
#   a new torch.compile of the same function. torch.compiler.reset() helps. With fullgraph=True the calls
#   raise a RuntimeError in place of that.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
"$place/venv/bin/python" - <<'EOF'
import torch
from torch.utils.flop_counter import FlopCounterMode

compiled = []


def backend(graph, inputs):
    compiled.append(graph)
    return graph.forward


def product(x):
    return torch.sin(x @ x)


x = torch.ones(3, 3)
function = torch.compile(product, backend=backend)
with FlopCounterMode(display=False) as counter:
    function(x)
print("FLOPs that were counted:", counter.get_total_flops())
function(x)
torch.compile(product, backend=backend)(x)
print("graphs compiled by two later calls:", len(compiled))
later = len(compiled)
torch.compiler.reset()
torch.compile(product, backend=backend)(x)
print("graphs compiled after torch.compiler.reset():", len(compiled))
assert (later, len(compiled)) == (0, 1), "the behaviour changed"
EOF
