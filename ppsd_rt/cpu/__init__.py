"""The C++ backend, and what it knows of this machine."""
