"""``hf-kvret tune``: which method, store, budget and rest suit a model and a text of the user's.

``variants`` says what is tried, ``windows`` where in the text, ``measuring`` how, ``choosing`` what
goes on and what is chosen, ``showing`` how that looks; ``command`` puts them together.
"""
