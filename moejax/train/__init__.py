"""State, optimizer, step, loop, checkpoints, metrics, guards and the start of processes."""
