"""H2O: the heavy hitters of the attention so far are kept, all other cold tokens are given up."""

from hf_kvret.methods.h2o.index import H2OCache, H2OConfig, H2OIndex

__all__ = ["H2OCache", "H2OConfig", "H2OIndex"]
