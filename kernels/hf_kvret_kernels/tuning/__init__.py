"""Launch numbers of Triton kernels: rules, and what was measured to be better on a GPU family.

An operation says in its ``choices.py`` what there is to choose (``Tunable``) and what it takes
where nothing was measured, the rule. ``choice`` looks up what
``examples/benchmarks/bench_launch.py`` found. That is a look-up in a dictionary: it times nothing,
waits for nothing, and reads files once for a device, so it may stand in a step that is captured as
a CUDA graph.

A choice changes how the work is cut up, never the result beyond rounding.
"""

from hf_kvret_kernels.tuning.family import gpu_family
from hf_kvret_kernels.tuning.files import (
    Entry,
    check_replaceable,
    read_entries,
    shipped_file,
    user_file,
    write_entries,
)
from hf_kvret_kernels.tuning.lookup import choice, operations, reload
from hf_kvret_kernels.tuning.tunable import Tunable, dtype_name, power_of_two

__all__ = [
    "Entry",
    "Tunable",
    "check_replaceable",
    "choice",
    "dtype_name",
    "gpu_family",
    "operations",
    "power_of_two",
    "read_entries",
    "reload",
    "shipped_file",
    "user_file",
    "write_entries",
]
