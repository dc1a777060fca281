"""Planted faults: small changes of the library, each of which some default test must notice.

``run.py`` plants them one by one. A fault names a text that stands once in its file, and what is
to stand there instead; when code moves, move its fault along. They are listed by area, in the files
beside this one.
"""

from __future__ import annotations

import core_faults
import integration_faults
import kernel_faults
import method_faults
import store_faults

FAULTS = (
    *core_faults.FAULTS,
    *integration_faults.FAULTS,
    *kernel_faults.FAULTS,
    *method_faults.FAULTS,
    *store_faults.FAULTS,
)
