#!/usr/bin/env bash
# turboquantdc 0.2.0: TurboQuantCache(bits=4) holds more than the rows that it stands for.
#
# Expected: with codes of 4 bits a cache holds about a quarter of the rows in bf16, as it reports itself.
# Seen: torch.argmin gives int64, and each code of 4 bits stays one, of 8 bytes. The cache holds four times
#   the rows in bf16, or twice those in fp32. memory_savings() computes bits that are not there. A cache's own
#   report is no measurement: count the storages that it keeps alive.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 numpy scipy turboquantdc==0.2.0
"$place/venv/bin/python" - <<'EOF'
import torch
from turboquantdc.hf_integration import TurboQuantCache

torch.manual_seed(0)
rows = torch.randn(2, 1, 8, 1024, 128, dtype=torch.bfloat16)
cache = TurboQuantCache(bits=4, mse_only=True)
cache.update(*rows, layer_idx=0)
(layer,) = cache._layers
entries = layer._key_compressed + layer._value_compressed
codes = [tensor for entry in entries for tensor in entry.values()]
held = sum(tensor.untyped_storage().nbytes() for tensor in codes) / rows.nbytes
reported = cache.memory_savings()["overall_compression_ratio"]
print(f"reported: {reported:.2f} times fewer bytes; held: {held:.2f} times as many")
print("codes are", {tensor.dtype for tensor in codes})
assert reported > 3.5 and held > 4
EOF
