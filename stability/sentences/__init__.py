"""Sentence embeddings of trained models: encoding, search, clusters, and export."""
