"""What needs a GPU: checks of bits, which pytest runs, and programs, which print times.

    pytest -m gpu tests/gpu [-k gemm]            the checks of one GPU (`test_bits.py`)
    python -m tests.gpu.ROOM.PROGRAM             one program; its docstring says what it takes
    torchrun --nproc-per-node 2 -m tests.gpu.exchange.peer     a program for several GPUs

Rooms and their programs (a room's other files are parts of these, or of the checks):

    attention    attention, rotation, stored keys     decode, prefill, times
    gemm         products, folds, norms               columns, rows, sustained, times,
                                                      warp_specialised
    experts      the experts' kernels                 times
    sampling     the sampler's kernels                times; for several GPUs: shares
    exchange     sums and columns between GPUs        for several: columns, mpi_cuda, nodes, peer
    engine       the whole engine: bits, accuracy     accuracy, approximate, prefix, weights; for
                                                      several: served_update, trl_server
    speed        the whole engine: times              cold_start, draft_times, drafts_ahead,
                                                      step_tokens, tails
    lib          what they share
"""
