"""One file = one recipe; its docstring gives the command, the source and the expected result."""
