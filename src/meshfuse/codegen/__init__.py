"""Printing a kernel as source text for one target."""
