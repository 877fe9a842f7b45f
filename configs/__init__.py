"""One file per recipe; its docstring gives the command, the source and the expected result."""
