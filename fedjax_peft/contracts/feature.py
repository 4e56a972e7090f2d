"""What a run may combine an algorithm with, and an algorithm may refuse."""

import enum


class Feature(enum.Enum):
    """A feature of runs that not every algorithm can be combined with; its value is its name."""

    TRANSFORMS = "transforms"
    """Upload transforms: upload minus template must be what the client learned."""
    SERVER_TRANSFORMS = "transforms at the server"
    """Upload transforms that also change the mean of the uploads (``changes_aggregate``)."""
    DOWNLINK = "downlink transforms"
    """Upload transforms that also compress what the server broadcasts (``receive``)."""
    KEPT_OPTIMIZER = "kept optimizer"
    """Clients that keep their optimizer's state: gradients of earlier rounds must be of use."""
    NEW_FACTORS = "aggregators that factor anew"
    """Aggregators that ``refactors``, such as FRA: A and B have another basis in every round, so
    their entries must not be compared, mixed or accumulated over rounds."""
    CLIENT_RANKS = "client_ranks"
    """Clients of different LoRA ranks."""
    CLIENT_PRIVACY = "client privacy"
    """Noise on the sum of the uploads: the server must use nothing of a single client."""
    EXAMPLE_PRIVACY = "example privacy"
    """Clipped gradients of single examples: nothing else of an example must be used."""
    ATTACKS = "attacks on uploads"
    """Hostile clients that send another change of their leaves."""
    ASYNCHRONY = "asynchronous"
    """Asynchronous servers: clients of one aggregation have fetched different broadcasts."""
