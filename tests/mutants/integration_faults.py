"""Faults in the cache, its options, replays and the seam to transformers."""

from __future__ import annotations

from fault import Fault

FAULTS = (
    Fault(
        "mask-column",
        "hf_kvret/attention/masks.py",
        "return info.seen_by_query(device)[:, 0, -1]",
        "return info.seen_by_query(device)[:, 0, 0]",
    ),
    Fault(
        "mask-forgets-padding",
        "hf_kvret/attention/masks.py",
        "return None if info.padding is None else info.padding.to(device)",
        "return None",
    ),
    Fault(
        "mask-may-be-computed-with",
        "hf_kvret/attention/masks.py",
        "if name not in _COPIES and name not in _METADATA:",
        "if False:",
    ),
    Fault(
        "refused-call-leaves-the-layer-waiting",
        "hf_kvret/attention/attention.py",
        "        layer.pending_attention = False\n        raise",
        "        raise",
    ),
    Fault(
        "base-without-learned-sinks",
        "hf_kvret/attention/base.py",
        'plain = keywords.get("softcap") is None and keywords.get("s_aux") is None',
        'plain = keywords.get("softcap") is None',
    ),
    Fault(
        "budget-rounds-down",
        "hf_kvret/options/config.py",
        "return max(1, math.ceil(self.top_k * cold_len))",
        "return max(1, math.floor(self.top_k * cold_len))",
    ),
    Fault(
        "short-last-chunk-retrieves",
        "hf_kvret/generate/chunks.py",
        "if length % size == 0 or length % size > max_draft:",
        "if length % size == 0 or length % size >= max_draft:",
    ),
    Fault(
        "failed-call-leaves-the-model-switched",
        "hf_kvret/generate/call.py",
        "if failed and call.switched and not is_served(model):",
        "if False:",
    ),
    Fault(
        "hooked-weight-taken-for-plain",
        "hf_kvret/models/projection.py",
        "and not _is_hooked(projection)",
        "",
    ),
    Fault(
        "beams-keep-their-tokens",
        "hf_kvret/cache.py",
        "        self.tokens.reorder(beam_idx)\n",
        "",
    ),
    Fault(
        "another-document-accepted",
        "hf_kvret/generate/provenance.py",
        "    if difference is None:",
        "    if True:",
    ),
    Fault(
        "another-adapter-accepted",
        "hf_kvret/saved/identity.py",
        "if adapters := _active_adapters(decoder):",
        "if adapters := {}:",
    ),
    Fault(
        "tokens-of-replayed-steps-unseen",
        "hf_kvret/replay/graph.py",
        "if len(tokens) <= start:",
        "if False:",
    ),
)
