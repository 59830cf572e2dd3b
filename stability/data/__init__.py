"""Data sources, one file each: what they read becomes a `Corpus`, two fingerprinted token arrays (see ``_base`` and
``_cache``)."""
