"""The model card of an artifact, ``README.md``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from hf_kvret.artifacts.files import is_hub_id

_TEMPLATE = """---
{metadata}
---

# {method} artifact for {name}

The method `{method}` of hf-kvret, KV-cache retrieval inside Hugging Face transformers, learned this
about the keys of `{name}`. It holds no weights of that model and is of no use for another one, not
for another tune of the same base either.

```python
import hf_kvret

model.generate(
    **inputs, cache_implementation={quoted_method}, cache_config={config}
)
```

## How it was made

```json
{made}
```
"""


def model_card(description: Mapping[str, Any], source: str) -> str:
    """The text of the card.

    Args:
        description: of the artifact, as in ``config.json``. ``data["datasets"]``, a list of hub
            ids, joins the metadata.
        source: folder or hub id that the code in the card loads from.
    """
    method, model, data = (description[name] for name in ("method", "model", "data"))
    options = {name: x for name, x in description["options"].items() if name != "layers"}
    made = {"options": options, "data": data, "model": model["facts"]}
    datasets, fields = data.get("datasets"), dict[str, Any]()
    if isinstance(datasets, list) and datasets and all(map(_is_full_id, datasets)):
        fields["datasets"] = datasets
    if _is_full_id(model["name"]):
        # Without a relation the hub would list it as a fine-tune.
        fields |= {"base_model": model["name"], "base_model_relation": "adapter"}
    tags = ["hf-kvret", "kv-cache", "calibration", method]
    metadata = ModelCardData(library_name="hf-kvret", tags=tags, **fields)
    return _TEMPLATE.format(
        metadata=metadata.to_yaml(),
        method=method,
        # A name of several lines would end the heading.
        name=" ".join(model["name"].split()),
        quoted_method=json.dumps(method),
        config=json.dumps({"artifact": source}, ensure_ascii=False),
        made=json.dumps(made, indent=1),
    )


def _is_full_id(name: Any) -> bool:
    """Whether a name is ``user/name``, as the hub's metadata wants it."""
    return isinstance(name, str) and "/" in name and is_hub_id(name)
