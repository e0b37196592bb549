"""From a request's body to requests the engine can run; large ones in processes apart."""
