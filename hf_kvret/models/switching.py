"""Which classes of models ask transformers for their attention function.

transformers reads the source of a class' module to find out. A class of a notebook, of
``python -`` or of ``exec`` has none; what it inherits tells then.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from transformers import PreTrainedModel


def switches(model_class: type[PreTrainedModel]) -> bool:
    """Whether models of this class, or of the nearest ancestor with a source, ask for theirs.

    False where neither has a source.
    """
    home = next((kind for kind in _models(model_class) if has_source(kind)), None)
    # transformers keeps the answer on the class that was asked, and classes inherit it.
    return home is not None and bool(home._can_set_attn_implementation())


def knows(model_class: type[PreTrainedModel]) -> bool:
    """Whether transformers can read the source of this class or of an ancestor of it."""
    return any(map(has_source, _models(model_class)))


def has_source(kind: type) -> bool:
    """Whether the module of a class has a source file."""
    try:
        return bool(inspect.getsource(sys.modules[kind.__module__]))
    except (KeyError, OSError, TypeError):
        return False


def _models(model_class: type[PreTrainedModel]) -> list[Any]:
    """The class and its ancestors that are of some type of model."""
    kinds = [kind for kind in model_class.__mro__ if issubclass(kind, PreTrainedModel)]
    return [kind for kind in kinds if kind is not PreTrainedModel]
