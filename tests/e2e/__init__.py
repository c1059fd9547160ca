"""The agent as a process, on real files and sockets."""
