"""`python -m r3`, the same as the `r3` command."""

import sys

from r3.cli import main

sys.exit(main())
