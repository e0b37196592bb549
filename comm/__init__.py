"""How ranks exchange bits: worlds (solo, torch.distributed, MPI) and the start-up agreement."""
