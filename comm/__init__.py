"""How ranks exchange bits: worlds (solo, threads, torch.distributed) and the start-up agreement."""
