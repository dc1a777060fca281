"""RULER: 13 tasks that hide what is asked for in a context of any length."""
