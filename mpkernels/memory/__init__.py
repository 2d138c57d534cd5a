"""Memory: reports on a training step's memory, and the largest batch size that fits."""
