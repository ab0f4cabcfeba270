"""One file per command: its options (`add_arguments`) and what it does (`run`).

Each imports what it needs when it runs, so that `r3 --help` answers at once.
"""
