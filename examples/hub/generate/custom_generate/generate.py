"""Decoding with a retrieval cache of hf_kvret, as ``generate(..., custom_generate=FOLDER)``."""

# transformers refuses a file whose imports it can't do, with a message of its own. hf_kvret is
# therefore imported by name below, where its absence gets a message that says what to do.
import importlib
from typing import Any

METHOD = "paris"
"""The method where a call names none; the folder of another one differs here."""

# `generate` hands on the arguments that say where this file is, and the model knows none of them.
LOADING = {"cache_dir", "force_download", "local_files_only", "proxies", "repo_type", "revision"}
LOADING |= {"subfolder", "token", "user_agent"}


def generate(inputs: Any = None, *, model: Any, **arguments: Any) -> Any:
    """What ``model.generate`` returns, decoded with the cache of a retrieval method.

    Args:
        inputs: as of ``generate``.
        model: a causal language model of transformers.
        arguments: those of ``generate``. ``cache_implementation`` names another method,
            ``cache_config`` has its options; a cache that is given is used as it is.

    Raises:
        ImportError: hf_kvret is missing; nothing is installed here, the message says how.
    """
    try:
        importlib.import_module("hf_kvret")
    except ModuleNotFoundError as error:
        if error.name != "hf_kvret":
            raise
        raise ImportError(
            "this decoding needs the package hf_kvret, which is not installed, and installs "
            "nothing by itself: in a checkout of hf_kvret run pip install -c constraints.txt ."
        ) from None
    arguments = {name: value for name, value in arguments.items() if name not in LOADING}
    config = arguments.get("generation_config") or model.generation_config
    names = ("cache", "past_key_values", "cache_implementation", "custom_generate")
    chosen = any(arguments.get(name) is not None for name in names) or config.cache_implementation
    if not chosen and arguments.get("use_cache", config.use_cache) is not False:
        arguments["cache_implementation"] = METHOD
    # A model loaded from a repository with this folder has this function as its attribute
    # `generate`; the class has the model's own.
    return type(model).generate(model, inputs, **arguments)
