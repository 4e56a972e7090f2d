"""Where the arrays of a session are: the mesh of devices, split weights, several processes."""
