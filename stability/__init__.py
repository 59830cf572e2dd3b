"""The laboratory finds how far the learning rate can be pushed, and what breaks first: train, measure α_max, print the
tables."""

__version__ = "0.1.0"
