"""A run directory to look at: in a browser (`r3 view`), as one file (`--export`), in a terminal (`r3 show`).

Everything here reads: the run's files, and the buffer through its read side. Nothing is written into a run directory,
and no lock is taken, so a run in progress is not slowed down. Nothing here imports torch.
"""
