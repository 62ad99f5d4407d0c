"""Reinforcement learning as pure functions of arrays: returns, advantages, importance ratios, losses, aggregation,
diagnostics.

Nothing here is jitted, holds state or draws random numbers; `train` puts the pieces together:

    advantages [P, G] -> to_tokens [B, L] -> LOSSES[name] [B, L] -> aggregate (sum, denominator) -> divide, once, last
"""
