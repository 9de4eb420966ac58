"""Compiling, loading and launching kernels, and evaluating operations in torch."""
