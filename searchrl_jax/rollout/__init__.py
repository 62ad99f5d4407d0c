"""From tasks to trajectories: the slot engine, the loop that plays episodes, and the rows that a learner trains on."""
