"""What clients keep between rounds, where it does not stay on the devices: memory or files."""
