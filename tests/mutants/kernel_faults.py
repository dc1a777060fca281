"""Faults in the kernels and in the patches of transformers."""

from __future__ import annotations

from fault import Fault

FAULTS = (
    Fault(
        "paris-blocks-not-mixed",
        "kernels/hf_kvret_kernels/paris/codes.py",
        "stride = int(0.618 * dim)",
        "stride = dim + 1",
    ),
    Fault(
        "paris-last-chunk-of-a-code-not-estimated",
        "kernels/hf_kvret_kernels/paris/triton.py",
        "for start in range(0, BYTES, CHUNK):",
        "for start in range(0, BYTES - CHUNK, CHUNK):",
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
        "mask &= marks.gather(3, tokens) == indices",
        "pass",
    ),
    Fault(
        "codes-packed-the-other-way-round",
        "kernels/hf_kvret_kernels/higgs/naive.py",
        "return ((words.unsqueeze(-1) >> shifts) & ((1 << code_bits) - 1)).flatten(-2)",
        "return ((words.unsqueeze(-1) >> shifts.flip(0)) & ((1 << code_bits) - 1)).flatten(-2)",
    ),
    Fault(
        "rotated-the-wrong-way",
        "model_patches/hf_kvret_model_patches/rope.py",
        "(first * cos).addcmul_(second, sin, value=-1),",
        "(first * cos).addcmul_(second, sin),",
    ),
    Fault(
        "latent-rows-turned-at-their-start",
        "model_patches/hf_kvret_model_patches/rope.py",
        "cut = x.shape[-1] - self.rotary_dim if self.last else self.rotary_dim",
        "cut = self.rotary_dim",
    ),
    Fault(
        "selected-tokens-count-twice",
        "kernels/hf_kvret_kernels/mean_tokens.py",
        "left = self.counts[:, None, None] - self._selected_counts(ids)",
        "left = self.counts[:, None, None].expand(*ids.shape[:3], -1)",
    ),
    Fault(
        "ids-below-none",
        "kernels/hf_kvret_kernels/ids.py",
        "if not least <= wrong < count:",
        "if not wrong < count:",
    ),
    Fault(
        "triton-follows-the-id-behind-the-last",
        "kernels/hf_kvret_kernels/_triton_shared.py",
        "return ids, ids < tokens.to(tl.uint32)",
        "return ids, ids <= tokens.to(tl.uint32)",
    ),
    Fault(
        "triton-counts-any-code",
        "kernels/hf_kvret_kernels/codebook/triton.py",
        "return codes, codes < codewords",
        "return codes, token_mask",
    ),
)
