"""Looking at a run directory: in a browser (`r3 view`), as one file (`--export`), in a terminal (`r3 show`).

Nothing here writes into a run directory or takes a lock, so a run in progress is not disturbed. Nothing imports torch.
"""
