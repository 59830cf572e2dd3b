"""Pretrained models of Hugging Face on the user's own text."""
