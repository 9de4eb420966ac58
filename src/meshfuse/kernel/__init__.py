"""The kernel language: loops, buffers and statements, and the lowering that reaches it."""
