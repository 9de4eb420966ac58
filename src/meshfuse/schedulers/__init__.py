"""Heuristics that choose how a group's loops are split, ordered and bound."""
