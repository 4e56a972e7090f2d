"""The round engine: plan, lanes, and the round as one program."""
