"""A study on Weights & Biases: its runs, one summary run, and a workspace."""
