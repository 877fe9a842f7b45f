"""From the command line to a started run."""
