"""What needs a GPU: checks of bits and of accuracy. `scripts/gpu_times` has the programs of times.

    pytest -m gpu tests/gpu [-k gemm]            the checks of one GPU (`test_bits.py`)
    python -m tests.gpu.ROOM.PROGRAM             one program; its docstring says what it takes
    torchrun --nproc-per-node 2 -m tests.gpu.exchange.peer     a program for several GPUs

Rooms and their programs (a room's other files are parts of these, or of the checks):

    attention    attention, rotation, stored keys     far_apart
    gemm         products, folds, norms               columns (another table), rows,
                                                      warp_specialised
    sampling     the sampler's kernels                for several GPUs: shares
    exchange     sums and columns between GPUs        for several: columns, mpi_cuda, nodes, peer
    engine       the whole engine: bits, accuracy     accuracy, approximate, pooling, prefix,
                                                      weights; for several: served_update,
                                                      trl_server
    experts, linear, nn                               checks alone
    lib          what they share
"""
