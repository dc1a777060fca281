"""``hf-kvret selftest``: does what is installed here compute what it should?"""
