#!/usr/bin/env bash
# torch 2.13.0: the last column of a tensor that grows is a new graph at every step, whatever its shape.
#
# Expected: with dynamic=False a compiled function is compiled anew for other shapes. The last column
#   [batch, 1] of a tensor that grows, as the position ids of a generation, always has the same one.
# Seen: graphs are guarded by strides, too, and that view has the length of the whole row as its stride.
#   So each step compiles, until the limit of recompilations. reshape(-1).view(shape) is a view with
#   the same strides and helps as little; contiguous() helps.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
"$place/venv/bin/python" - <<'EOF'
import torch
from torch._dynamo.utils import counters


def graphs(last_column):
    """Graphs that five steps compile."""
    torch.compiler.reset()
    counters.clear()
    step = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    for length in range(20, 25):
        positions = torch.arange(length).repeat(2, 1)
        step(last_column(positions))
    return counters["stats"]["unique_graphs"]


ways = {
    "x[:, -1:]": lambda x: x[:, -1:],
    "x[:, -1:].reshape(-1).view(2, 1)": lambda x: x[:, -1:].reshape(-1).view(2, 1),
    "x[:, -1:].contiguous()": lambda x: x[:, -1:].contiguous(),
}
seen = {name: graphs(way) for name, way in ways.items()}
for name, count in seen.items():
    print(f"{name}: {count} graphs for 5 steps")
assert list(seen.values()) == [5, 5, 1], "the behaviour changed"
EOF
