"""Keys and values at 2 to 4 bits a number: a codec, and attention over coded rows.

``HiggsCodec`` is the codec of AQUA-KV: a signed Hadamard transform, then pairs rounded to a grid.
Codes are packed into bytes on the device. ``gather_attention`` reads chosen rows of a paged store
as they are kept, ``CodedRows``.

Paper: AQUA-KV, section 3.3. Dimensions: B batch, H KV heads, Hq query heads, Q queries at once,
K selected rows, W numbers of a row that is encoded.
"""

from hf_kvret_kernels.higgs.codec import Coded, HiggsCodec
from hf_kvret_kernels.higgs.coded_rows import CodedRows

__all__ = ["Coded", "CodedRows", "HiggsCodec"]
