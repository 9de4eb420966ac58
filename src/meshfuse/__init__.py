"""meshfuse: a fusion compiler for tensor programs on one device or a mesh."""

__version__ = "0.1.0"
