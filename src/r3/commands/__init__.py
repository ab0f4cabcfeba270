"""Commands that join several rooms; `r3.cli` loads them when they are called."""
