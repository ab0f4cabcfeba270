"""The model being trained: weights, packed forwards, the optimiser, one update; whole or sharded over processes."""
