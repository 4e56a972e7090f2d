"""Config files: their keys, presets, and the runs that they describe."""
