"""Multi-turn reinforcement learning of search agents in JAX, on TPU, GPU and CPU."""
