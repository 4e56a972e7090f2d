"""From the simulation to real clients: the same rounds, with clients on machines of their own."""

from fedjax_peft.deploy.nodes import flower

__all__ = ["flower"]
