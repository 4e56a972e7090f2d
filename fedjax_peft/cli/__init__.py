"""The command line ``fedjax-peft``."""
