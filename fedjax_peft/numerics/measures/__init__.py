"""Measures of a round: representations, drift, spectra, aggregation error."""
