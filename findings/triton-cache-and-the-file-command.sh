#!/usr/bin/env bash
# Triton 3.9.0: whether a machine has the command `file` is a part of the cache's keys.
#
# Expected: TRITON_CACHE_DIR, filled on a machine, serves another one of the same architecture, system,
#   Python and Triton: what was compiled there needs no C compiler here.
# Seen: the key of compiled launchers has platform.architecture(), which runs `file` on the Python
#   binary: "64bit,ELF" where the command is installed, "64bit," in a slim image. There the carried cache
#   is passed over, and Triton asks for a C compiler. Needs a C compiler and `file`, and no GPU.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q --no-deps triton==3.9.0
cat >"$place/build.py" <<'EOF'
from triton.runtime.build import compile_module_from_src, platform_key

source = """
#include <Python.h>
static struct PyModuleDef answer = {PyModuleDef_HEAD_INIT, "answer", 0, -1, 0};
PyMODINIT_FUNC PyInit_answer(void) { return PyModule_Create(&answer); }
"""
print("key:", platform_key())
compile_module_from_src(source, "answer")
EOF
export TRITON_CACHE_DIR="$place/cache"
python="$place/venv/bin/python"
"$python" "$place/build.py"
echo "with the command, the compiler taken away:"
CC=/nonexistent "$python" "$place/build.py"
mkdir "$place/empty"
echo "without the command:"
PATH="$place/empty" CC=/nonexistent "$python" "$place/build.py" >"$place/seen" 2>&1 || true
grep -E "^key|Error" "$place/seen"
grep -q "^key: .*bit,$" "$place/seen"
grep -q "Error" "$place/seen"
