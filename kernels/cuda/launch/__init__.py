"""How kernels are launched: sizes, dependent launches, warp pipelines, tapes of launches."""
