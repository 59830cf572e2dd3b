"""A study on Weights & Biases: its runs, one run about all of them, and a workspace that shows them."""
