"""The policy and its update: packing, log-probs and entropies in chunks, the optimiser, checkpoints, and the loop."""
