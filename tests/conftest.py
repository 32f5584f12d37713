"""One thread a process, as `make test` has it: with more, sums of floats are added up in an order that depends on the machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
