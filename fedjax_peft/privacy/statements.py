"""What an accountant assumes, in words."""

from fedjax_peft.contracts import Federation
from fedjax_peft.privacy.accounting import Neighbours, _suitable, _without_replacement


def example_in_words(federation: Federation) -> str:
    """Returns sentences on the neighbours, the sampling and the trust of example-level privacy."""
    turns = (
        "in each of its client's turns"
        if federation.sampling == "round_robin"
        else "in every round"
    )
    if federation.batch_sampling == "poisson":
        drawn = (
            "Each local step draws each example of the client independently (Poisson sampling),"
            f" {federation.batch_size} on average, which amplifies the privacy; nobody may learn"
            " which ones."
        )
    else:
        drawn = (
            f"An example is in {federation.most_passes} batches of a round at most (shuffled"
            " passes), and nothing is amplified by sampling."
        )
    several = ""
    if federation.gradients_per_step > 1:
        several = f" A step takes up to {federation.gradients_per_step} gradients of its batch."
    return (
        "Example-level differential privacy of everything that the clients send and keep. It"
        " compares data sets of which one has an empty example, which contributes nothing, in the"
        " place of an example of the other (zero-out). It counts as if the client took part"
        f" {turns}. {drawn}{several} Every client adds the noise itself, so that no server has to"
        " be trusted. The recorded training metrics, such as the loss, have no noise and are not"
        " part of the guarantee."
    )


def composition_in_words(federation: Federation, neighbours: Neighbours | None = None) -> str:
    """Returns two sentences on the neighbours and on the sampling of a client-level guarantee."""
    neighbours = _suitable(federation, neighbours)
    compared = {
        "add_or_remove_one": "with and without one client (add or remove one)",
        "replace_special": "in which one client sends zeros instead (zero-out)",
        "replace_one": "in which one client has other data (replace one)",
    }[neighbours]
    return f"It compares federations {compared}. {_sampling_in_words(federation, neighbours)}"


def _sampling_in_words(federation: Federation, neighbours: Neighbours) -> str:
    clients, drawn = f"{federation.clients:,}", f"{federation.per_round:,}"
    if federation.sampling == "poisson":
        share = f"{federation.sampling_probability:.4g}"
        return (
            f"Each round draws each of the {clients} clients with probability {share} (Poisson"
            " sampling), which amplifies the privacy; nobody may learn who was drawn."
        )
    if _without_replacement(federation, neighbours):
        return (
            f"Each round draws {drawn} of the {clients} clients without replacement, which"
            " amplifies the privacy; nobody may learn who was drawn."
        )
    return turns_in_words(federation)


def turns_in_words(federation: Federation) -> str:
    """Returns a sentence on the rounds that count for a guarantee without amplification."""
    if federation.sampling == "round_robin":
        clients, drawn = f"{federation.clients:,}", f"{federation.per_round:,}"
        return (
            f"The clients take turns, {drawn} of {clients} in a round. Only the rounds in which a"
            " client takes part count; nothing is amplified by sampling."
        )
    return (
        "Every round counts, as if one client took part in all of them; nothing is amplified by"
        f" sampling ({federation.sampling!r})."
    )
