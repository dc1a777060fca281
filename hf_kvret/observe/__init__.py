"""Subscribers to the steps of a layer, and reports on what a cache holds and did."""
