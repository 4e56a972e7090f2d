"""What a run needs before it begins: memory, arithmetic and traffic, here and on other devices."""
