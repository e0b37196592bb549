"""What the processes of checks need not import or hash any more (`suite.py`); no GPU is touched."""

import tests.gpu.test_bits  # noqa: F401
from tpdet.kernels.cuda.compile.pool import hash_triton
from tpdet.kernels.cuda.compile.recording import hash_callees_first

hash_triton()
hash_callees_first()  # a kernel has one key in all of them
