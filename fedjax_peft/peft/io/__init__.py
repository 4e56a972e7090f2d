"""Adapters in the file formats of other libraries: Hugging Face PEFT, AdapterHub, transformers.

``export`` writes all formats (``hfpeft`` and ``adapterhub`` hold the formats themselves),
``pretrained`` reads adapters, and ``describe`` tells a user how to load an export.
"""
