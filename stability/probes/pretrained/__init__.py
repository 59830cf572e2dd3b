"""Probe pretrained Hugging Face models on the user's own text."""
