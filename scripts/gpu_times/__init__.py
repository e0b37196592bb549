"""Times on GPUs, printed: `python -m scripts.gpu_times.FOLDER.PROGRAM`, from the repository's root.

    kernels     one kernel or product beside the library's and the floor: attention, columns,
                decode, experts, fp8_pages, gemm, linear, linear_operands, packed, packed_experts,
                prefill, rows, sampling, sustained, warp_specialised
    exchange    sums, columns and samples between GPUs, by torchrun: columns, nodes, peer, samples
    engine      the whole engine: cold_start, draft_steps, drafts_ahead, generate, step_tokens,
                tails

A program's text says what it takes. Bits are checked in `tests/gpu`, whose cases the programs time:
they import its data, and nothing in `tests/gpu` imports them.
"""
