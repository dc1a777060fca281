"""The patches of transformers that hf_kvret needs, all of them.

``generation`` has ``apply()`` and ``restore()``; ``taps`` is a context manager that leaves nothing
behind; ``rope`` and its neighbours patch nothing: they say how a model rotates.
"""
