"""What a round is measured by: representations, drift, spectra, aggregation error."""
