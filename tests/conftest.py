"""What must not depend on the machine: threads and open files."""

import os
import resource

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make test` has it: with more, sums of floats are added up in other orders
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))  # both ends of 64 connections are in one process
