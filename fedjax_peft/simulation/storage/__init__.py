"""A run on disk: its folder, checkpoints and lock, what it depends on, and what trackers took."""
