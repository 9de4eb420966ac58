"""Rewrites from one fusion to another, each with the facts it needs as arguments."""
