"""Named trees, random keys, roles of leaves and linear algebra, for all of the core."""
