"""What scripts call once they have dropped a model."""

import gc
import sys


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what dropped models hold: their ranks end, and the GPU's memory is given back.

    shutdown_ray: there is no Ray; accepted and left alone. A model that is still held stays.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
