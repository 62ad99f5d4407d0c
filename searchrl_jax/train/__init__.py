"""From rollouts to new weights: the loss, the optimiser, behaviour cloning, checkpoints, metrics and the loop."""
