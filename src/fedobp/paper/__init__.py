"""The paper's experiments, one command each: runs, tables, figures, and the published numbers beside the measured."""
