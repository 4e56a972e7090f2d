"""The engine: plans, a round as one program, sessions. Read ``reference`` first, then ``round``."""
