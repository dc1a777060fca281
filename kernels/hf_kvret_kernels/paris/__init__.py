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
    MAX_HEAD_DIM as MAX_HEAD_DIM,
    ParisCodes as ParisCodes,
    SearchCall as SearchCall,
    code_weights as code_weights,
    has_similarities as has_similarities,
    rotated_dim as rotated_dim,
)
from hf_kvret_kernels.paris.encoding import (
    decode as decode,
    encode as encode,
    magnitude_levels as magnitude_levels,
    random_signs as random_signs,
    scaled_signs as scaled_signs,
)
from hf_kvret_kernels.paris.naive import rotate as rotate
from hf_kvret_kernels.paris.selection import (
    count_centroids as count_centroids,
    search as search,
    search_unchecked as search_unchecked,
    share_units as share_units,
    tier_shares as tier_shares,
)
