"""Reports of runs and of partitions: tables, figures and pages."""
