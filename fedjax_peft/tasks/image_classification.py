"""Classification of images, with the loss and the metrics of texts."""

from fedjax_peft.contracts.part import part
from fedjax_peft.data.encoders.pixels import PIXELS
from fedjax_peft.tasks.base import Task, check_labels
from fedjax_peft.tasks.classification import classification


@part
def image_classification() -> Task:
    """Classification of images: one label for each.

    It is :func:`fedjax_peft.tasks.classification`, whose batches have uint8 ``pixel_values``
    ``[batch, channels, height, width]``.
    """
    return classification()._replace(
        name="image_classification", encoder=PIXELS, inputs=None, check=_CHECK
    )


_CHECK = check_labels("image_classification")
