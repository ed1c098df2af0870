"""Settings of the whole test run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: thread pools that fight over cores spin
