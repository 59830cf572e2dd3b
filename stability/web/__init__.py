"""The web page: it composes commands, starts and stops sweeps, and follows runs. Files are its only state."""
