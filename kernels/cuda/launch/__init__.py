"""How kernels are launched: dependent launches, warp pipelines, recording, compilation."""
