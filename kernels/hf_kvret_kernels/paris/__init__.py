"""ParisKV's operations: compact codes of keys, and a two-stage search over them.

A key becomes *signs* (one bit a coordinate) and a *record*: magnitudes (three bits a coordinate)
and a weight for each subspace. Stage 1 reads the signs alone: candidates are the tokens with the
most points, by ``naive.collide``. Stage 2 estimates their inner products from signs and records.
``search`` is both.

Paper: ParisKV, sections 4.1 and 4.2. Dimensions: B batch, H kv heads, Q queries at once, G query
tables of a kv head (1 after a mean over the group, or the group's size), n tokens, D head dim,
P >= D the length of a rotated vector (``rotated_dim``), m = 8 coordinates of a subspace,
S = P / m subspaces, C candidates.
"""

from hf_kvret_kernels.paris.codes import (
    MAX_HEAD_DIM,
    ParisCodes,
    SearchCall,
    code_weights,
    has_similarities,
    rotated_dim,
)
from hf_kvret_kernels.paris.encoding import (
    decode,
    encode,
    magnitude_levels,
    random_signs,
    scaled_signs,
)
from hf_kvret_kernels.paris.naive import rotate
from hf_kvret_kernels.paris.selection import (
    count_centroids,
    search,
    search_unchecked,
    share_units,
    tier_shares,
)

__all__ = [
    "MAX_HEAD_DIM",
    "ParisCodes",
    "SearchCall",
    "code_weights",
    "count_centroids",
    "decode",
    "encode",
    "has_similarities",
    "magnitude_levels",
    "random_signs",
    "rotate",
    "rotated_dim",
    "scaled_signs",
    "search",
    "search_unchecked",
    "share_units",
    "tier_shares",
]
