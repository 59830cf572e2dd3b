"""How far can the learning rate be pushed, and what breaks first: train, measure α_max, print the tables."""

__version__ = "0.1.0"
