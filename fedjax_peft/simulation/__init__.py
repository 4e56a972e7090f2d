"""Simulations: rounds of a federated algorithm with evaluation, costs, records and resume."""
