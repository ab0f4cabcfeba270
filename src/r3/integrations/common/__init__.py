"""What every adapter needs: a trainer's rows as verified groups, what was decided about them, and the buffer's file."""
