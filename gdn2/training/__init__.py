"""Training: run config, loop, optimiser, parallelism, checkpoints, metrics."""
