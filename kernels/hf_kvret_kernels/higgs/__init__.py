"""Keys and values at 2 to 8 bits a number: codecs, and attention over coded rows.

``HiggsCodec`` is the codec of AQUA-KV: a signed Hadamard transform, then pairs rounded to a grid.
``MinMaxCodec`` rounds to nearest between a group's smallest and largest number. Both are packed
into bytes on the device. ``attend`` reads chosen rows of a paged store as they are kept.

Paper: AQUA-KV, section 3.3. Dimensions: B batch, H KV heads, Hq query heads, Q queries at once,
K selected rows, W numbers of a row that is encoded.
"""

from hf_kvret_kernels.higgs.attention import attend, attend_partials
from hf_kvret_kernels.higgs.codec import Codec, Coded, HiggsCodec, MinMaxCodec

__all__ = ["Codec", "Coded", "HiggsCodec", "MinMaxCodec", "attend", "attend_partials"]
