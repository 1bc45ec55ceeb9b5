"""The story that `make demo` tells: answers survive the loss of their node, and the books balance."""
