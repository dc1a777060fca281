"""The laboratory: what measures, tunes, plans and learns. The library never imports it."""
