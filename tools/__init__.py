"""What made the bundled models and the results pages: in the repository, not in the wheel."""
