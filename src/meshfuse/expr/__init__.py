"""Integer and boolean expressions over symbols: the language of extents and guards."""
