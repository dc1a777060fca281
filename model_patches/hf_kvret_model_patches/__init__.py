"""The patches of transformers that hf_kvret needs, all of them.

``generation`` has ``apply()`` and ``restore()``; ``rope`` and its neighbours patch nothing: they
say how a model rotates.
"""
