"""What verl loads through the entry point `verl.plugins`: importing this registers trainer, estimator and rewards.

verl drops the errors of plugins (a line at level debug), after which `r3_sync` would just be an unknown trainer. So
they are said aloud here.
"""

from __future__ import annotations

import sys

from r3.integrations.verl import FIX, TRAINER, check_version

try:
    check_version()
    import r3.integrations.verl.reward
    import r3.integrations.verl.v1  # noqa: F401  # all register what they define
except Exception as error:
    message = f"r3: its verl plugin did not load, so verl does not know trainer_mode={TRAINER}"
    print(f"{message}: {type(error).__name__}: {error}; to mend it: {FIX}", file=sys.stderr, flush=True)
    raise
