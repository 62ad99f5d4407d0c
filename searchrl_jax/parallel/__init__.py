"""Meshes, and the rules that turn logical axis names into placements on them."""
