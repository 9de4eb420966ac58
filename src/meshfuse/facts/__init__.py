"""Analyses that answer questions about a fusion and change nothing."""
