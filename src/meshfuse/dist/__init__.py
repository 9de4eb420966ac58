"""Meshes, shards and the collectives that move them."""
