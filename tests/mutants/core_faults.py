"""Faults in what a retrieval layer is made of: window, kv, state."""

from __future__ import annotations

from fault import Fault

FAULTS = (
    Fault(
        "window-crop-off-by-one",
        "hf_kvret/layer/window.py",
        "self.length = max(0, min(self.length, length - self.start))",
        "self.length = max(0, min(self.length, length + 1 - self.start))",
    ),
    Fault(
        "sinks-counted-from-each-block",
        "hf_kvret/layer/window.py",
        "rank = valid.long().cumsum(dim=1) - 1 + sink_counts",
        "rank = valid.long().cumsum(dim=1) - 1",
    ),
    Fault(
        "sink-not-freed-by-crop",
        "hf_kvret/layer/window.py",
        "self.sink_slots.masked_fill(self.sink_slots >= self.start, -1)",
        "self.sink_slots.masked_fill(self.sink_slots > self.start, -1)",
    ),
    Fault(
        "padded-sink-attended",
        "hf_kvret/layer/window.py",
        "sinks = sinks & valid.gather(1, self.sink_slots.clamp(min=0))",
        "sinks = sinks | valid.gather(1, self.sink_slots.clamp(min=0))",
    ),
    Fault(
        "fork-shares-the-window",
        "hf_kvret/contracts/state.py",
        "return value if value is None or self.shared else value.clone()",
        "return value",
    ),
    Fault(
        "sinks-counted-twice",
        "hf_kvret/layer/layer_kv.py",
        "marks.scatter_(1, slots.masked_fill(slots < 0, cold), False)",
        "marks.scatter_(1, slots.masked_fill(slots < 0, cold), True)",
    ),
    Fault(
        "fork-shares-the-store",
        "hf_kvret/contracts/state.py",
        "return None if value is None else value.fork()",
        "return value",
    ),
    Fault(
        "cropped-index-counts-as-built",
        "hf_kvret/layer/layer_kv.py",
        "self.built = self.built and cold > 0",
        "pass",
    ),
    Fault(
        "drafts-see-the-future",
        "hf_kvret/layer/step.py",
        "offset = window.tokens()[0].shape[2] - queries if queries > 1 else None",
        "offset = None",
    ),
    Fault(
        "shared-layer-forgets-its-past",
        "hf_kvret/layer/layer.py",
        "past = window.start + window.length - (0 if self.pending_attention else new)",
        "past = window.start + window.length if self.pending_attention else 0",
    ),
    Fault(
        "learned-sinks-lost-in-a-second-prompt",
        "hf_kvret/layer/exact_attention.py",
        "        total = merge([total], call.sink_logits)\n",
        "        pass\n",
    ),
    Fault(
        "soft-cap-lost",
        "hf_kvret/layer/exact_attention.py",
        "        softcap=scoring.softcap,\n",
        "        softcap=None,\n",
    ),
    Fault(
        "fork-overwrites-shared-rows",
        "hf_kvret/contracts/token_buffer.py",
        "self._fork_end = max(self._fork_end, self._end)",
        "self._fork_end = 0",
    ),
    Fault(
        "buffer-keeps-a-cropped-row",
        "hf_kvret/contracts/token_buffer.py",
        "        self.crop(start)\n        self.append(rows)",
        "        self.crop(start + 1)\n        self.append(rows)",
    ),
    Fault(
        "sinks-counted-as-rest",
        "hf_kvret/layer/block_sums.py",
        "return marks.scatter_(1, columns.masked_fill(outside, length), False)[:, :length]",
        "return marks[:, :length]",
    ),
    Fault(
        "means-of-other-rows",
        "hf_kvret/contracts/state.py",
        "    def reordered(self, value: Any, rows: torch.Tensor) -> None:\n        return None",
        "    def reordered(self, value: Any, rows: torch.Tensor) -> Any:\n        return value",
    ),
    Fault(
        "cropped-tokens-stay-in-the-sums",
        "hf_kvret/layer/layer_kv.py",
        "        for state in (self.store, self.sums, self.index):",
        "        for state in (self.store, self.index):",
    ),
    Fault(
        "wrong-ids-of-nobody",
        "hf_kvret/contracts/index.py",
        'return error.by(f"the index {type(index).__name__}.{method}")',
        "return error",
    ),
)
