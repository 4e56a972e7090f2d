"""Reports of runs: tables, comparisons, figures and pages."""
