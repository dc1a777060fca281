"""Planted faults: small changes of the library, each of which some default test must notice.

``run.py`` plants them one by one. A fault names a text that stands once in its file, and what is
to stand there instead; when code moves, move its fault along.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong with it.
        file: path from the root of the repository.
        right: what stands there, exactly once.
        wrong: what stands there when the fault is planted.
    """

    name: str
    file: str
    right: str
    wrong: str


FAULTS = (
    Fault(
        "mask-column",
        "hf_kvret/integration/masks.py",
        "return mask[:, 0, -1]",
        "return mask[:, 0, 0]",
    ),
    Fault(
        "mask-forgets-padding",
        "hf_kvret/integration/masks.py",
        "return None if info.padding is None else info.padding.to(device)",
        "return None",
    ),
    Fault(
        "mask-may-be-computed-with",
        "hf_kvret/integration/masks.py",
        "if name not in _COPIES and name not in _FORM:",
        "if False:",
    ),
    Fault(
        "window-crop-off-by-one",
        "hf_kvret/core/window.py",
        "self.length -= window_count\n",
        "self.length -= max(0, window_count - 1)\n",
    ),
    Fault(
        "sinks-counted-from-each-block",
        "hf_kvret/core/window.py",
        "rank = valid.long().cumsum(dim=1) - 1 + sink_counts",
        "rank = valid.long().cumsum(dim=1) - 1",
    ),
    Fault(
        "sink-not-freed-by-crop",
        "hf_kvret/core/window.py",
        "self.sink_slots.masked_fill(self.sink_slots >= self.start, -1)",
        "self.sink_slots.masked_fill(self.sink_slots > self.start, -1)",
    ),
    Fault(
        "padded-sink-attended",
        "hf_kvret/core/window.py",
        "sinks = sinks & valid.gather(1, self.sink_slots.clamp(min=0))",
        "sinks = sinks | valid.gather(1, self.sink_slots.clamp(min=0))",
    ),
    Fault(
        "fork-shares-the-window",
        "hf_kvret/core/fields.py",
        "return value if value is None or self.shared else value.clone()",
        "return value",
    ),
    Fault(
        "sinks-counted-twice",
        "hf_kvret/core/regions.py",
        "marks.scatter_(1, slots.masked_fill(slots < 0, cold), False)",
        "marks.scatter_(1, slots.masked_fill(slots < 0, cold), True)",
    ),
    Fault(
        "fork-shares-the-store",
        "hf_kvret/core/regions.py",
        "twin.store = None if self.store is None else self.store.fork()",
        "twin.store = self.store",
    ),
    Fault(
        "cropped-index-counts-as-built",
        "hf_kvret/core/regions.py",
        "self.built = self.built and cold > 0",
        "pass",
    ),
    Fault(
        "drafts-see-the-future",
        "hf_kvret/core/selected_attention.py",
        "offset = keys.shape[2] - query.shape[2] if query.shape[2] > 1 else None",
        "offset = None",
    ),
    Fault(
        "shared-layer-forgets-its-past",
        "hf_kvret/core/layer.py",
        "past = self.regions.length - (0 if first else new)",
        "past = self.regions.length if first else 0",
    ),
    Fault(
        "learned-sinks-lost-in-a-second-prompt",
        "hf_kvret/core/exact_attention.py",
        "        total = merge([total], call.sink_logits)\n",
        "        pass\n",
    ),
    Fault(
        "soft-cap-lost",
        "hf_kvret/core/exact_attention.py",
        "        softcap=scoring.softcap,\n",
        "        softcap=None,\n",
    ),
    Fault(
        "refused-call-leaves-the-layer-waiting",
        "hf_kvret/integration/attention.py",
        "        layer.waiting = False\n        raise",
        "        raise",
    ),
    Fault(
        "base-without-learned-sinks",
        "hf_kvret/integration/base_attention.py",
        'plain = keywords.get("softcap") is None and keywords.get("s_aux") is None',
        'plain = keywords.get("softcap") is None',
    ),
    Fault(
        "budget-rounds-down",
        "hf_kvret/config.py",
        "return max(1, math.ceil(self.top_k * cold_len))",
        "return max(1, math.floor(self.top_k * cold_len))",
    ),
    Fault(
        "fork-overwrites-shared-rows",
        "hf_kvret/core/token_buffer.py",
        "self._fork_end = max(self._fork_end, self._end)",
        "self._fork_end = 0",
    ),
    Fault(
        "wrong-page",
        "hf_kvret/stores/paged.py",
        "first = sum(len(other) for other in self._chunks[:-1]) + start",
        "first = sum(len(other) for other in self._chunks[:-1])",
    ),
    Fault(
        "cropped-page-written-on",
        "hf_kvret/stores/paged.py",
        "self.length, self._tail = length, None",
        "self.length = length",
    ),
    Fault(
        "fork-writes-the-shared-page",
        "hf_kvret/stores/paged.py",
        "twin.length, twin._key_dim = self.length, self._key_dim",
        "twin.length, twin._key_dim, twin._tail = self.length, self._key_dim, self._tail",
    ),
    Fault(
        "slot-of-a-dropped-token-kept",
        "hf_kvret/stores/slots.py",
        "mask = self._token >= length",
        "mask = self._token > length",
    ),
    Fault(
        "ids-of-another-dtype",
        "hf_kvret/methods/flat/index.py",
        "return top_places(scores, keys.shape[1], cold.budget)",
        "return top_places(scores, keys.shape[1], cold.budget).long()",
    ),
    Fault(
        "padding-selected",
        "hf_kvret/methods/flat/index.py",
        'scores = scores.masked_fill(~cold.valid[:, None, None], float("-inf"))',
        "assert cold.valid is not None",
    ),
    Fault(
        "paris-blocks-not-mixed",
        "kernels/hf_kvret_kernels/paris/codes.py",
        "stride = int(0.618 * dim)",
        "stride = dim + 1",
    ),
    Fault(
        "paris-last-piece-of-a-code-not-estimated",
        "kernels/hf_kvret_kernels/paris/triton_rerank_wide.py",
        "for start in range(0, BYTES, PIECE):",
        "for start in range(0, BYTES - PIECE, PIECE):",
    ),
    Fault(
        "counts-of-dropped-keys-kept",
        "hf_kvret/methods/paris/index.py",
        "self._counts = self._counts - paris.count_centroids(",
        "paris.count_centroids(",
    ),
    Fault(
        "buffer-keeps-a-cropped-row",
        "hf_kvret/core/token_buffer.py",
        "        self.crop(start)\n        self.append(rows)",
        "        self.crop(start + 1)\n        self.append(rows)",
    ),
    Fault(
        "lists-name-dropped-tokens",
        "hf_kvret/methods/ctkvr/inverted_lists.py",
        "ids.masked_fill_(ids >= length, -1)",
        "ids.masked_fill_(ids > length, -1)",
    ),
    Fault(
        "dropped-codes-selected",
        "hf_kvret/methods/a2ats/index.py",
        "self._cold = min(self._cold, length)",
        "pass",
    ),
    Fault(
        "scale-forgotten",
        "kernels/hf_kvret_kernels/prompt_attention/naive.py",
        "q = query[:, :, first:last].float() * scale",
        "q = query[:, :, first:last].float()",
    ),
    Fault(
        "causal-off-by-one",
        "kernels/hf_kvret_kernels/prompt_attention/naive.py",
        "return torch.arange(start, stop, device=device) > last_key[:, None]",
        "return torch.arange(start, stop, device=device) > last_key[:, None] + 1",
    ),
    Fault(
        "soft-cap-not-scaled-back",
        "kernels/hf_kvret_kernels/soft_cap.py",
        "scores.div_(cap).tanh_().mul_(cap)",
        "scores.div_(cap).tanh_()",
    ),
    Fault(
        "log-of-another-base",
        "kernels/hf_kvret_kernels/merge/naive.py",
        "peak + mass.log()",
        "peak + mass.log2()",
    ),
    Fault(
        "mean-of-the-group-for-the-best",
        "kernels/hf_kvret_kernels/relevance/naive.py",
        "return log_shares(scores).view(B, heads, Hq // heads, Q, n).amax(dim=2)",
        "return log_shares(scores).view(B, heads, Hq // heads, Q, n).mean(dim=2)",
    ),
    Fault(
        "duplicates-kept",
        "kernels/hf_kvret_kernels/centroid/naive.py",
        "mask &= marks.gather(3, tokens) == places",
        "pass",
    ),
    Fault(
        "codes-packed-the-other-way-round",
        "kernels/hf_kvret_kernels/higgs/packing.py",
        "return ((words.unsqueeze(-1) >> shifts) & ((1 << code_bits) - 1)).flatten(-2)",
        "return ((words.unsqueeze(-1) >> shifts.flip(0)) & ((1 << code_bits) - 1)).flatten(-2)",
    ),
    Fault(
        "rotated-the-wrong-way",
        "model_patches/hf_kvret_model_patches/rope.py",
        "pair = first * cos - second * sin, second * cos + first * sin",
        "pair = first * cos + second * sin, second * cos - first * sin",
    ),
    Fault(
        "latent-rows-turned-at-their-start",
        "model_patches/hf_kvret_model_patches/rope.py",
        "cut = x.shape[-1] - self.rotary_dim if self.last else self.rotary_dim",
        "cut = self.rotary_dim",
    ),
    Fault(
        "queries-of-groups-at-other-positions",
        "hf_kvret/methods/a2ats/index.py",
        "positions = positions.repeat_interleave(query.shape[2] // positions.shape[1], dim=1)",
        "positions = positions.repeat(1, query.shape[2] // positions.shape[1])",
    ),
    Fault(
        "calibrated-with-queries-that-are-not-absorbed",
        "hf_kvret/methods/a2ats/calibrator.py",
        "rows = piece if heads is None else heads.absorb(piece)",
        "rows = piece",
    ),
    Fault(
        "damaged-block-accepted",
        "hf_kvret/io/tensor_file.py",
        'if self._check and f"{zlib.crc32(block):08x}" != digits:',
        'if self._check and f"{zlib.crc32(block):08x}" == "":',
    ),
    Fault(
        "unfinished-files-of-broken-saves-stay",
        "hf_kvret/io/folder.py",
        "older = versioned.fullmatch(name) or unfinished.fullmatch(name) or name in obsolete",
        "older = versioned.fullmatch(name) or name in obsolete",
    ),
    Fault(
        "saved-ids-out-of-range-accepted",
        "hf_kvret/core/form.py",
        "check_range(name, ids, -1, end - 1)",
        "check_range(name, ids, -1, end)",
    ),
    Fault(
        "short-last-chunk-retrieves",
        "hf_kvret/integration/prompt_chunks.py",
        "if length % size == 0 or length % size > max_draft:",
        "if length % size == 0 or length % size >= max_draft:",
    ),
    Fault(
        "failed-call-leaves-the-model-switched",
        "hf_kvret/registry.py",
        "if failed and call.switched and not is_served(model):",
        "if False:",
    ),
    Fault(
        "written-weights-unseen",
        "hf_kvret/integration/projection.py",
        "torch.equal(_bits(one), _bits(two))",
        "one.data_ptr() != two.data_ptr()",
    ),
    Fault(
        "dropout-kept",
        "hf_kvret/integration/projection.py",
        "if not known or module.training or _is_hooked(module):",
        "if not known or _is_hooked(module):",
    ),
    Fault(
        "selected-tokens-count-twice",
        "kernels/hf_kvret_kernels/rest_tokens/naive.py",
        "left = means.counts[:, None, None] - _selected_counts(ids, tokens, means.block_len)",
        "left = means.counts[:, None, None].expand(batch, ids.shape[1], queries, tokens)",
    ),
    Fault(
        "sinks-counted-as-rest",
        "hf_kvret/core/rest.py",
        "return marks.scatter_(1, places.masked_fill(outside, length), False)[:, :length]",
        "return marks[:, :length]",
    ),
    Fault(
        "means-of-other-rows",
        "hf_kvret/core/rest.py",
        "        super().reorder(rows)\n        self._means = {}",
        "        super().reorder(rows)",
    ),
    Fault(
        "cropped-tokens-stay-in-the-rest",
        "hf_kvret/core/regions.py",
        "            self.rest.crop(cold)",
        "            pass",
    ),
    Fault(
        "ids-behind-the-last-token",
        "hf_kvret/stores/paged.py",
        "                self._value_in_key,\n                self.length,\n",
        "                self._value_in_key,\n                None,\n",
    ),
    Fault(
        "ids-below-none",
        "kernels/hf_kvret_kernels/ids.py",
        "if not least <= wrong < count:",
        "if not wrong < count:",
    ),
    Fault(
        "triton-follows-the-id-behind-the-last",
        "kernels/hf_kvret_kernels/_triton_rows.py",
        "return ids, ids < tokens.to(tl.uint32)",
        "return ids, ids <= tokens.to(tl.uint32)",
    ),
    Fault(
        "triton-counts-any-code",
        "kernels/hf_kvret_kernels/codebook/triton_lookup.py",
        "return codes, codes < codewords",
        "return codes, token_mask",
    ),
    Fault(
        "wrong-ids-of-nobody",
        "hf_kvret/core/index.py",
        'return error.by(f"the index {type(index).__name__}.{method}")',
        "return error",
    ),
    Fault(
        "beams-keep-their-tokens",
        "hf_kvret/cache.py",
        "        self.tokens.reorder(beam_idx)\n",
        "",
    ),
    Fault(
        "another-document-accepted",
        "hf_kvret/integration/prompt_check.py",
        "    if difference is not None:",
        "    if False:",
    ),
    Fault(
        "another-adapter-accepted",
        "hf_kvret/integration/identity.py",
        "if hashes[0] == hashes[1]:",
        "if True:",
    ),
    Fault(
        "tokens-of-replayed-steps-unseen",
        "hf_kvret/replay/graph.py",
        "if len(tokens) <= start:",
        "if False:",
    ),
)
